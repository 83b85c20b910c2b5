"""The snapshot barrier of a server. It holds commits back until the slices are marked, or the attempt is given up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from syncline import faults
from syncline.core.checkpoint.snapshot import SnapshotBarrier, barrier_of, behind_to_tell, clocks_to_tell
from syncline.core.wire.checkpoints import CloseSnapshotBarrier, Mark, SnapshotBarrierClosed
from syncline.core.wire.message import Done
from syncline.errors import ProtocolError, RuleError
from syncline.net.rpc import Request
from syncline.server.commits import Commits
from syncline.server.lease_acks import unconfirmed_here
from syncline.server.slices import HostedSlice
from syncline.server.tasks import in_thread

#: The barrier opens by itself after this time, so that a dead coordinator does not block the job.
BARRIER_SECONDS = 3.0


class SnapshotBarrierService:
    """Closes the barrier, reports the clocks once the slices are idle, has the slices marked, and opens again."""

    def __init__(
        self,
        name: str,
        commits: Commits,
        *,
        mark: Callable[[int, list[HostedSlice]], None],
        log: Callable[[str], None],
        barrier_seconds: float = BARRIER_SECONDS,
    ) -> None:
        """`mark` is called under `state_lock` while no update is in flight."""
        self._name, self._commits, self._mark, self._log = name, commits, mark, log
        self._flow, self._admission_queue, self._state_lock = (
            commits.flow,
            commits.admission_queue,
            commits.state_lock,
        )
        self.barrier_seconds = barrier_seconds
        self._told: SnapshotBarrier | None = (
            None  # the barrier whose clocks were reported; nothing changes while it stays closed
        )
        self._until = 0.0  # when it opens by itself
        self.is_closed = False
        self._over = 0  # the number that was given up or ended last

    def end(self) -> None:
        """The server is closing: waiting callers get an error."""
        with self._state_lock:
            self.is_closed = True
            self._admission_queue.open()

    # -- closing ------------------------------------------------------------------------------------------

    def close(self, request: Request, message: CloseSnapshotBarrier) -> None:
        in_thread("snapshot barrier", request, lambda: self._close(request, message))

    def _close(self, request: Request, message: CloseSnapshotBarrier) -> None:
        barrier = barrier_of(message.number, message.turn, message.through)
        until = time.monotonic() + (message.seconds or self.barrier_seconds)
        with self._state_lock:
            self._check_newer(barrier)
            if not self._commits.hosts_any:
                request.reply(SnapshotBarrierClosed([], has_slices=False))
                return
            self._admission_queue.close(barrier, is_save=message.is_save)
        self._admission_queue.decide()
        faults.reach("save.closed")
        with self._state_lock:
            self._wait_until_applied(barrier, until)
            errors: list[RuleError | None] = []
            works = self._flow.flush(errors.append) if self._is_current(barrier) and message.is_save else []
        self._flow.run(works)  # what slices hold is part of a save
        with self._state_lock:
            self._wait_until_applied(barrier, until)
            if any(errors):
                self._admission_queue.open()
            if self._is_current(barrier) and self._admission_queue.loading:
                self._admission_queue.open()
            is_told = self._is_current(barrier)
            answer = self._closed(barrier)
            if is_told:
                self._told, self._until = barrier, until
        if not is_told:
            self._admission_queue.decide()
            for error in filter(None, errors):
                raise error
            raise ProtocolError(
                f"{self._name}: save {barrier.number} found its barrier open before all commits were applied"
            )
        request.reply(answer)
        self._open_after(barrier, until, is_save=message.is_save)

    def _wait_until_applied(self, barrier: SnapshotBarrier, until: float) -> None:
        """Under `state_lock`: waits for the commits up to the barrier. Opens it when the time is over."""
        while self._is_current(barrier) and not (self._flow.is_idle and not self._admission_queue.lacking()):
            if time.monotonic() >= until:
                self._admission_queue.open()
            self._flow.idle.wait(max(0.0, min(until - time.monotonic(), 0.5)))

    def _check_newer(self, barrier: SnapshotBarrier) -> None:
        if self.is_closed:
            raise ProtocolError(f"{self._name} is closing")
        if barrier.number == self._over:  # a thread closes it: the word that it is over may have come first
            raise ProtocolError(f"{self._name}: save {barrier.number} is over")
        if self._admission_queue.is_held:
            raise ProtocolError(
                f"{self._name}: no snapshot for save {barrier.number}: a generation is being prepared"
            )
        self._check_loaded(barrier)
        before = self._admission_queue.barrier
        if before is not None and not before.is_replaced_by(barrier.number, barrier.turn):
            raise ProtocolError(
                f"{self._name} is asked to close its barrier for save {barrier.number}, turn {barrier.turn}; "
                f"it is closed for save {before.number}, turn {before.turn}"
            )

    def _check_loaded(self, barrier: SnapshotBarrier) -> None:
        if self._admission_queue.loading:
            raise ProtocolError(
                f"{self._name}: no snapshot for save {barrier.number}: rules are being given their state"
            )

    def _is_current(self, barrier: SnapshotBarrier) -> bool:
        return self._admission_queue.barrier is barrier

    def _closed(self, barrier: SnapshotBarrier) -> SnapshotBarrierClosed:
        slots = self._commits.hosted()
        applied, there = self._admission_queue.applied(), self._admission_queue.there()
        behind = behind_to_tell(
            applied, {w: clock for w, clock in self._admission_queue.on_all().items() if w in there}
        )
        updates = max((slot.state.version for slot in slots), default=0)
        clocks = clocks_to_tell(barrier, applied, there)
        rounds = self._commits.rounds
        return SnapshotBarrierClosed(
            clocks, *unconfirmed_here(slots), updates,
            behind=behind,
            registered=[(s.name, s.incarnation, s.num_segments) for s in rounds.standings.values() if s.num_segments],
            first_segment=rounds.first_segment,
            versions=sum(slot.state.version for slot in slots),
        )  # fmt: skip

    def _open_after(self, barrier: SnapshotBarrier, until: float, *, is_save: bool) -> None:
        """Opens the barrier at `until` unless it is marked or opened earlier, and releases held requests. That a cut
        came too late is for its coordinator to say.
        """
        with self._state_lock:
            while self._is_current(barrier) and (left := until - time.monotonic()) > 0:
                self._flow.idle.wait(left)
            is_late = self._is_current(barrier)
            if is_late:
                self._admission_queue.open()
        if is_late and is_save:
            self._log(
                f"the snapshot barrier of save {barrier.number} opens by itself after {self.barrier_seconds:g} s"
            )
        self._admission_queue.decide()

    # -- opening ------------------------------------------------------------------------------------------

    def open(self, number: int) -> None:
        """The snapshot attempt is over: opens the barrier and releases held requests."""
        with self._state_lock:
            self._over = number
            barrier = self._admission_queue.barrier
            if barrier is not None and barrier.number <= number:
                self._admission_queue.open()

    @contextlib.contextmanager
    def while_closed(self, number: int) -> Iterator[float]:
        """No update is in flight and no commit is admitted inside. Yields the time at which the barrier opens by
        itself: the caller must have ended by then. ProtocolError: the barrier has opened.
        """
        with self._state_lock:
            barrier = self._admission_queue.barrier
            if barrier is None or barrier is not self._told or barrier.number != number:
                raise ProtocolError(f"{self._name}: the snapshot barrier of cut {number} is no longer closed")
            assert self._flow.is_idle
            yield self._until

    def mark(self, request: Request, message: Mark) -> None:
        in_thread("mark", request, lambda: self._mark_all(request, message))

    def _mark_all(self, request: Request, message: Mark) -> None:
        with self._state_lock:
            barrier = self._admission_queue.barrier
            if barrier is None or barrier is not self._told or barrier.number != message.number:
                raise ProtocolError(
                    f"{self._name}: the snapshot barrier of save {message.number} is no longer closed"
                )
            assert self._flow.is_idle
            try:
                self._mark(message.number, self._commits.hosted())
            finally:
                self._admission_queue.open()
        faults.reach("save.marked")
        request.reply(Done())
        self._admission_queue.decide()
