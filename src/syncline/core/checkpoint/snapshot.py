"""A snapshot: one point between commits that is the same on all servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from syncline.core.leasing.leases import LeaseState, Leasing
from syncline.core.leasing.ranges import without
from syncline.core.slice_state import Identity, highest_clocks
from syncline.core.wire.checkpoints import CloseSnapshotBarrier, Noted, SnapshotBarrierClosed
from syncline.core.wire.leases import LeaseAck

#: What can change what is in a round, or in a slice.
Kind = Literal["commit", "clip", "rest", "leave"]


@dataclasses.dataclass(frozen=True)
class SnapshotBarrier:
    """A closed gate. Commits up to `through` pass, which other servers have; and what they may be waiting for.

    A rest, or a worker that leaves, may make whole the round that such a commit is in: it passes while anything of
    `through` is not applied yet. In the first turn nothing passes.
    """

    number: int
    turn: int = 0
    through: Mapping[Identity, int] = dataclasses.field(default_factory=dict)

    def lacking(self, least: Mapping[Identity, int], there: Collection[Identity]) -> dict[Identity, int]:
        """What of `through` is not in, by the clocks on all slices here. Who is not `there` brings nothing more."""
        return {
            worker: clock
            for worker, clock in self.through.items()
            if worker in there and least.get(worker, 0) < clock
        }

    def lets_pass(self, kind: Kind, worker: Identity, clock: int, *, is_whole: bool) -> bool:
        """Whether this is decided upon now. `is_whole`: all of `through` is in."""
        if kind in ("commit", "clip"):
            return clock <= self.through.get(worker, 0)
        return not is_whole

    def is_replaced_by(self, number: int, turn: int) -> bool:
        """Whether what is asked now is newer."""
        return (number, turn) > (self.number, self.turn)


def barrier_of(number: int, turn: int, through: Iterable[tuple[str, int, int]]) -> SnapshotBarrier:
    """As it came over the wire."""
    return SnapshotBarrier(number, turn, {(name, incarnation): clock for name, incarnation, clock in through})


def on_all(
    slices: Iterable[tuple[Mapping[Identity, int], bool]], settled: Collection[Identity]
) -> dict[Identity, int]:
    """Of every worker the last commit that all slices here have, of their clocks and whether they stand in for lost
    ones. After a move some may lack what others have; it is made again.

    `settled`: those who take part in no rounds now. All that they have made was answered: a slice that has nothing of
    them, or stands in for a lost one, gets no more of that, and does not count.
    """
    known = list(slices)
    found = {}
    for worker, highest in highest_clocks(clocks for clocks, _ in known).items():
        is_settled = worker in settled
        counting = [
            clocks.get(worker, 0)
            for clocks, stands_in in known
            if not (is_settled and (stands_in or worker not in clocks))
        ]
        found[worker] = min(counting, default=highest)
    return found


def behind_to_tell(applied: Mapping[Identity, int], on_all: Mapping[Identity, int]) -> list[tuple[str, int, int]]:
    """Of those whose commits are on some slices here only: what is on all of them."""
    return [(*worker, on_all[worker]) for worker in sorted(on_all) if on_all[worker] < applied.get(worker, 0)]


def clocks_to_tell(
    barrier: SnapshotBarrier, applied: Mapping[Identity, int], there: Collection[Identity]
) -> list[tuple[str, int, int]]:
    """The clocks of those who take part; and of those that others have named and who have left here already: all
    that they have ever committed is in."""
    found = {worker: clock for worker, clock in applied.items() if worker in there and clock}
    for worker, clock in barrier.through.items():
        if worker not in there:
            found[worker] = max(clock, applied.get(worker, 0))
    return [(name, incarnation, clock) for (name, incarnation), clock in sorted(found.items())]


#: Commits wait while gates are closed: a job that is not level after so long is tried again later.
SNAPSHOT_SECONDS = 2.0
#: Until then; and how often a save is tried before it is given up.
AGAIN_SECONDS = 1.0
MOST_TRIES = 3


class SnapshotAttempt:
    """One try to find all servers level."""

    def __init__(
        self, number: int, servers: Iterable[str], until: float, noted: Mapping[Identity, Noted] | None = None
    ) -> None:
        """`noted`: where boundaries of workers are, by what they said of them."""
        self._noted = noted or {}
        # Of one in its first batch it is not known: all run the same script.
        self._usual = max([1, *(known.num_commits for known in self._noted.values())])
        self.number, self.servers, self.until = number, sorted(servers), until
        self.turn = 0
        self.clocks: dict[Identity, int] = {}  # the highest that any server has
        self._answers: dict[str, SnapshotBarrierClosed] = {}

    def close(self) -> CloseSnapshotBarrier:
        """What every server is told now."""
        behind = self.behind()
        through = [
            (*life, clock)
            for life, clock in sorted(self.clocks.items())
            # Who waits for what is not for it waits for nothing.
            if life[0] in behind or not any(self._is_elsewhere(life, answer) for answer in self._answers.values())
        ]
        return CloseSnapshotBarrier(self.number, self.turn, through)

    def decide(self, answers: Mapping[str, SnapshotBarrierClosed], now: float) -> Literal["level", "further", "late"]:
        """Of all servers' answers: the job is level; or they are to be told again; or commits have waited enough."""
        self._answers = {server: answers[server] for server in self.servers}
        told = [_clocks(answer) for answer in self._answers.values() if answer.has_slices]
        self.clocks = {life: clock for life, clock in highest_clocks(told).items() if clock}
        if not self.behind():
            further = {life: self._boundary(life, clock) for life, clock in self.clocks.items()}
            if further == self.clocks or now >= self.until:
                return "level"
            self.clocks = further
        self.turn += 1
        return "further" if now < self.until else "late"

    def _boundary(self, life: Identity, clock: int) -> int:
        """The first one of this worker's from here on, if its batches go on as they did."""
        noted = self._noted.get(life)
        if noted is None:
            return clock
        return max(noted.clock, clock + (noted.clock - clock) % (noted.num_commits or self._usual))

    @property
    def acks(self) -> list[LeaseAck]:
        """What commits that are in have used, and the coordinator had not confirmed."""
        return [use for answer in self._answers.values() for use in answer.acks]

    @property
    def late(self) -> list[LeaseAck]:
        return [use for answer in self._answers.values() for use in answer.late]

    @property
    def num_updates(self) -> int:
        """Of the slice that has had the most."""
        return max((answer.num_updates for answer in self._answers.values()), default=0)

    @property
    def versions(self) -> int:
        """Of all slices together: nothing comes into any of them without a change of it."""
        return sum(answer.versions for answer in self._answers.values())

    def behind(self) -> list[str]:
        """Workers whose commits are on some servers only, by the last answers."""
        found = {name for answer in self._answers.values() for name, _, _ in answer.behind}
        for answer in [answer for answer in self._answers.values() if answer.has_slices]:
            told = _clocks(answer)
            lacking = [life for life, clock in self.clocks.items() if told.get(life, 0) != clock]
            found |= {life[0] for life in lacking if not self._is_elsewhere(life, answer)}
        return sorted(found)

    def _is_elsewhere(self, life: Identity, answer: SnapshotBarrierClosed) -> bool:
        """Whether this server's slices came later than this worker's last commit, which was not for them."""
        if life in _clocks(answer) or not answer.has_slices:
            return False
        known = [number for one in self._answers.values() for *who, number in one.registered if tuple(who) == life]
        return 0 < max(known, default=0) <= answer.first_segment


def _clocks(answer: SnapshotBarrierClosed) -> dict[Identity, int]:
    return {(name, incarnation): clock for name, incarnation, clock in answer.clocks if clock}


def ledger_at(leases: LeaseState, acks: Iterable[LeaseAck], late: Iterable[LeaseAck]) -> LeaseState:
    """The ledger as it is at a cut: what is known, and what servers said there. A copy."""
    copied = _copy(leases)
    leasing = Leasing(copied, in_rounds=False)
    leasing.used(acks)
    for use in late:
        for epochs in copied.epochs.values():
            for epoch in epochs.values():
                epoch.late(*use)  # also in an epoch that others have left: whoever takes it up reads it
    leasing.forget_finished()
    return copied


def ledger_to_resume(leases: LeaseState) -> LeaseState:
    """The ledger with which another job goes on: what was leased is to do, numbers of leases go on. A copy.

    An epoch that all but who held something had left is read on: what was held is in no step of the checkpoint.
    """
    copied = _copy(leases)
    for name, epochs in copied.epochs.items():
        for number, epoch in epochs.items():
            for owner in {lease.owner for lease in epoch.leases.values()}:
                epoch.out(owner, failed=False)
            if epoch.todo:
                copied.finished[name] = without(copied.finished.get(name, []), (number, number + 1))
    Leasing(copied, in_rounds=False).forget_finished()
    copied.unheard, copied.sharing = {}, {}
    # Of an epoch in the middle nothing may be another; the next one may have batches of another size.
    copied.loaders = {name: loader for name, loader in copied.loaders.items() if copied.epochs.get(name)}
    copied.resumed = sorted(copied.loaders)
    return copied


def _copy(leases: LeaseState) -> LeaseState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(leases), type=LeaseState)
