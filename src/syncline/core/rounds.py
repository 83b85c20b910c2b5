"""Rounds: which commits are applied together, when, and which workers a round waits for.

A round's *turn* is its phase and its number within the phase; rounds are applied in the order of turns.
`Rounds.commit` takes a commit, `Rounds._whole_rounds` decides which rounds are complete. With spare workers a closed
round has a `RoundMembership`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from syncline.core.members import Standing, by_name
from syncline.core.policy import Policy
from syncline.errors import FencedError, ProtocolError

T = TypeVar("T")


class Commit(NamedTuple, Generic[T]):
    """One worker's commit, with the caller's data for applying and answering it."""

    worker: str
    incarnation: int
    clock: int
    item: T


class Verdict(NamedTuple, Generic[T]):
    """The result of an event: the rounds to apply now, in order, and the reason.

    `new`: the event counts; its round is in `apply`, or still waits for workers. `open`: a commit was repeated while
    its round waits. `already applied`: a commit was repeated after its round. `late`: with spare workers, the round
    was closed without the commit; the first time `apply` holds that commit alone, so that its clock advances.
    """

    kind: Literal["new", "open", "already applied", "late"]
    apply: tuple[tuple[Commit[T], ...], ...]
    why: Callable[[], str]

    @property
    def reason(self) -> str:
        """The reason in words; built on demand, since it is rarely needed."""
        return self.why()


#: More segments than any job has.
ALL = 1 << 62
#: Name, incarnation, clock.
Entry = tuple[str, int, int]


class RoundMembership(msgspec.Struct, frozen=True, array_like=True):
    """The membership of a closed round, with spare workers: its turn, its commits, and the commits that were late.

    The server of slice 0 makes it when it closes the round; workers carry it to the other servers.
    """

    phase: int
    number: int  # within the phase
    members: list[Entry]
    late: list[Entry] = []
    # Members that had registered fewer segments than others, and how many. They have sent nothing to servers that
    # host only newer segments, so those servers do not wait for them.
    told_less: list[tuple[str, int]] = []
    # The round before, if no member is left who could confirm that all servers have it: it must come first
    # everywhere.
    before: RoundMembership | None = None

    @property
    def turn(self) -> tuple[int, int]:
        return (self.phase, self.number)


class RoundMemberships:
    """The round memberships that a server knows: the newest, and that of every worker's last commit.

    A worker that commits again was answered by every server, so earlier ones are not needed. A restarted worker has
    none of its earlier life: that was settled before it entered.
    """

    def __init__(self, round_memberships: Iterable[RoundMembership] = ()) -> None:
        self._last: dict[str, tuple[int, int, RoundMembership]] = {}  # by name: incarnation, clock
        self.newest: RoundMembership | None = None
        for round_membership in round_memberships:
            self.learn(round_membership)

    def learn(self, round_membership: RoundMembership) -> None:
        """Adds a membership. Idempotent."""
        if round_membership.before is not None:
            self.learn(round_membership.before)
        for name, incarnation, clock in (*round_membership.members, *round_membership.late):
            known = self._last.get(name)
            if known is None or known[:2] < (incarnation, clock):
                self._last[name] = (incarnation, clock, round_membership)
        if self.newest is None or self.newest.turn < round_membership.turn:
            self.newest = round_membership

    def was_late(self, turn: tuple[int, int], entry: Entry) -> None:
        """Adds a late commit to the newest round."""
        self.learn(msgspec.structs.replace(self.newest or RoundMembership(*turn, []), late=[entry]))

    def find(self, name: str, incarnation: int, clock: int) -> RoundMembership | None:
        """The membership that decided this commit; None if unknown."""
        known = self._last.get(name)
        return known[2] if known is not None and known[:2] == (incarnation, clock) else None

    def entries(self) -> list[RoundMembership]:
        """All of them, for messages."""
        found = {id(round_membership): round_membership for _, _, round_membership in self._last.values()}
        if self.newest is not None:
            found[id(self.newest)] = self.newest
        return sorted(found.values(), key=lambda round_membership: (round_membership.turn, round_membership.late))


def closed_with(
    turn: tuple[int, int],
    commits: Iterable[Commit[Any]],
    standings: Mapping[str, Standing],
    before: RoundMembership | None,
) -> RoundMembership:
    """The membership of a round that is closed now; `before`: of the last one, with other servers."""
    members = [commit[:3] for commit in commits]
    known = {name: standings[name].num_segments for name, _, _ in members if name in standings}
    most = max(known.values(), default=0)
    told_less = [(name, number) for name, number in known.items() if 0 < number < most]
    return RoundMembership(*turn, members, [], told_less, None if _is_everywhere(before, standings) else before)


def uncommitted(
    round_membership: RoundMembership | None, standings: Mapping[str, Standing], first_segment: int = 0
) -> list[str]:
    """Members of this round, or of rounds before it, that have not committed it here.

    Without workers that are gone and settled, that have registered nothing that is here (`first_segment`: the first
    such segment), or that rest since: those were answered, even if on a slice that is lost.
    """
    found: list[str] = []
    while round_membership is not None:
        less = dict(round_membership.told_less)
        there = [
            (s, clock)
            for s, clock in _still_there(round_membership, standings)
            if less.get(s.name, ALL) > first_segment
        ]
        found += [s.name for s, clock in there if s.clock < clock and not _rests_since(s, clock)]
        round_membership = round_membership.before
    return found


def unanswered(round_membership: RoundMembership | None, standings: Mapping[str, Standing]) -> list[str]:
    """Members of this round while other servers may not have it yet: one of them must go on or rest."""
    return (
        []
        if _is_everywhere(round_membership, standings)
        else [s.name for s, _ in _witnesses(round_membership, standings)]
    )


def _is_everywhere(round_membership: RoundMembership | None, standings: Mapping[str, Standing]) -> bool:
    """Whether all servers have the round: a member that went on, or rests, was answered by all of them."""
    return any(s.clock > clock or _rests_since(s, clock) for s, clock in _witnesses(round_membership, standings))


def _rests_since(standing: Standing, clock: int) -> bool:
    """Whether it rests since this commit. Its clock may have been set back with a lost slice."""
    return not standing.active and max(standing.clock, standing.last_inactive) >= clock


def _witnesses(
    round_membership: RoundMembership | None, standings: Mapping[str, Standing]
) -> list[tuple[Standing, int]]:
    """Members that have told all servers that any member of this round has told."""
    less = dict(round_membership.told_less) if round_membership is not None else {}
    return [(s, clock) for s, clock in _still_there(round_membership, standings) if s.name not in less]


def _still_there(
    round_membership: RoundMembership | None, standings: Mapping[str, Standing]
) -> list[tuple[Standing, int]]:
    """The current standings of this round's members, and their clocks in it."""
    found = (
        [(standings.get(name), incarnation, clock) for name, incarnation, clock in round_membership.members]
        if round_membership
        else []
    )
    return [(s, clock) for s, inc, clock in found if s is not None and s.incarnation == inc and not s.left]


def stand_by(round_membership: RoundMembership | None, standing: Standing) -> None:
    """All slices of a server have this worker's last commit: sets its standing to that commit's turn, unless it has
    gone on.

    The worker that knew the turn may be gone.
    """
    if round_membership is not None and standing.turn() < round_membership.turn:
        standing.phase, standing.phase_began = round_membership.phase, standing.clock - round_membership.number
        standing.inactive = standing.at_barrier = False
    if (
        round_membership is not None
        and (standing.name, standing.incarnation, standing.clock) in round_membership.late
    ):
        standing.late = standing.clock


#: Phases per barrier epoch: phases are numbered through the job, and those between two barriers share the upper bits.
BARRIER_EPOCH = 1 << 32
#: Phases reserved for one loop over an epoch: a wait inside the loop begins a new phase, and after the loop all
#: workers are in the same one.
LOOP = 1 << 8


def after_barrier(phase: int) -> int:
    """The first phase of the next barrier epoch."""
    return (phase // BARRIER_EPOCH + 1) * BARRIER_EPOCH


class Rounds(Generic[T]):
    """The commits of all workers at one server. Events in, rounds to apply out.

    `RoundExecutor.hosts_others` sets `decides`, `is_alone` and `first_segment` when the slices of the server change.
    """

    def __init__(self, policy: Policy, workers: Iterable[tuple[str, int]]) -> None:
        self.policy, self._in_rounds = policy, policy.in_rounds
        self.standings = {name: Standing(name, incarnation) for name, incarnation in workers}
        self._forgotten: dict[str, int] = {}  # workers without a standing -> last incarnation
        self._open: dict[tuple[int, int], dict[str, Commit[T]]] = {}
        self._barrier_epoch = 0  # its first phase
        self.closed = (-BARRIER_EPOCH, 0)  # with spare workers: the last round that was closed
        self.round_memberships = RoundMemberships()  # likewise, the last memberships
        self._following: dict[
            tuple[int, int], RoundMembership
        ] = {}  # open rounds that were closed by other servers, or before a move
        # this server closes rounds; otherwise, and while primaries change, it only follows memberships
        self.decides = True
        self.is_alone = True  # no other server has slices
        self.first_segment = 0  # the first with slices here

    def standing(self, worker: str, incarnation: int) -> Standing:
        """The standing of a known worker; an older incarnation is fenced."""
        standing = self.standings.get(worker)
        if standing is None and incarnation > self._forgotten.get(worker, -1):
            raise ProtocolError(f"{worker} takes no part in this job's rounds")
        if standing is None or incarnation != standing.incarnation or standing.left or standing.fenced:
            raise FencedError(f"{worker}, incarnation {incarnation}, has been evicted, replaced or has left")
        return standing

    def commit(
        self, worker: str, incarnation: int, clock: int, phase: int, item: T, back_at: int | None = None
    ) -> Verdict[T]:
        """A worker commits. A clock at or below its own is answered `already applied`; a gap is refused.

        If the commit is repeated while its round is open, the new one replaces it and is answered with the round.

        `back_at`: its position if this ends its rest, the same on every server (the highest `slowest()` of any);
        None: level with the slowest one here.
        """
        standing = self.standing(worker, incarnation)
        if clock <= standing.clock:
            if self._again(standing, clock, item):
                return Verdict("open", (), self.waiting_reason)
            if 0 < clock == standing.late:
                return Verdict("late", (), lambda: f"{worker} was late with clock {clock}")
            return Verdict("already applied", (), lambda: f"{worker} is at clock {standing.clock} already")
        if clock != standing.clock + 1:
            raise ProtocolError(f"{worker} commits clock {clock} after {standing.clock}; one is missing")
        if self.policy.has_spare:
            round_membership = self.round_memberships.find(worker, incarnation, clock)
            if round_membership is not None:
                return self._follow(standing, Commit(worker, incarnation, clock, item), round_membership)
            if not self.decides:
                raise ProtocolError(f"{worker} commits clock {clock}, whose round is not known")
        self._enter_barrier_epoch(phase)
        self._enter_phase(standing, self._not_behind(standing, phase), back_at)
        standing.clock = clock
        standing.position += 1
        commit = Commit(worker, incarnation, clock, item)
        if not self._in_rounds:
            return Verdict("new", ((commit,),), lambda: f"{self.policy}: applied on arrival")
        if self.policy.has_spare and standing.turn() <= self.closed:
            self.round_memberships.was_late(self.closed, commit[:3])
            return self._is_late(standing, commit, self.closed)
        self._open.setdefault(standing.turn(), {})[worker] = commit
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def _is_late(self, standing: Standing, commit: Commit[T], turn: tuple[int, int]) -> Verdict[T]:
        standing.late = commit.clock
        standing.phase, standing.phase_began = turn[0], commit.clock - turn[1]
        return Verdict("late", ((commit,),), lambda: f"{self.policy}: the round was closed without {commit.worker}")

    # -- round memberships --------------------------------------------------------------------------------

    def learn(self, round_membership: RoundMembership) -> None:
        """Another server has closed a round."""
        self.round_memberships.learn(round_membership)
        self.closed = max(self.closed, round_membership.turn)

    def membership_to_tell(self, worker: str, incarnation: int, clock: int) -> RoundMembership | None:
        """With spare workers and several servers: the membership that a worker must send to the other servers, if
        any.
        """
        if not self.policy.has_spare or self.is_alone or not self.decides:
            return None
        # A commit restored with a worker's copy whose round is unknown is void on other servers.
        known = self.round_memberships.find(worker, incarnation, clock)
        return known or RoundMembership(*self.closed, [], [(worker, incarnation, clock)])

    def is_decided(self, worker: str, incarnation: int, clock: int) -> bool:
        """Whether it is known here that this commit counts or was late."""
        return not self.policy.has_spare or self.round_memberships.find(worker, incarnation, clock) is not None

    def _follow(self, standing: Standing, commit: Commit[T], round_membership: RoundMembership) -> Verdict[T]:
        """The membership of this commit is known: follows it."""
        self._enter_barrier_epoch(round_membership.phase)
        standing.clock = commit.clock
        standing.position += 1
        standing.inactive = standing.at_barrier = False
        if commit[:3] in round_membership.late:
            return self._is_late(standing, commit, round_membership.turn)
        standing.phase, standing.phase_began = round_membership.phase, commit.clock - round_membership.number
        self._open.setdefault(round_membership.turn, {})[commit.worker] = commit
        self._following[round_membership.turn] = round_membership
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def drop_undecided(self, worker: str, incarnation: int) -> None:
        """With spare workers and several servers: drops a fenced worker's commits that are in no closed round."""
        standing = self.standings.get(worker)
        if not self.policy.has_spare or self.is_alone or standing is None or standing.incarnation != incarnation:
            return
        turn = standing.turn()
        known = self._open.get(turn, {}).get(worker)
        if known is not None and known.incarnation == incarnation and turn not in self._following:
            del self._open[turn][worker]
            self._open = {turn: commits for turn, commits in self._open.items() if commits}
            standing.clock -= 1

    def _again(self, standing: Standing, clock: int, item: T) -> bool:
        """Whether this repeats an open commit: the latest of this incarnation, never an earlier one."""
        commits = self._open.get(standing.turn(), {})
        known = commits.get(standing.name)
        if known is None or known.clock != clock or clock != standing.clock:
            return False
        commits[standing.name] = Commit(standing.name, standing.incarnation, clock, item)
        return True

    def open_commit(self, worker: str, clock: int) -> T | None:
        """The data of a worker's latest commit, while its round is open."""
        standing = self.standings.get(worker)
        known = self._open.get(standing.turn(), {}).get(worker) if standing is not None else None
        return known.item if known is not None and known.clock == clock else None

    def open_commits(self) -> Iterator[Commit[T]]:
        """All commits in open rounds, oldest round first."""
        for turn in sorted(self._open):
            yield from self._open[turn].values()

    @property
    def num_open(self) -> int:
        """Rounds with commits that are not complete."""
        return len(self._open)

    def _enter_barrier_epoch(self, phase: int) -> None:
        """The first message after a barrier: all workers have passed it, nothing is open, all are level."""
        if phase < self._barrier_epoch + BARRIER_EPOCH:
            return
        self._barrier_epoch = phase // BARRIER_EPOCH * BARRIER_EPOCH
        level = max((standing.position for standing in self.standings.values()), default=0)
        for standing in [s for s in self.standings.values() if s.phase < self._barrier_epoch]:
            standing.phase, standing.phase_began = self._barrier_epoch, standing.clock
            standing.position, standing.inactive, standing.at_barrier = level, False, False

    def _not_behind(self, standing: Standing, phase: int) -> int:
        """With spare workers: a late worker may be in a later phase of this barrier epoch than it knows."""
        is_moved = self.policy.has_spare and phase // BARRIER_EPOCH == standing.phase // BARRIER_EPOCH
        return max(phase, standing.phase) if is_moved else phase

    def _enter_phase(self, standing: Standing, phase: int, back_at: int | None) -> None:
        """A worker commits in this phase: ends its rest, and begins the phase if it is new."""
        last_inactive = standing.inactive and not self.policy.has_spare
        if phase < standing.phase or (phase == standing.phase and last_inactive):
            raise ProtocolError(f"{standing.name} commits in phase {phase}, which it has rested from")
        if not standing.active:
            standing.position = max(standing.position, self.slowest() if back_at is None else back_at)
        if phase > standing.phase:
            standing.phase, standing.phase_began = phase, standing.clock
        standing.inactive = standing.at_barrier = False

    def rest(self, worker: str, incarnation: int, phase: int, at_barrier: bool = False) -> Verdict[T]:
        """The worker takes part in no more rounds of this phase; `at_barrier`: in none until its next push.

        Idempotent.
        """
        standing = self.standing(worker, incarnation)
        self._enter_barrier_epoch(phase)
        phase = self._not_behind(standing, phase)
        if at_barrier:
            # A late message, when others have passed the barrier, belongs to an earlier barrier epoch.
            standing.at_barrier = standing.at_barrier or phase >= standing.phase
        elif phase >= standing.phase:
            if phase > standing.phase:
                standing.phase, standing.phase_began = phase, standing.clock
            standing.inactive = True
        standing.last_inactive = standing.last_inactive if standing.active else standing.clock
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def leave(self, worker: str, incarnation: int) -> Verdict[T]:
        """The worker has finished: no round waits for it any more."""
        self.standing(worker, incarnation).left = True
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    # -- generations --------------------------------------------------------------------------------------

    def fence(self, worker: str, incarnation: int) -> None:
        """Refuses this worker's messages; rounds still wait for it until `leave_fenced`."""
        standing = self.standings.get(worker)
        if standing is not None and standing.incarnation <= incarnation:
            standing.fenced = True

    def settle(self, worker: str, clock: int, phase: int, item: T, back_at: int | None = None) -> Verdict[T]:
        """Commits a fenced worker's step, because another server has it."""
        standing = self.standings[worker]
        assert standing.fenced
        standing.fenced = False
        try:
            return self.commit(worker, standing.incarnation, clock, phase, item, back_at)
        finally:
            standing.fenced = True

    def leave_fenced(self, worker: str, incarnation: int) -> Verdict[T]:
        """The fenced worker's commits are settled on every server: no round waits for it any more."""
        standing = self.standings.get(worker)
        if standing is not None and standing.incarnation <= incarnation:
            standing.left = True
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def enter(self, standing: Standing) -> None:
        """A worker takes part from now on: a new life, or one that was away and has not committed since.

        After all entries, `release` returns the rounds completed by them.
        """
        self._enter_barrier_epoch(
            standing.phase
        )  # otherwise the first commit of the new barrier epoch would reset it
        known = self.standings.get(standing.name)
        if known is None or (known.incarnation, known.clock) <= (standing.incarnation, standing.clock):
            self.standings[standing.name] = standing

    def release(self) -> Verdict[T]:
        """Rounds completed by entries: a new barrier epoch, or a new life of a worker that they waited for."""
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def forget_left(self, worker: str) -> None:
        """Removes the standing of a worker that has left, if nothing of it is open."""
        standing = self.standings.get(worker)
        if standing is not None and standing.left and not any(worker in commits for commits in self._open.values()):
            self._forget(standing)
            del self.standings[worker]

    def _forget(self, standing: Standing) -> None:
        """Remembers a removed worker: its late messages are answered with FencedError."""
        known = self._forgotten.get(standing.name, -1)
        self._forgotten[standing.name] = max(known, standing.incarnation)

    def reset(self, standings: Iterable[Standing], clocks: Mapping[tuple[str, int], int]) -> list[Commit[T]]:
        """Slices came or went: returns the open commits, which must be replayed. `clocks`: what every slice has."""
        dropped = [commit for commits in self._open.values() for commit in commits.values()]
        self._open, self._following = {}, {}
        before, self.standings = self.standings, {s.name: s for s in standings}
        for name in before.keys() - self.standings.keys():
            self._forget(before[name])
        for standing in self.standings.values():
            clock = clocks.get((standing.name, standing.incarnation), 0)
            standing.position -= standing.clock - clock
            standing.clock = clock
            standing.phase_began = min(standing.phase_began, clock)
            standing.late = standing.late if standing.late <= clock else 0  # it is decided again
            if self.policy.has_spare:
                stand_by(self.round_memberships.find(standing.name, standing.incarnation, clock), standing)
        newest = max((s.phase for s in self.standings.values()), default=self._barrier_epoch)
        self._barrier_epoch = min(newest // BARRIER_EPOCH * BARRIER_EPOCH, 0)
        # possibly of a worker that enters after a barrier, which the others have passed too
        self._enter_barrier_epoch(newest)
        return dropped

    def num_orphans(self) -> int:
        """Open commits of removed workers, which no worker can replay."""
        return sum(self._is_orphan(commit) for commit in self.open_commits())

    def _is_orphan(self, commit: Commit[T]) -> bool:
        """Whether the commit's worker is removed; a later incarnation may have entered since."""
        standing = self.standings.get(commit.worker)
        return standing is None or standing.incarnation != commit.incarnation or standing.left or standing.fenced

    def reach(self, worker: str, incarnation: int) -> int:
        """The clock up to which all commits of this incarnation are applied or in open rounds."""
        standing = self.standings.get(worker)
        clocks = [c.clock for c in self.open_commits() if (c.worker, c.incarnation) == (worker, incarnation)]
        mine = standing.clock if standing is not None and standing.incarnation == incarnation else 0
        return max([mine, *clocks])

    def _whole_rounds(self) -> tuple[tuple[Commit[T], ...], ...]:
        """Takes out the rounds that are complete, in order of their turns: this is where the policy `sync` decides.

        A round is complete when no participant is missing, or, with spare workers, no more than `spare`. With spare
        workers only the server of slice 0 closes rounds; the others apply a round when all of its members are here.
        """
        whole = []
        while self._open:
            turn = min(self._open)
            spare = self.policy.spare if turn not in self._following else 0
            if next(itertools.islice(self._missing(turn), spare, None), None) is not None:
                break
            if spare and (self._not_through() or not self.decides):
                break
            commits = self._open.pop(turn)
            # Sorted by name: sums are bit-equal from run to run.
            names = sorted(commits, key=by_name) if len(commits) > 1 else commits
            whole.append(tuple([commits[name] for name in names]))
            if self.policy.has_spare and self._following.pop(turn, None) is None:
                newest = None if self.is_alone else self._newest_in_barrier_epoch()
                self.learn(closed_with(turn, whole[-1], self.standings, newest))
        return tuple(whole)

    def _newest_in_barrier_epoch(self) -> RoundMembership | None:
        """The newest membership of this barrier epoch. Workers that passed a barrier were answered by all servers."""
        return self.round_memberships.newest if self.closed[0] >= self._barrier_epoch else None

    def _not_through(self) -> list[str]:
        """With spare workers: those that block the next round, since the last one may not be on all slices yet."""
        return (uncommitted if self.is_alone else unanswered)(self._newest_in_barrier_epoch(), self.standings)

    def _missing(self, turn: tuple[int, int]) -> Iterator[str]:
        """Workers that take part in this round and have not committed it."""
        if turn in self._following:
            yield from uncommitted(self._following[turn], self.standings, self.first_segment)
            return
        for standing in self.standings.values():
            if standing.name in self._open[turn] or standing.left or standing.at_barrier:
                continue
            if standing.turn() < turn and not self._has_rested(standing, turn[0]):
                yield standing.name

    def _has_rested(self, standing: Standing, phase: int) -> bool:
        """Whether it takes part in no round of this phase.

        With spare workers some are in a later phase than they know: a worker that waits inside an epoch, maybe for
        them, counts in none of its phases.
        """
        if self.policy.has_spare:
            return standing.inactive and standing.phase // LOOP == phase // LOOP
        return standing.inactive and standing.phase == phase

    def missing(self) -> list[str]:
        """Workers that the oldest open round waits for."""
        return self._waits_for()[0] if self._open else []

    def _waits_for(self) -> tuple[list[str], str]:
        """Their names, and how many of them, in words, if not all."""
        turn, spare = min(self._open), self.policy.spare
        names, how_many = list(self._missing(turn)), ""
        if spare and turn not in self._following:
            if len(names) > spare:
                how_many = f", all but {spare} of them"
            elif len(names := self._not_through()) > 1 and not self.is_alone:
                how_many = ", one of them"
        return sorted(names, key=by_name), how_many

    def waiting_reason(self) -> str:
        """Explains why the oldest open round is not applied."""
        if not self._open:
            return "no round is open"
        names, how_many = self._waits_for()
        return f"the round waits for {', '.join(names)}{how_many}" if names else "the round is whole"

    def lag(self, worker: str, clock: int) -> int:
        """How far a worker's commit was ahead of the slowest active worker's current position."""
        return self._position(worker, clock) - self.slowest()

    def _position(self, worker: str, clock: int) -> int:
        standing = self.standings[worker]
        return standing.position - (standing.clock - clock)

    def slowest(self) -> int:
        """The position of the slowest active worker."""
        return min((s.position for s in self.standings.values() if s.active), default=0)

    def may_answer(self, worker: str, clock: int) -> tuple[bool, str]:
        """Whether this commit may be answered now, and the workers it waits for."""
        if self.policy.kind != "bounded":
            return True, "applied"
        behind = self.behind(worker, clock)
        if behind:
            return False, f"{self.policy}: {worker} waits for {', '.join(behind)}"
        return True, "within the bound"

    def behind(self, worker: str, clock: int) -> list[str]:
        """In `bounded`: the workers that the answer to this commit waits for."""
        if not self.standings[worker].active:
            return []
        least = self._position(worker, clock) - self.policy.bound
        return sorted((s.name for s in self.standings.values() if s.active and s.position < least), key=by_name)

    def clocks(self) -> dict[str, tuple[int, int]]:
        """Clock and incarnation of every worker."""
        return {s.name: (s.incarnation, s.clock) for s in self.standings.values()}
