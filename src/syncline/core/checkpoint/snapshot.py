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

#: Requests that can change a round or a slice.
Kind = Literal["commit", "clip", "rest", "leave"]


@dataclasses.dataclass(frozen=True)
class SnapshotBarrier:
    """A closed snapshot barrier. It lets pass commits up to `through`, which other servers have, and what those may
    wait for.

    A rest or a leave may complete the round of such a commit: it passes while `through` is not fully applied. In the
    first turn nothing passes.
    """

    number: int
    turn: int = 0
    through: Mapping[Identity, int] = dataclasses.field(default_factory=dict)

    def lacking(self, least: Mapping[Identity, int], there: Collection[Identity]) -> dict[Identity, int]:
        """The commits of `through` that are missing on some slice here. A worker that is not `there` sends no
        more.
        """
        return {
            worker: clock
            for worker, clock in self.through.items()
            if worker in there and least.get(worker, 0) < clock
        }

    def lets_pass(self, kind: Kind, worker: Identity, clock: int, *, is_whole: bool) -> bool:
        """Whether this request passes. `is_whole`: all of `through` is applied."""
        if kind in ("commit", "clip"):
            return clock <= self.through.get(worker, 0)
        return not is_whole

    def is_replaced_by(self, number: int, turn: int) -> bool:
        """Whether the new request is newer."""
        return (number, turn) > (self.number, self.turn)


def barrier_of(number: int, turn: int, through: Iterable[tuple[str, int, int]]) -> SnapshotBarrier:
    """Builds the barrier from a message."""
    return SnapshotBarrier(number, turn, {(name, incarnation): clock for name, incarnation, clock in through})


def on_all(
    slices: Iterable[tuple[Mapping[Identity, int], bool]], settled: Collection[Identity]
) -> dict[Identity, int]:
    """Every worker's last commit that all slices here have. After a move some slices may lack commits, which are
    replayed.

    `settled`: workers that take part in no round now. All their commits were answered. A slice without any of them,
    or one that replaces a lost slice, gets no more of them and does not count.
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
    """Workers whose commits are on some slices here only, with the clock that all have."""
    return [(*worker, on_all[worker]) for worker in sorted(on_all) if on_all[worker] < applied.get(worker, 0)]


def clocks_to_tell(
    barrier: SnapshotBarrier, applied: Mapping[Identity, int], there: Collection[Identity]
) -> list[tuple[str, int, int]]:
    """The clocks of the workers that take part, and of those in `through` that have left: all their commits are
    applied.
    """
    found = {worker: clock for worker, clock in applied.items() if worker in there and clock}
    for worker, clock in barrier.through.items():
        if worker not in there:
            found[worker] = max(clock, applied.get(worker, 0))
    return [(name, incarnation, clock) for (name, incarnation), clock in sorted(found.items())]


#: How long commits may be held for a snapshot; then the attempt is repeated later.
SNAPSHOT_SECONDS = 2.0
#: The pause between attempts, and their number before the save fails.
AGAIN_SECONDS = 1.0
MOST_TRIES = 3


class SnapshotAttempt:
    """One attempt to bring all servers to the same commits."""

    def __init__(
        self,
        number: int,
        servers: Iterable[str],
        until: float,
        noted: Mapping[Identity, Noted] | None = None,
    ) -> None:
        """`noted`: the workers' boundaries, as they reported."""
        self._noted = noted or {}
        # Unknown for a worker in its first batch: all run the same script.
        self._usual = max([1, *(known.num_commits for known in self._noted.values())])
        self.number, self.servers, self.until = number, sorted(servers), until
        self.turn = 0
        self.clocks: dict[Identity, int] = {}  # the highest on any server
        self._answers: dict[str, SnapshotBarrierClosed] = {}

    def close(self) -> CloseSnapshotBarrier:
        """The message for every server in this turn."""
        behind = self.behind()
        through = [
            (*life, clock)
            for life, clock in sorted(self.clocks.items())
            # A commit that is not for a server must not be waited for there.
            if life[0] in behind or not any(self._is_elsewhere(life, answer) for answer in self._answers.values())
        ]
        return CloseSnapshotBarrier(self.number, self.turn, through)

    def decide(self, answers: Mapping[str, SnapshotBarrierClosed], now: float) -> Literal["level", "further", "late"]:
        """Evaluates the answers of all servers: all are level; or another turn is needed; or commits were held too
        long.
        """
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
        """This worker's next boundary, assuming its batches go on as before."""
        noted = self._noted.get(life)
        if noted is None:
            return clock
        return max(noted.clock, clock + (noted.clock - clock) % (noted.num_commits or self._usual))

    @property
    def acks(self) -> list[LeaseAck]:
        """Lease ranges of applied commits that the coordinator has not confirmed."""
        return [use for answer in self._answers.values() for use in answer.acks]

    @property
    def late(self) -> list[LeaseAck]:
        return [use for answer in self._answers.values() for use in answer.late]

    @property
    def num_updates(self) -> int:
        """The highest update count of any slice."""
        return max((answer.num_updates for answer in self._answers.values()), default=0)

    @property
    def versions(self) -> int:
        """The sum of all slice versions: it changes with every update."""
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
        """Whether this server's slices were created after this worker's last commit."""
        if life in _clocks(answer) or not answer.has_slices:
            return False
        known = [number for one in self._answers.values() for *who, number in one.registered if tuple(who) == life]
        return 0 < max(known, default=0) <= answer.first_segment


def _clocks(answer: SnapshotBarrierClosed) -> dict[Identity, int]:
    return {(name, incarnation): clock for name, incarnation, clock in answer.clocks if clock}


def ledger_at(leases: LeaseState, acks: Iterable[LeaseAck], late: Iterable[LeaseAck]) -> LeaseState:
    """A copy of the ledger as of the snapshot: the known state and the servers' reports."""
    copied = _copy(leases)
    leasing = Leasing(copied, in_rounds=False)
    leasing.used(acks)
    for use in late:
        for epochs in copied.epochs.values():
            for epoch in epochs.values():
                epoch.late(*use)  # also in an epoch that others have left: a resumed job reads it
    leasing.forget_finished()
    return copied


def ledger_to_resume(leases: LeaseState) -> LeaseState:
    """A copy of the ledger for a resumed job: leased samples are to do again, lease numbers go on.

    An epoch that only holders of samples had not left is continued: what they held is in no step of the checkpoint.
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
    # An epoch in progress must keep its loader; the next one may have other batch sizes.
    copied.loaders = {name: loader for name, loader in copied.loaders.items() if copied.epochs.get(name)}
    copied.resumed = sorted(copied.loaders)
    return copied


def _copy(leases: LeaseState) -> LeaseState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(leases), type=LeaseState)
