"""From one generation to the next: what is decided, and what servers are told."""

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
    """One change at a time. Deaths and entries come before plans."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self.state = membership, membership.state
        self.entering: dict[str, int] = {}  # workers that want to take part; how often they have entered before
        self._stretches: dict[str, int] = {}  # of the loops that they are in
        self.retiring: set[str] = set()  # servers that want to leave
        self.strangers: set[str] = set()  # servers that do not know the layout yet
        self.moves = False  # primaries are about to change: nobody is told of replica sets now
        self._places: dict[str, tuple[int, int, Entered]] = {}  # who has entered: incarnation, which time, answer
        self._server_is_out = False  # since the change under way was begun
        self._said: set[Loss] = set()  # slices remember what was torn: it is said once
        self._before: dict[int, ReplicaSet] | None = (
            None  # the replica sets that a plan would change: until it is installed
        )

    def resume(self) -> None:
        """An earlier coordinator may have died within a change, and servers may have missed what it said."""
        self.moves = self.state.is_changing
        if self.state.replica_sets_before:
            self._seat_who_has_all(self.state.replica_sets_before)
        self.strangers.update(self._membership.servers())

    # -- what happens -------------------------------------------------------------------------------------

    def is_in(self, member: Member) -> None:
        if member.role == "server":
            self.strangers.add(member.name)

    def is_out(self, member: Member) -> None:
        """Dead, or counts as dead; the membership knows it already."""
        self.has_left(member.name)
        self.strangers.discard(member.name)
        if member.role == "server" and self._membership.formed:
            self.moves = self._server_is_out = True  # also where it was a backup only: who lost it waits for our word
            if self.state.replica_sets_before:
                self._seat_who_has_all(self.state.replica_sets_before)
            elif self._before is not None:
                self._restore_replica_sets(self._before)  # of what it was to take over, others still have everything

    def has_left(self, name: str) -> None:
        """It asks for nothing any more."""
        self.entering.pop(name, None)
        self._stretches.pop(name, None)
        self.retiring.discard(name)

    def enter(self, name: str, incarnation: int, entry: int, phase: int = -1) -> Entered | None:
        """A worker that takes part in no rounds is about to push; the place that it has already, if it asks again."""
        *known, place = self._places.get(name, (0, 0, None))
        if place is not None and known == [incarnation, entry]:
            return place
        self.entering[name], self._stretches[name] = entry, phase
        return None

    def retire(self, name: str) -> None:
        """A server wants to leave; not the last one, which has nobody to give its slices to."""
        staying = [server for server in self._membership.servers() if server not in self.retiring | {name}]
        if not staying and self.state.replica_sets:
            raise ConfigError(f"{name} is the last server: its slices cannot go anywhere")
        if len(staying) < 2 and self.state.replica_sets and self._may_stay(name):
            raise ConfigError(f"{name} stays: else only {staying[0]} would have its slices")
        self.retiring.add(name)

    def _may_stay(self, name: str) -> bool:
        """In a ring: its script has ended, and nobody wants it gone."""
        return self.state.config.is_ring and partner_of(name) in self.state.finished

    # -- what to do next ----------------------------------------------------------------------------------

    @property
    def is_urgent(self) -> bool:
        """Whether there is to be a change at once, with the replica sets as they are."""
        state = self.state
        due = state.fencing or self.entering or self.moves or state.lost or state.is_changing
        return bool(self._membership.servers() and due)

    def plan(self, sizes: Mapping[int, int], slices: Collection[int]) -> PlacementPlan:
        """What to do about the replica sets of these slices, which have values."""
        state = self.state
        replica_sets = [replica_set for number, replica_set in state.replica_sets.items() if number in slices]
        servers = [name for name in self._membership.servers() if name not in self.strangers]
        hosts = {name: state.members[name].host for name in servers}
        replicas = len(hosts) if state.config.is_ring else max(1, state.config.replicas)
        leaving = self.retiring & set(hosts)
        if state.config.is_ring and any(leaving.issuperset(replica_set.names) for replica_set in replica_sets):
            leaving = set()  # nobody seeds before the change: first those who stay get everything
        if len(set(hosts) - leaving) < 2:  # others have died since they were let go
            leaving = {name for name in leaving if not self._may_stay(name)}
        found = plan(replica_sets, sizes, hosts, replicas=replicas, leaving=leaving)
        if state.config.is_ring and found.seeds:
            names = sorted({name for replica_set in found.replica_sets for name in replica_set.names})
            found = dataclasses.replace(
                found, reason=f"{counted(len(found.replica_sets), 'slice')}, all on {', '.join(names)}"
            )
        return found

    def relieved(self) -> list[str]:
        """Servers that want to leave, and on which nothing is left."""
        seated = {name for replica_set in self.state.replica_sets.values() for name in replica_set.names}
        return sorted(self.retiring - seated)

    # -- one change ---------------------------------------------------------------------------------------

    def begin(self, wanted: PlacementPlan | None, sizes: Mapping[int, int]) -> Reconfiguration | None:
        """The next generation, to be kept before any server hears of it; None: a plan has to wait."""
        state = self.state
        if wanted is not None:
            if self.is_urgent:
                return None
            self._before = dict(state.replica_sets)
            state.replica_sets_before = self._before if state.config.is_ring else {}
            self._seat(wanted.replica_sets)
        if state.lost:
            self._seat(rehome(state.replica_sets.values(), sizes, self._membership.servers()))
            self.moves = True
        self._server_is_out = False
        # From now on servers may count them: whoever dies while it enters has to be fenced.
        self.entering = {name: self.entering[name] for name in sorted(self.entering) if name in state.members}
        entering = {name: state.members[name].incarnation for name in self.entering}
        staying = dict(state.entered)  # among them those who enter again
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
            stretches={name: self._stretches.get(name, -1) for name in entering},
        )

    def _seat(self, replica_sets: Collection[ReplicaSet]) -> None:
        known = self.state.replica_sets
        if self.state.config.is_ring or any(
            known[replica_set.slice].primary != replica_set.primary for replica_set in replica_sets
        ):
            self.moves = True
        known.update((replica_set.slice, replica_set) for replica_set in replica_sets)

    def take_back(self) -> None:
        """Somebody's open step could not be made again just now: the plan waits. To be kept."""
        if self._before is not None:  # else a server has died just now, and that took it back
            self._restore_replica_sets(self._before)
        self.moves = self.state.is_changing = self._server_is_out

    def _restore_replica_sets(self, before: Mapping[int, ReplicaSet]) -> None:
        """No server has the new replica sets yet, but all may have prepared them: a backup that they do not name may
        have missed updates since, and is none any more."""
        kept = []
        for number, replica_set in before.items():
            now = self.state.replica_sets.get(number)
            if now is None:
                continue  # its segment was taken back since
            kept.append(
                ReplicaSet(
                    number, replica_set.primary, tuple(name for name in replica_set.backups if name in now.names)
                )
            )
        self._seat_again(before, kept)

    def _seat_who_has_all(self, before: Mapping[int, ReplicaSet]) -> None:
        """In a ring, where a change was not finished: who it was to bring in may lack something, who was to leave may
        have let go of it already. All others have everything."""
        both = [
            (number, [name for name in self.state.replica_sets[number].names if name in replica_set.names])
            for number, replica_set in before.items()
            if number in self.state.replica_sets
        ]
        self._seat_again(
            before, [ReplicaSet(number, names[0] if names else "", tuple(names[1:])) for number, names in both]
        )

    def _seat_again(self, before: Mapping[int, ReplicaSet], kept: Collection[ReplicaSet]) -> None:
        state, self._before = self.state, None
        state.replica_sets_before = {}
        named = {name for replica_set in kept for name in replica_set.names}
        replica_sets, lost = without(kept, named - set(state.members))
        state.replica_sets.update((replica_set.slice, replica_set) for replica_set in replica_sets)
        state.lost = lost + [number for number in state.lost if number not in before]  # registered since then

    def install(self, change: Reconfiguration) -> tuple[Install, list[Loss]]:
        """All servers have answered: what they are to install, and what is outside of what is promised."""
        self._before = None
        losses = [loss for loss in change.torn() if loss not in self._said]
        self._said.update(losses)
        return change.install(self._membership.ordered()), losses

    def settle(self, change: Reconfiguration) -> None:
        """Every server has the generation. To be kept; then others are given rounds, barriers and places."""
        state = self.state
        state.replica_sets_before = {}
        clocks = {(name, incarnation): clock for name, incarnation, clock in change.settle()}
        for name, incarnation in change.fenced.items():
            if state.fencing.get(name, (0, ""))[0] == incarnation:
                del state.fencing[name]
            last, commits = state.settled.get(name, (0, 0))
            if incarnation > last:  # a change that could not be kept is settled again
                state.settled[name] = (incarnation, commits + clocks.get((name, incarnation), 0))
        state.is_changing = self._server_is_out

    def reopen(self) -> None:
        """It could not be kept: the change is made once more."""
        self.state.is_changing = True

    def finish(self, change: Reconfiguration) -> dict[str, Entered]:
        """It is kept: who has entered, and where."""
        self.moves = self._server_is_out
        entered = [name for name in change.entering if name in self.state.entered and name in self.entering]
        places = {name: place for name, place in change.places().items() if name in entered}
        for name, place in places.items():
            self._places[name] = (change.entering[name], self.entering.pop(name), place)
        return places


#: Where primaries change a hold lasts so many times longer: who has installed the change drops what is open, so who
#: has not must not go on meanwhile.
MOVE_TIMES = 10.0


class Loss(NamedTuple):
    """What is outside of what is promised: whose steps it is about, where that is known, and what, in words."""

    workers: tuple[Identity, ...]
    text: str


class Reconfiguration:
    """One step from a generation to the next, as the coordinator takes it."""

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
        stretches: Mapping[str, int] | None = None,
    ) -> None:
        """`servers` with their incarnations; `staying`: workers that take part already; `phase`: the one that the
        last barrier began; `phases`: of the loops that those who enter are in."""
        self.generation, self.servers = generation, dict(sorted(servers.items()))
        self.fenced, self.entering = dict(fenced), dict(entering)
        self.replica_sets, self.moves = list(replica_sets), moves
        self.staying, self.phase, self._stretches = dict(staying or {}), phase, dict(stretches or {})
        self.answers: dict[str, Prepared] = {}
        #: By worker: its clock at some boundary of its script, and its commits between two of them.
        self.boundaries: dict[str, tuple[int, int]] = {}

    def prepare(self) -> Prepare:
        return Prepare(
            self.generation, list(self.fenced.items()), self.replica_sets, self.moves, list(self.servers.items())
        )

    def prepared(self, server: str, answer: Prepared) -> bool:
        """Whether this was the last answer that was missing."""
        self.answers[server] = answer
        return len(self.answers) == len(self.servers)

    @property
    def num_orphans(self) -> int:
        return sum(answer.num_orphans for answer in self.answers.values())

    def settle(self) -> list[tuple[str, int, int]]:
        """Up to which clock a worker's commits count: the highest that any server has committed, or any copy has.

        Of the fenced ones; of all, where primaries change: what is staged does not move along with a slice.
        """
        found, applied = [], self._applied()
        held = [answer.holds for answer in self.answers.values() if answer.holds is not None]
        if held:  # in a ring: what all survivors have, or can come to
            reached = settled_by([{(n, i): clock for n, i, clock in answer} for answer in held])
            return [(n, i, reached.get((n, i), 0)) for n, i in {**self.staying, **self.fenced}.items()]
        settled = {**self.staying, **self.fenced} if self.moves else self.fenced
        for name, incarnation in settled.items():
            clocks = [s.clock for s in self._standings() if (s.name, s.incarnation) == (name, incarnation)]
            found.append((name, incarnation, max([applied.get((name, incarnation), 0), *clocks])))
        return found

    def _applied(self) -> dict[Identity, int]:
        """Of every worker the latest step that is on any copy of any slice."""
        found: dict[Identity, int] = {}
        for answer in self.answers.values():
            for name, incarnation, clock in answer.clocks:
                found[name, incarnation] = max(clock, found.get((name, incarnation), 0))
        return found

    def torn(self) -> list[Loss]:
        """Workers that are out of whose last steps some slices have one that others cannot come to.

        What is committed and open, on all slices, is no loss: it waits for its round, or nobody has it.
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
        """Before anything is registered, all; then those that hear of commits."""
        return [answer for answer in self.answers.values() if answer.is_primary or not self.replica_sets]

    def _standings(self) -> list[Standing]:
        return [standing for answer in self._speaking() for standing in answer.standings]

    def turn(self) -> tuple[int, int]:
        """The highest round that any server has opened; behind a barrier, none yet."""
        return max(next_turn(self._standings()), (self.phase, 0))

    def back_at(self) -> int:
        """Beside the slowest: the same place on every server. While all rest, beside the one that is furthest: who
        comes back first would else wait for all the steps that lie between."""
        return max((_slowest(answer.standings) for answer in self._speaking()), default=0)

    def standings(self) -> list[Standing]:
        """What every server counts from now on: those who enter; all, where primaries change."""
        stay = merged(answer.standings for answer in self._speaking())
        entering = [self._placed(stay.get(name), name, life) for name, life in self.entering.items()]
        if not self.moves:
            return entering
        kept = [s for s in stay.values() if not s.left and s.name not in self.fenced and s.name not in self.entering]
        # Every server that knew where they stand is gone: their next commits are the first of a new count.
        known = {(s.name, s.incarnation) for s in [*kept, *entering]}
        anew = [Standing(n, i, phase=-1) for n, i in self.staying.items() if (n, i) not in known]
        return kept + entering + anew

    def _placed(self, known: Standing | None, name: str, incarnation: int) -> Standing:
        """Its next commit is in the round after all that were opened; its clock goes on, where it was away.

        Who is in a loop is beside those in it: others may have left it, and be in a later one.
        """
        clock = known.clock if known is not None and known.incarnation == incarnation else 0
        phase, number = self.turn()
        own = self._stretches.get(name, -1)
        if self.phase <= own < phase + LOOP:
            # Not at the loop's end, also where all others are there: from there nobody could pause in this loop.
            beside = [s for s in self._standings() if s.phase // LOOP == own // LOOP and not (s.left or s.fenced)]
            inside = [s.turn() for s in beside if not has_left_loop(s)]
            phase, number = max(inside, default=(own // LOOP * LOOP, 0))
        return Standing(name, incarnation, clock, phase, clock - number, position=self.back_at())

    def rolls(self) -> list[RoundMembership]:
        """With spare workers: what any server knows of who is in the last rounds, every one is to know."""
        return RoundMemberships(roll for answer in self.answers.values() for roll in answer.rolls).entries()

    def places(self) -> dict[str, Entered]:
        """For those who enter: the phase of their next commits, or where beside the slowest."""
        back_at, step = self.back_at(), self.step()
        return {
            s.name: Entered(s.phase, back_at, step, self._num_void(s))
            for s in self.standings()
            if s.name in self.entering
        }

    def _num_void(self, entering: Standing) -> int:
        """Scripts with several optimizers make several commits of a batch. One that enters begins a batch: so many
        rounds are left until the others do."""
        phase, number = entering.turn()
        for s in self._standings():
            boundary, stride = self.boundaries.get(s.name, (0, 0))
            is_beside = s.turn()[0] == phase and not (s.left or s.fenced or s.inactive or s.name in self.entering)
            if stride > 1 and is_beside:
                made = s.clock + number - s.turn()[1]  # by that one, when the first round of this one begins
                return (boundary - made) % stride
        return 0

    def step(self) -> int:
        """The job's steps before the next round that is opened: those that are applied, and those that are open."""
        applied = max((answer.num_updates for answer in self.answers.values()), default=0)
        return applied + max((answer.num_open for answer in self.answers.values()), default=0)

    def install(self, members: Sequence[Member]) -> Install:
        return Install(self.generation, list(members), self.settle(), self.standings(), self.rolls())


def _slowest(standings: Iterable[Standing]) -> int:
    there = [standing for standing in standings if not (standing.left or standing.fenced)]
    active = [standing.position for standing in there if standing.active]
    return min(active) if active else max((standing.position for standing in there), default=0)


def next_turn(standings: Iterable[Standing]) -> tuple[int, int]:
    """The highest round that any server has opened, of all these standings.

    Of those who have left their loop only when there are no others: a round at the loop's end would wait for whoever
    is still in the loop, and they, for the end of the epoch, maybe for it.
    """
    known = list(standings)
    inside = [s.turn() for s in known if not has_left_loop(s)]
    return max(inside or [s.turn() for s in known], default=(0, 0))


def has_left_loop(standing: Standing) -> bool:
    """Whether it rests at the loop's end."""
    return standing.inactive and standing.phase % LOOP == LOOP - 1
