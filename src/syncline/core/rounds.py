"""Rounds: which commits are applied together, and when a worker may be answered.

A worker's commits between two rests form a *stretch*. In `sync`, the k-th commits of a stretch of all workers
are one round: whole when everyone who takes part has committed it. Who rests takes part in no more rounds of
that stretch; its next push opens the next one, which waits for those who are still in the old one. So the
content of a round does not depend on timing, and equal runs are equal. Who waits at a barrier is away, and no round
waits for it; behind the barrier all stand level again, in the first stretch of a new era.

With spare workers (`sync:spare=N`) a round is closed when all but N have committed. Who commits a round that is
closed is *late*: its clock advances, nothing of it counts, and it stands where the last closed round is.

In `bounded:K` and `async` a commit is applied on arrival. For `bounded`, its reply waits until no active worker
is more than K behind. A worker that comes back from a rest is set level with the slowest; with several servers
all must set it to the same place (`back_at`), or two of them could make two workers wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Literal, NamedTuple, TypeVar

from syncline.core.policy import Policy
from syncline.core.standings import Standing, by_name
from syncline.errors import FencedError, ProtocolError

T = TypeVar("T")
#: Stretches are numbered on through a job; those of one era, from barrier to barrier, share the upper bits.
ERA = 1 << 32
#: Stretches that are kept for one loop over an epoch: a wait in the middle of it begins a new one, and behind its end
#: all workers are in the same one, however often each has waited.
LOOP = 1 << 8


def after_barrier(stretch: int) -> int:
    """The first stretch of the era that follows."""
    return (stretch // ERA + 1) * ERA


class Commit(NamedTuple, Generic[T]):
    """One worker's commit, with whatever the caller needs to apply and answer it."""

    worker: str
    incarnation: int
    clock: int
    item: T


class Verdict(NamedTuple, Generic[T]):
    """What follows from an event: the rounds to apply now, in order, and why (not)."""

    kind: Literal["new", "open", "already applied", "late"]
    apply: tuple[tuple[Commit[T], ...], ...]
    why: Callable[[], str]

    @property
    def reason(self) -> str:
        """In words; put together when somebody asks, since nearly nobody does."""
        return self.why()


class Rounds(Generic[T]):
    """The commits of all workers at one server. Events in, rounds to apply out."""

    def __init__(self, policy: Policy, workers: Iterable[tuple[str, int]]) -> None:
        self.policy = policy
        self.standings = {name: Standing(name, incarnation) for name, incarnation in workers}
        self._open: dict[tuple[int, int], dict[str, Commit[T]]] = {}
        self._era = 0  # its first stretch
        self._closed = (-ERA, 0)  # with spare workers: the last round that was closed

    def standing(self, worker: str, incarnation: int) -> Standing:
        """The standing of a known worker; an older incarnation is fenced."""
        standing = self.standings.get(worker)
        if standing is None:
            raise ProtocolError(f"{worker} takes no part in this job's rounds")
        if incarnation != standing.incarnation or standing.left or standing.fenced:
            raise FencedError(f"{worker}, incarnation {incarnation}, has been evicted, replaced or has left")
        return standing

    def commit(
        self, worker: str, incarnation: int, clock: int, stretch: int, item: T, back_at: int | None = None
    ) -> Verdict[T]:
        """A worker commits; a clock at or below its own is answered `already applied`, a gap is refused.

        Said again while its round is open, it is answered with the round: what is given now counts.

        `back_at`: where it stands if this ends its rest, the same number at every server (the most that any of
        them gave as `slowest()`); None: beside the slowest one here.
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
        self._enter_era(stretch)
        self._enter_stretch(standing, self._not_behind(standing, stretch), back_at)
        standing.clock = clock
        standing.position += 1
        commit = Commit(worker, incarnation, clock, item)
        if not self.policy.in_rounds:
            return Verdict("new", ((commit,),), lambda: f"{self.policy}: applied on arrival")
        if self.policy.spare and standing.turn() <= self._closed:
            standing.late = clock
            standing.stretch, standing.stretch_began = self._closed[0], clock - self._closed[1]
            return Verdict("late", ((commit,),), lambda: f"{self.policy}: the round was closed without {worker}")
        self._open.setdefault(standing.turn(), {})[worker] = commit
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def _again(self, standing: Standing, clock: int, item: T) -> bool:
        """Whether an open commit is made anew by this: the latest of this very incarnation, never one before it."""
        commits = self._open.get(standing.turn(), {})
        known = commits.get(standing.name)
        if known is None or known.clock != clock or clock != standing.clock:
            return False
        commits[standing.name] = Commit(standing.name, standing.incarnation, clock, item)
        return True

    def open_commit(self, worker: str, clock: int) -> T | None:
        """What a worker's latest commit brought, while its round is open."""
        standing = self.standings.get(worker)
        known = self._open.get(standing.turn(), {}).get(worker) if standing is not None else None
        return known.item if known is not None and known.clock == clock else None

    def open_commits(self) -> Iterator[Commit[T]]:
        """All that wait for their rounds, the oldest round first."""
        for turn in sorted(self._open):
            yield from self._open[turn].values()

    def _enter_era(self, stretch: int) -> None:
        """The first word from behind a barrier: everyone has passed it, nothing is open, all stand level."""
        if stretch < self._era + ERA:
            return
        self._era = stretch // ERA * ERA
        level = max((standing.position for standing in self.standings.values()), default=0)
        for standing in self.standings.values():
            standing.stretch, standing.stretch_began = self._era, standing.clock
            standing.position = level
            standing.resting = standing.away = False

    def _not_behind(self, standing: Standing, stretch: int) -> int:
        """With spare workers: one that was late may stand in a later stretch of this era than it has counted to."""
        is_moved = self.policy.spare and stretch // ERA == standing.stretch // ERA
        return max(stretch, standing.stretch) if is_moved else stretch

    def _enter_stretch(self, standing: Standing, stretch: int, back_at: int | None) -> None:
        rested = standing.resting and not self.policy.spare
        if stretch < standing.stretch or (stretch == standing.stretch and rested):
            raise ProtocolError(f"{standing.name} commits in stretch {stretch}, which it has rested from")
        if not standing.active:
            standing.position = max(standing.position, self.slowest() if back_at is None else back_at)
        if stretch > standing.stretch:
            standing.stretch, standing.stretch_began = stretch, standing.clock
        standing.resting = standing.away = False

    def rest(self, worker: str, incarnation: int, stretch: int, away: bool = False) -> Verdict[T]:
        """The worker takes part in no more rounds of this stretch; `away`: nor of any other, until its next push.

        Saying it again changes nothing.
        """
        standing = self.standing(worker, incarnation)
        self._enter_era(stretch)
        stretch = self._not_behind(standing, stretch)
        if away:
            # One that comes late, when others are behind the barrier already, is not from this era.
            standing.away = standing.away or stretch >= standing.stretch
            return Verdict("new", self._whole_rounds(), self.waiting_reason)
        if stretch > standing.stretch:
            standing.stretch, standing.stretch_began = stretch, standing.clock
        if stretch == standing.stretch:
            standing.resting = True
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def leave(self, worker: str, incarnation: int) -> Verdict[T]:
        """The worker has finished: no round waits for it any more."""
        self.standing(worker, incarnation).left = True
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    # -- generations --------------------------------------------------------------------------------------

    def fence(self, worker: str, incarnation: int) -> None:
        """Nothing more is taken from this worker; rounds still wait for it until `leave_fenced`."""
        standing = self.standings.get(worker)
        if standing is not None and standing.incarnation <= incarnation:
            standing.fenced = True

    def settle(self, worker: str, clock: int, stretch: int, item: T, back_at: int | None = None) -> Verdict[T]:
        """A fenced worker's commit that counts, since another server has it."""
        standing = self.standings[worker]
        assert standing.fenced
        standing.fenced = False
        try:
            return self.commit(worker, standing.incarnation, clock, stretch, item, back_at)
        finally:
            standing.fenced = True

    def leave_fenced(self, worker: str, incarnation: int) -> Verdict[T]:
        """It is settled on every server what of a fenced worker counts: no round waits for it any more."""
        standing = self.standings.get(worker)
        if standing is not None and standing.incarnation <= incarnation:
            standing.left = True
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def enter(self, standing: Standing) -> None:
        """A worker takes part from now on: a new life of it, or one that was away and has not committed since.

        When all who enter are in, `release` gives the rounds that are whole by that.
        """
        self._enter_era(standing.stretch)  # else the first commit of the new era would move it to its beginning
        known = self.standings.get(standing.name)
        if known is None or (known.incarnation, known.clock) <= (standing.incarnation, standing.clock):
            self.standings[standing.name] = standing

    def release(self) -> Verdict[T]:
        """Rounds that became whole because others entered: a new era, or a new life of whom they waited for."""
        return Verdict("new", self._whole_rounds(), self.waiting_reason)

    def forget_left(self, worker: str) -> None:
        """Nothing of a worker that has left is open: its standing is not needed any more."""
        standing = self.standings.get(worker)
        if standing is not None and standing.left and not any(worker in commits for commits in self._open.values()):
            del self.standings[worker]

    def begin_anew(self, standings: Iterable[Standing], clocks: Mapping[tuple[str, int], int]) -> list[Commit[T]]:
        """Slices came or went: open commits are given back, to be made anew; `clocks` are what every slice has."""
        dropped = [commit for commits in self._open.values() for commit in commits.values()]
        self._open.clear()
        self.standings = {s.name: s for s in standings}
        for standing in self.standings.values():
            clock = clocks.get((standing.name, standing.incarnation), 0)
            standing.position -= standing.clock - clock
            standing.clock = clock
            standing.stretch_began = min(standing.stretch_began, clock)
            standing.late = standing.late if standing.late <= clock else 0  # it is decided anew
        self._era = max((s.stretch // ERA * ERA for s in self.standings.values()), default=self._era)
        return dropped

    def num_orphans(self) -> int:
        """Open commits of workers that are out: nobody could make them anew."""
        return sum(self._is_orphan(commit) for commit in self.open_commits())

    def _is_orphan(self, commit: Commit[T]) -> bool:
        """A later incarnation may have entered since, while the round waits for others."""
        standing = self.standings.get(commit.worker)
        return standing is None or standing.incarnation != commit.incarnation or standing.left or standing.fenced

    def reach(self, worker: str, incarnation: int) -> int:
        """Up to which clock all commits of this incarnation are in, or in rounds that wait."""
        standing = self.standings.get(worker)
        clocks = [c.clock for c in self.open_commits() if (c.worker, c.incarnation) == (worker, incarnation)]
        mine = standing.clock if standing is not None and standing.incarnation == incarnation else 0
        return max([mine, *clocks])

    def _whole_rounds(self) -> tuple[tuple[Commit[T], ...], ...]:
        whole = []
        while self._open:
            turn = min(self._open)
            if next(itertools.islice(self._missing(turn), self.policy.spare, None), None) is not None:
                break
            commits = self._open.pop(turn)
            self._closed = max(self._closed, turn)
            # The order of names makes sums bit-equal from run to run.
            names = sorted(commits, key=by_name) if len(commits) > 1 else commits
            whole.append(tuple([commits[name] for name in names]))
        return tuple(whole)

    def _missing(self, turn: tuple[int, int]) -> Iterator[str]:
        """Who takes part in this round and has not committed it."""
        here = self._open[turn]
        for standing in self.standings.values():
            if standing.name in here or standing.left or standing.away:
                continue
            if standing.turn() < turn and not self._has_rested(standing, turn[0]):
                yield standing.name

    def _has_rested(self, standing: Standing, stretch: int) -> bool:
        """Whether it takes part in no round of this stretch.

        With spare workers some are in a later one than they have counted to: who waits in the middle of an epoch,
        maybe for them, is waited for in no stretch of it.
        """
        if self.policy.spare:
            return standing.resting and standing.stretch // LOOP == stretch // LOOP
        return standing.resting and standing.stretch == stretch

    def missing(self) -> list[str]:
        """For whom the oldest open round waits."""
        return sorted(self._missing(min(self._open)), key=by_name) if self._open else []

    def waiting_reason(self) -> str:
        """Why the oldest open round is not applied, in words."""
        if not self._open:
            return "no round is open"
        names = self.missing()
        but = f", all but {self.policy.spare} of them" if self.policy.spare else ""
        return f"the round waits for {', '.join(names)}{but}" if names else "the round is whole"

    def lag(self, worker: str, clock: int) -> int:
        """How far a worker was with this commit ahead of where the slowest active one is now."""
        return self._position(worker, clock) - self.slowest()

    def _position(self, worker: str, clock: int) -> int:
        standing = self.standings[worker]
        return standing.position - (standing.clock - clock)

    def slowest(self) -> int:
        """Where the slowest active worker stands."""
        return min((s.position for s in self.standings.values() if s.active), default=0)

    def may_answer(self, worker: str, clock: int) -> tuple[bool, str]:
        """Whether this commit of a worker may be answered now, and for whom it waits if not."""
        if self.policy.kind != "bounded":
            return True, "applied"
        behind = self.behind(worker, clock)
        if behind:
            return False, f"{self.policy}: {worker} waits for {', '.join(behind)}"
        return True, "within the bound"

    def behind(self, worker: str, clock: int) -> list[str]:
        """In `bounded`: for whom the answer to this commit waits."""
        if not self.standings[worker].active:
            return []
        least = self._position(worker, clock) - self.policy.bound
        return sorted((s.name for s in self.standings.values() if s.active and s.position < least), key=by_name)

    def clocks(self) -> dict[str, tuple[int, int]]:
        """Clock and incarnation of every worker."""
        return {s.name: (s.incarnation, s.clock) for s in self.standings.values()}


def next_turn(standings: Iterable[Standing]) -> tuple[int, int]:
    """The highest round that any server has opened, of all these standings.

    Of those who have left their loop only when there are no others: a round at the loop's end would wait for whoever
    is still in the loop, and they, for the end of the epoch, maybe for it.
    """
    known = list(standings)
    inside = [s.turn() for s in known if not (s.resting and s.stretch % LOOP == LOOP - 1)]
    return max(inside or [s.turn() for s in known], default=(0, 0))
