"""The commit gate of a server: closed while a cut is made; then the slices are marked, or it just opens again."""

from __future__ import annotations

import time
from collections.abc import Callable

from syncline import faults
from syncline.core.checkpoint.snapshot import SnapshotBarrier, behind_to_tell, clocks_to_tell, gate_of
from syncline.core.wire.checkpoints import CloseSnapshotBarrier, Mark, SnapshotBarrierClosed
from syncline.core.wire.message import Done
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.server.commits import Commits
from syncline.server.lease_acks import late_here, uses_here
from syncline.server.slices import HostedSlice
from syncline.server.tasks import in_thread

#: A gate that nobody marks or opens does so by itself: a coordinator that died there stops nobody.
GATE_SECONDS = 3.0


class SnapshotGate:
    """Closes, tells what is in the slices when they stand still, has them marked, opens."""

    def __init__(
        self,
        name: str,
        commits: Commits,
        *,
        mark: Callable[[int, list[HostedSlice]], None],
        log: Callable[[str], None],
        gate_seconds: float = GATE_SECONDS,
    ) -> None:
        """`mark` is called under `state_lock`, while nothing is on its way through the slices."""
        self._name, self._commits, self._mark, self._log = name, commits, mark, log
        self._flow, self._holding, self._state_lock = commits.flow, commits.holding, commits.state_lock
        self.gate_seconds = gate_seconds
        self._told: SnapshotBarrier | None = (
            None  # whose clocks were told: nothing has changed since, while it is closed
        )
        self.is_closed = False

    def end(self) -> None:
        """The server ends: whoever waits here hears so."""
        with self._state_lock:
            self.is_closed = True
            self._holding.open()

    # -- closing ------------------------------------------------------------------------------------------

    def close(self, request: Request, message: CloseSnapshotBarrier) -> None:
        in_thread("gate", request, lambda: self._close(request, message))

    def _close(self, request: Request, message: CloseSnapshotBarrier) -> None:
        gate = gate_of(message.number, message.turn, message.through)
        until = time.monotonic() + self.gate_seconds
        with self._state_lock:
            self._check_newer(gate)
            if not self._commits.hosts_any:
                request.reply(SnapshotBarrierClosed([], has_slices=False))
                return
            self._holding.close(gate)
        self._holding.decide()
        faults.reach("save.closed")
        with self._state_lock:
            while self._is_current(gate) and not (self._flow.is_idle and not self._holding.lacking()):
                if time.monotonic() >= until:
                    self._holding.open()
                self._flow.idle.wait(max(0.0, min(until - time.monotonic(), 0.5)))
            if self._is_current(gate) and self._holding.loading:
                self._holding.open()
            is_told = self._is_current(gate)
            answer = self._closed(gate)
            self._told = gate if is_told else self._told
        if not is_told:
            self._holding.decide()
            raise ProtocolError(f"{self._name}: save {gate.number} found its gate open again before all was through")
        request.reply(answer)
        self._open_after(gate, until)

    def _check_newer(self, gate: SnapshotBarrier) -> None:
        if self.is_closed:
            raise ProtocolError(f"{self._name} is closing")
        if self._holding.is_held:
            raise ProtocolError(f"{self._name}: no cut for save {gate.number}: a generation is being prepared")
        self._check_loaded(gate)
        before = self._holding.gate
        if before is not None and not before.is_replaced_by(gate.number, gate.turn):
            raise ProtocolError(
                f"{self._name} is asked to close its gate for save {gate.number}, turn {gate.turn}; it is closed for "
                f"save {before.number}, turn {before.turn}"
            )

    def _check_loaded(self, gate: SnapshotBarrier) -> None:
        if self._holding.loading:
            raise ProtocolError(f"{self._name}: no cut for save {gate.number}: rules are being given their state")

    def _is_current(self, gate: SnapshotBarrier) -> bool:
        return self._holding.gate is gate

    def _closed(self, gate: SnapshotBarrier) -> SnapshotBarrierClosed:
        slots = self._commits.hosted()
        applied, there = self._holding.applied(), self._holding.there()
        behind = behind_to_tell(applied, {w: clock for w, clock in self._holding.on_all().items() if w in there})
        updates = max((slot.state.version for slot in slots), default=0)
        clocks = clocks_to_tell(gate, applied, there)
        rounds = self._commits.rounds
        return SnapshotBarrierClosed(
            clocks, uses_here(slots), late_here(slots), updates,
            behind=behind,
            registered=[(s.name, s.incarnation, s.num_segments) for s in rounds.standings.values() if s.num_segments],
            first_segment=rounds.first_segment,
            versions=sum(slot.state.version for slot in slots),
        )  # fmt: skip

    def _open_after(self, gate: SnapshotBarrier, until: float) -> None:
        """It is marked or opened before, or opens by itself; what was held goes on."""
        with self._state_lock:
            while self._is_current(gate) and (left := until - time.monotonic()) > 0:
                self._flow.idle.wait(left)
            is_late = self._is_current(gate)
            if is_late:
                self._holding.open()
        if is_late:
            self._log(f"the gate of save {gate.number} was closed for {self.gate_seconds:g} s and opens by itself")
        self._holding.decide()

    # -- opening ------------------------------------------------------------------------------------------

    def open(self, number: int) -> None:
        """This cut is not to be; whoever has closed the gate lets go on what was held."""
        with self._state_lock:
            gate = self._holding.gate
            if gate is not None and gate.number <= number:
                self._holding.open()

    def mark(self, request: Request, message: Mark) -> None:
        in_thread("mark", request, lambda: self._mark_all(request, message))

    def _mark_all(self, request: Request, message: Mark) -> None:
        with self._state_lock:
            gate = self._holding.gate
            if gate is None or gate is not self._told or gate.number != message.number:
                raise ProtocolError(f"{self._name}: the gate of save {message.number} is not closed any more")
            assert self._flow.is_idle
            try:
                self._mark(message.number, self._commits.hosted())
            finally:
                self._holding.open()
        faults.reach("save.marked")
        request.reply(Done())
        self._holding.decide()
