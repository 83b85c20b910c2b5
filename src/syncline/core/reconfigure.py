"""Reconfiguration: decides the next generation and what servers are told.

`coordinator/reconfigure.py` carries it out: `Planner.begin`, journal, Prepare, `Planner.install`, Install,
`Planner.settle`, journal, `Planner.finish`. A `Reconfiguration` is called `change` there. It *moves* if a server died
or primaries change: servers then drop open commits, and workers replay them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from syncline.core.members import Member, Standing, merged
from syncline.core.membership import Membership
from syncline.core.replica_sets import PlacementPlan, ReplicaSet, plan, rehome, without
from syncline.core.ring import partner_of, settled_by
from syncline.core.rounds import LOOP, RoundMembership, RoundMemberships
from syncline.core.slice_state import Identity, life_of
from syncline.core.units import counted
from syncline.core.wire.control import Entered, Install, Prepare, Prepared
from syncline.errors import ConfigError


class Planner:
    """Plans one reconfiguration at a time. Deaths and entries come before placement plans.

    Backups of a dead server's slices are promoted before this, by `Membership.evict`.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership, self.state = membership, membership.state
        self.entering: dict[str, int] = {}  # workers that want to take part -> how often they have entered before
        self._entering_phases: dict[str, int] = {}  # phases of the loops that they are in
        self.retiring: set[str] = set()  # servers that want to leave
        self.strangers: set[str] = set()  # servers that do not know the layout yet
        self.moves = False  # a server died, or primaries are about to change: replica sets are not announced now
        self._places: dict[str, tuple[int, int, Entered]] = {}  # entered workers: incarnation, entry, answer
        self._server_is_out = False  # since the current reconfiguration began
        self._said: set[Loss] = set()  # each loss is reported once
        self._before: dict[int, ReplicaSet] | None = None  # the replica sets before a plan, until it is installed

    def resume(self) -> None:
        """Continues after an earlier coordinator, which may have died during a reconfiguration."""
        self.moves = self.state.is_changing
        if self.state.replica_sets_before:
            self._keep_complete_replicas(self.state.replica_sets_before)
        self.strangers.update(self._membership.servers())

    # -- what happens -------------------------------------------------------------------------------------

    def is_in(self, member: Member) -> None:
        if member.role == "server":
            self.strangers.add(member.name)

    def is_out(self, member: Member) -> None:
        """The member is dead or counts as dead; the membership is already updated."""
        self.has_left(member.name)
        self.strangers.discard(member.name)
        if member.role == "server" and self._membership.formed:
            self.moves = self._server_is_out = True  # also for a backup: its primaries wait for the new replica sets
            if self.state.replica_sets_before:
                self._keep_complete_replicas(self.state.replica_sets_before)
            elif self._before is not None:
                # for slices that it was to take over, others still have everything
                self._restore_replica_sets(self._before)

    def has_left(self, name: str) -> None:
        """The member has left: drops its requests."""
        self.entering.pop(name, None)
        self._entering_phases.pop(name, None)
        self.retiring.discard(name)

    def enter(self, name: str, incarnation: int, entry: int, phase: int = -1) -> Entered | None:
        """A worker outside of rounds is about to push. Returns its position if it asks again."""
        *known, place = self._places.get(name, (0, 0, None))
        if place is not None and known == [incarnation, entry]:
            return place
        self.entering[name], self._entering_phases[name] = entry, phase
        return None

    def retire(self, name: str) -> None:
        """A server asks to leave. The last one is refused, since no other server could take its slices."""
        staying = [server for server in self._membership.servers() if server not in self.retiring | {name}]
        if not staying and self.state.replica_sets:
            raise ConfigError(f"{name} is the last server: its slices cannot go anywhere")
        if len(staying) < 2 and self.state.replica_sets and self._may_stay(name):
            raise ConfigError(f"{name} stays: else only {staying[0]} would have its slices")
        self.retiring.add(name)

    def _may_stay(self, name: str) -> bool:
        """In a ring: its script has ended, and the job is not scaled down."""
        return self.state.config.is_ring and partner_of(name) in self.state.finished

    # -- what to do next ----------------------------------------------------------------------------------

    @property
    def is_urgent(self) -> bool:
        """Whether a reconfiguration is needed at once, with the current replica sets."""
        state = self.state
        due = state.fencing or self.entering or self.moves or state.lost or state.is_changing
        return bool(self._membership.servers() and due)

    def plan(self, sizes: Mapping[int, int], slices: Collection[int]) -> PlacementPlan:
        """Plans the replica sets of these slices, which have values."""
        state = self.state
        replica_sets = [replica_set for number, replica_set in state.replica_sets.items() if number in slices]
        servers = [name for name in self._membership.servers() if name not in self.strangers]
        hosts = {name: state.members[name].host for name in servers}
        replicas = len(hosts) if state.config.is_ring else max(1, state.config.replicas)
        leaving = self.retiring & set(hosts)
        if state.config.is_ring and any(leaving.issuperset(replica_set.names) for replica_set in replica_sets):
            leaving = set()  # first the staying servers get everything; seeds come after this reconfiguration
        if len(set(hosts) - leaving) < 2:  # other servers have died since
            leaving = {name for name in leaving if not self._may_stay(name)}
        found = plan(replica_sets, sizes, hosts, replicas=replicas, leaving=leaving)
        if state.config.is_ring and found.seeds:
            names = sorted({name for replica_set in found.replica_sets for name in replica_set.names})
            found = dataclasses.replace(
                found, reason=f"{counted(len(found.replica_sets), 'slice')}, all on {', '.join(names)}"
            )
        return found

    def relieved(self) -> list[str]:
        """Servers that asked to leave and host nothing."""
        seated = {name for replica_set in self.state.replica_sets.values() for name in replica_set.names}
        return sorted(self.retiring - seated)

    # -- one change ---------------------------------------------------------------------------------------

    def begin(self, wanted: PlacementPlan | None, sizes: Mapping[int, int]) -> Reconfiguration | None:
        """The next generation, to be journaled before any server is told; None if the plan must wait."""
        state = self.state
        if wanted is not None:
            if self.is_urgent:
                return None
            self._before = dict(state.replica_sets)
            state.replica_sets_before = self._before if state.config.is_ring else {}
            self._take_replica_sets(wanted.replica_sets)
        if state.lost:
            self._take_replica_sets(rehome(state.replica_sets.values(), sizes, self._membership.servers()))
            self.moves = True
        self._server_is_out = False
        # From now on servers may count them: a worker that dies while entering must be fenced.
        self.entering = {name: self.entering[name] for name in sorted(self.entering) if name in state.members}
        entering = {name: state.members[name].incarnation for name in self.entering}
        staying = dict(state.entered)  # including those that enter again
        state.entered.update(entering)
        state.generation += 1
        state.is_changing = True
        return Reconfiguration(
            state.generation,
            {name: state.members[name].incarnation for name in self._membership.servers()},
            fenced={name: incarnation for name, (incarnation, _) in state.fencing.items()},
            entering=entering,
            replica_sets=list(state.replica_sets.values()),
            moves=self.moves,
            staying=staying,
            phase=state.phase,
            entering_phases={name: self._entering_phases.get(name, -1) for name in entering},
        )

    def _take_replica_sets(self, replica_sets: Collection[ReplicaSet]) -> None:
        known = self.state.replica_sets
        if self.state.config.is_ring or any(
            known[replica_set.slice].primary != replica_set.primary for replica_set in replica_sets
        ):
            self.moves = True
        known.update((replica_set.slice, replica_set) for replica_set in replica_sets)

    def take_back(self) -> None:
        """An open step cannot be replayed now: the plan waits. Journal afterwards."""
        if self._before is not None:  # else the death of a server has reverted it
            self._restore_replica_sets(self._before)
        self.moves = self.state.is_changing = self._server_is_out

    def _restore_replica_sets(self, before: Mapping[int, ReplicaSet]) -> None:
        """Reverts to the earlier replica sets. No server has installed the new ones, but all may have prepared
        them: backups that they do not name may have missed updates and are dropped.
        """
        kept = []
        for number, replica_set in before.items():
            now = self.state.replica_sets.get(number)
            if now is None:
                continue  # its segment was removed since
            kept.append(
                ReplicaSet(
                    number, replica_set.primary, tuple(name for name in replica_set.backups if name in now.names)
                )
            )
        self._reset_replica_sets(before, kept)

    def _keep_complete_replicas(self, before: Mapping[int, ReplicaSet]) -> None:
        """In a ring with an unfinished reconfiguration: joining servers may be incomplete, and leaving servers may
        have dropped their state. All others have everything.
        """
        both = [
            (number, [name for name in self.state.replica_sets[number].names if name in replica_set.names])
            for number, replica_set in before.items()
            if number in self.state.replica_sets
        ]
        self._reset_replica_sets(
            before, [ReplicaSet(number, names[0] if names else "", tuple(names[1:])) for number, names in both]
        )

    def _reset_replica_sets(self, before: Mapping[int, ReplicaSet], kept: Collection[ReplicaSet]) -> None:
        state, self._before = self.state, None
        state.replica_sets_before = {}
        named = {name for replica_set in kept for name in replica_set.names}
        replica_sets, lost = without(kept, named - set(state.members))
        state.replica_sets.update((replica_set.slice, replica_set) for replica_set in replica_sets)
        state.lost = lost + [number for number in state.lost if number not in before]  # registered since then

    def install(self, change: Reconfiguration) -> tuple[Install, list[Loss]]:
        """All servers have answered: the Install message, and the losses beyond what is guaranteed."""
        self._before = None
        losses = [loss for loss in change.torn() if loss not in self._said]
        self._said.update(losses)
        return change.install(self._membership.ordered()), losses

    def settle(self, change: Reconfiguration) -> None:
        """Every server has installed the generation: records which commits of fenced workers count. Journal
        afterwards; then release rounds, barriers and entries.
        """
        state = self.state
        state.replica_sets_before = {}
        clocks = {(name, incarnation): clock for name, incarnation, clock in change.settle()}
        for name, incarnation in change.fenced.items():
            if state.fencing.get(name, (0, ""))[0] == incarnation:
                del state.fencing[name]
            last, commits = state.settled.get(name, (0, 0))
            if incarnation > last:  # a reconfiguration that could not be journaled is settled again
                state.settled[name] = (incarnation, commits + clocks.get((name, incarnation), 0))
        state.is_changing = self._server_is_out

    def reopen(self) -> None:
        """Journaling failed: the reconfiguration is repeated."""
        self.state.is_changing = True

    def finish(self, change: Reconfiguration) -> dict[str, Entered]:
        """It is journaled: the workers that have entered, and their positions."""
        self.moves = self._server_is_out
        entered = [name for name in change.entering if name in self.state.entered and name in self.entering]
        places = {name: place for name, place in change.places().items() if name in entered}
        for name, place in places.items():
            self._places[name] = (change.entering[name], self.entering.pop(name), place)
        return places


#: Holds last this much longer if primaries change: servers that have installed it drop open commits, so others must
#: not go on.
MOVE_TIMES = 10.0
#: Holds last twice as long after each try that failed, at most this many times as long: on a starved machine Installs
#: would come too late every time.
MOST_TIMES = 16.0


class Loss(NamedTuple):
    """A loss beyond what is guaranteed: the affected worker, if known, and a description."""

    workers: tuple[Identity, ...]
    text: str


class Reconfiguration:
    """One step from a generation to the next: collects the servers' answers to Prepare, and makes the Install."""

    def __init__(
        self,
        generation: int,
        servers: Mapping[str, int],
        *,
        fenced: Mapping[str, int],
        entering: Mapping[str, int],
        replica_sets: Sequence[ReplicaSet],
        moves: bool,
        staying: Mapping[str, int] | None = None,
        phase: int = 0,
        entering_phases: Mapping[str, int] | None = None,
    ) -> None:
        """`servers` with their incarnations; `staying`: workers that already take part; `phase`: begun by the last
        barrier; `entering_phases`: phases of the loops of entering workers.
        """
        self.generation, self.servers = generation, dict(sorted(servers.items()))
        self.fenced, self.entering = dict(fenced), dict(entering)
        self.replica_sets, self.moves = list(replica_sets), moves
        self.staying, self.phase, self._entering_phases = dict(staying or {}), phase, dict(entering_phases or {})
        self.answers: dict[str, Prepared] = {}
        #: By worker: its clock at a boundary, and its commits between two boundaries.
        self.boundaries: dict[str, tuple[int, int]] = {}

    def prepare(self, num_failed: int = 0) -> Prepare:
        """`num_failed`: how many tries in a row have failed before."""
        servers = list(self.servers.items())
        times = min(2.0**num_failed, MOST_TIMES) * (MOVE_TIMES if self.moves else 1.0)
        return Prepare(self.generation, list(self.fenced.items()), self.replica_sets, self.moves, servers, times)

    def prepared(self, server: str, answer: Prepared) -> bool:
        """Takes a server's answer. Returns whether all have answered."""
        self.answers[server] = answer
        return len(self.answers) == len(self.servers)

    @property
    def num_orphans(self) -> int:
        return sum(answer.num_orphans for answer in self.answers.values())

    def settle(self) -> list[tuple[str, int, int]]:
        """The clock up to which a worker's commits count: the highest that any server has committed or any copy has.

        For fenced workers; for all workers if primaries change, since staged bytes do not move with a slice.
        """
        found, applied = [], self._applied()
        held = [answer.holds for answer in self.answers.values() if answer.holds is not None]
        if held:  # in a ring: what all survivors have or can reach
            reached = settled_by([{(n, i): clock for n, i, clock in answer} for answer in held])
            return [(n, i, reached.get((n, i), 0)) for n, i in {**self.staying, **self.fenced}.items()]
        settled = {**self.staying, **self.fenced} if self.moves else self.fenced
        for name, incarnation in settled.items():
            clocks = [s.clock for s in self._standings() if (s.name, s.incarnation) == (name, incarnation)]
            found.append((name, incarnation, max([applied.get((name, incarnation), 0), *clocks])))
        return found

    def _applied(self) -> dict[Identity, int]:
        """Every worker's latest step on any copy of any slice."""
        found: dict[Identity, int] = {}
        for answer in self.answers.values():
            for name, incarnation, clock in answer.clocks:
                found[name, incarnation] = max(clock, found.get((name, incarnation), 0))
        return found

    def torn(self) -> list[Loss]:
        """Removed workers whose last step is on some slices while others cannot reach it.

        A step that is open on all slices is no loss: it waits for its round, or is dropped everywhere.
        """
        applied, lacking = self._applied(), set()
        if any(answer.holds is not None for answer in self.answers.values()):
            return []
        lives = {life_of(*server) for server in self.servers.items()}
        for server, answer in self.answers.items():
            for name, incarnation, least, primary in answer.reach:
                follows = primary != life_of(server, self.servers[server]) and primary in lives
                is_out = self.staying.get(name) != incarnation
                if is_out and not follows and least < applied.get((name, incarnation), 0):
                    lacking.add((name, incarnation))
        return [
            Loss((who,), f"step {applied[who]} of {who[0]} is on some slices and not on others")
            for who in sorted(lacking)
        ]

    def _speaking(self) -> list[Prepared]:
        """Before any registration: all servers; then those that receive commits."""
        return [answer for answer in self.answers.values() if answer.is_primary or not self.replica_sets]

    def _standings(self) -> list[Standing]:
        return [standing for answer in self._speaking() for standing in answer.standings]

    def turn(self) -> tuple[int, int]:
        """The highest round that any server has opened; after a barrier, none yet."""
        return max(next_turn(self._standings()), (self.phase, 0))

    def back_at(self) -> int:
        """The position next to the slowest worker, the same on every server. While all rest, next to the most
        advanced one; otherwise a returning worker would wait for all the steps in between.
        """
        return max((_slowest(answer.standings) for answer in self._speaking()), default=0)

    def standings(self) -> list[Standing]:
        """The standings for all servers: of entering workers, or of all if primaries change."""
        stay = merged(answer.standings for answer in self._speaking())
        entering = [self._placed(stay.get(name), name, life) for name, life in self.entering.items()]
        if not self.moves:
            return entering
        kept = [s for s in stay.values() if not s.left and s.name not in self.fenced and s.name not in self.entering]
        # All servers that knew their standings are gone: their next commits start a new count.
        known = {(s.name, s.incarnation) for s in [*kept, *entering]}
        unknown = [Standing(n, i, phase=-1) for n, i in self.staying.items() if (n, i) not in known]
        return kept + entering + unknown

    def _placed(self, known: Standing | None, name: str, incarnation: int) -> Standing:
        """The standing of an entering worker: its next commit is in the round after all open ones.

        A worker in a loop joins the others in that loop; some may have left it for a later one.
        """
        clock = known.clock if known is not None and known.incarnation == incarnation else 0
        phase, number = self.turn()
        own = self._entering_phases.get(name, -1)
        if self.phase <= own < phase + LOOP:
            # Not at the loop's end, even if all others are there: from there no worker could pause in this loop.
            beside = [s for s in self._standings() if s.phase // LOOP == own // LOOP and not (s.left or s.fenced)]
            inside = [s.turn() for s in beside if not has_left_loop(s)]
            phase, number = max(inside, default=(own // LOOP * LOOP, 0))
        return Standing(name, incarnation, clock, phase, clock - number, position=self.back_at())

    def round_memberships(self) -> list[RoundMembership]:
        """With spare workers: all round memberships known to any server."""
        return RoundMemberships(
            round_membership for answer in self.answers.values() for round_membership in answer.round_memberships
        ).entries()

    def places(self) -> dict[str, Entered]:
        """For entering workers: the phase of their next commits, or their position."""
        back_at, step = self.back_at(), self.step()
        return {
            s.name: Entered(s.phase, back_at, step, self._num_void(s))
            for s in self.standings()
            if s.name in self.entering
        }

    def _num_void(self, entering: Standing) -> int:
        """Scripts with several optimizers make several commits per batch. The number of rounds until the others
        begin a batch, as the entering worker does.
        """
        phase, number = entering.turn()
        for s in self._standings():
            boundary, stride = self.boundaries.get(s.name, (0, 0))
            is_beside = s.turn()[0] == phase and not (s.left or s.fenced or s.inactive or s.name in self.entering)
            if stride > 1 and is_beside:
                made = s.clock + number - s.turn()[1]  # of that worker, when this one's first round begins
                return (boundary - made) % stride
        return 0

    def step(self) -> int:
        """The job's steps before the next round: applied and open ones."""
        applied = max((answer.num_updates for answer in self.answers.values()), default=0)
        return applied + max((answer.num_open for answer in self.answers.values()), default=0)

    def install(self, members: Sequence[Member]) -> Install:
        return Install(self.generation, list(members), self.settle(), self.standings(), self.round_memberships())


def _slowest(standings: Iterable[Standing]) -> int:
    there = [standing for standing in standings if not (standing.left or standing.fenced)]
    active = [standing.position for standing in there if standing.active]
    return min(active) if active else max((standing.position for standing in there), default=0)


def next_turn(standings: Iterable[Standing]) -> tuple[int, int]:
    """The highest open round of all these standings.

    Workers that have left their loop count only if there are no others: a round at the loop's end would wait for
    workers still in the loop, which may wait for it.
    """
    known = list(standings)
    inside = [s.turn() for s in known if not has_left_loop(s)]
    return max(inside or [s.turn() for s in known], default=(0, 0))


def has_left_loop(standing: Standing) -> bool:
    """Whether it rests at the loop's end."""
    return standing.inactive and standing.phase % LOOP == LOOP - 1
