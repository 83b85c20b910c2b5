"""What a server's twin does about cuts: its gate, by the core's, in front of what workers ask; and marks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from syncline.core.checkpoint.snapshot import (
    Kind,
    SnapshotBarrier,
    barrier_of,
    behind_to_tell,
    clocks_to_tell,
    on_all,
)
from syncline.core.slice_state import highest_clocks
from syncline.core.wire.checkpoints import SnapshotBarrierClosed

from .hosting import Host, Identity
from .world import Frame, Session

if TYPE_CHECKING:
    from .job import Job


@dataclasses.dataclass(frozen=True)
class Marked:
    """A slice as it was when it was marked."""

    ledger: dict[tuple[str, int, int], int]
    clocks: dict[Identity, int]


class Gated(Host):
    """Closes its gate, tells what is in the slices when they stand still, marks them, opens it."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job, name)
        self.barrier: SnapshotBarrier | None = None
        self.closing: tuple[Session, SnapshotBarrier] | None = None  # who is to be told when all has come to its end
        self.told: SnapshotBarrier | None = None

    # -- what waits ---------------------------------------------------------------------------------------

    def keeps(self, session: Session, frame: Frame) -> bool:
        """Whether this waits. Who came first is decided upon first."""
        if self._passes(frame) and not any(self._passes(other) for _, other in self.held):
            return False
        self.held.append((session, frame))
        return True

    def _passes(self, frame: Frame) -> bool:
        if self._holds():
            return False
        barrier, bugs = self.barrier, self.job.bugs
        if barrier is None:
            return True
        kind: Kind = "rest" if frame.kind == "rest" else "leave" if frame.kind == "depart" else "commit"
        if ("gate_lets_rest" in bugs and kind != "commit") or ("gate_lets_commit" in bugs and kind == "commit"):
            return True
        clock = frame.body[1] if kind == "commit" else 0
        return barrier.lets_pass(kind, (frame.name, frame.incarnation), clock, is_whole=not self._lacking())

    def _let_go(self) -> None:
        """What may pass is decided upon, in the order in which it came."""
        while (found := next((one for one in self.held if self._passes(one[1])), None)) is not None:
            self.held.remove(found)
            session, frame = found
            {"rest": self._rest, "depart": self._depart}.get(frame.kind, self._commit)(session, frame)

    def _applied(self) -> dict[Identity, int]:
        return highest_clocks(self.hosted[n].state.clocks for n in self.primaries())

    def _there(self) -> set[Identity]:
        return {(s.name, s.incarnation) for s in self.rounds.standings.values() if not (s.left or s.fenced)}

    def _lacking(self) -> dict[Identity, int]:
        return self.barrier.lacking(self._on_all(), self._there()) if self.barrier is not None else {}

    def _on_all(self) -> dict[Identity, int]:
        slots = [self.hosted[n] for n in self.primaries()]
        settled = {(s.name, s.incarnation) for s in self.rounds.standings.values() if not s.active}
        return on_all(((slot.state.clocks, bool(slot.since)) for slot in slots), settled)

    def _behind(self) -> list[tuple[str, int, int]]:
        if "slices_apart" in self.job.bugs:
            return []
        there = self._there()
        return behind_to_tell(self._applied(), {w: clock for w, clock in self._on_all().items() if w in there})

    # -- who leaves ---------------------------------------------------------------------------------------

    def on_depart(self, session: Session, frame: Frame) -> None:
        if frame.generation != self.generation:
            kind = "refresh" if frame.generation < self.generation else "behind"
            self.reply(session, kind, (frame.body[0],))
            return
        if not self.opened:
            self.opened = True
            self._reset()
        if not self.keeps(session, frame):
            self._depart(session, frame)

    def _depart(self, session: Session, frame: Frame) -> None:
        if (frame.name, frame.incarnation) in self._there():
            self._take(self.rounds.leave(frame.name, frame.incarnation))
        self.reply(session, "rested", (frame.body[0],))

    # -- closing ------------------------------------------------------------------------------------------

    def on_close_gate(self, session: Session, frame: Frame) -> None:
        if not self.heed(session, frame):
            return
        message, before = frame.body, self.barrier
        barrier = barrier_of(message.number, message.turn, message.through)
        is_old = before is not None and not before.is_replaced_by(barrier.number, barrier.turn)
        if self._holds() or is_old:
            self.reply(session, "gate_refused", (barrier.number,))
            return
        if not self.primaries():
            self.reply(
                session, "gate_closed", (barrier.number, barrier.turn, SnapshotBarrierClosed([], has_slices=False))
            )
            return
        self.barrier, self.closing = barrier, (session, barrier)
        self.world.at(self.world.now + 1.5 * self.job.scenario.barrier_seconds, lambda: self._check_open(barrier))
        if "gate_stays" not in self.job.bugs:
            self.after(self.job.scenario.barrier_seconds, lambda: self._open_late(barrier))
        self._let_go()
        self.pump()

    def _is_whole(self) -> bool:
        return (self._is_idle() or "told_busy" in self.job.bugs) and not self._lacking()

    def tell_closed(self) -> None:
        """Once everything that had begun has come to its end."""
        if self.closing is None or not self._is_whole():
            return
        (session, barrier), self.closing = self.closing, None
        self.told = barrier
        acks, late, _ = self._acks_here()
        updates = max(self.hosted[n].state.version for n in self.primaries())
        clocks = clocks_to_tell(barrier, self._applied(), self._there())
        answer = SnapshotBarrierClosed(clocks, acks, late, updates, behind=self._behind())
        self.reply(session, "gate_closed", (barrier.number, barrier.turn, answer))

    # -- opening ------------------------------------------------------------------------------------------

    def open_gate(self) -> None:
        """`_let_go` is to follow."""
        self.barrier = self.closing = None

    def _open_late(self, barrier: SnapshotBarrier) -> None:
        if self.barrier is barrier:
            if self.closing is not None:
                self.reply(self.closing[0], "gate_refused", (barrier.number,))
            self.open_gate()
            self._let_go()

    def _check_open(self, barrier: SnapshotBarrier) -> None:
        if self.barrier is barrier and self.is_alive and not self.is_paused:
            self.job.ledger.fail(f"{self.life} has its gate closed for long: {barrier}")

    def on_open_gate(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame) and self.barrier is not None and self.barrier.number <= frame.body[0]:
            self.open_gate()
            self._let_go()

    def on_mark(self, session: Session, frame: Frame) -> None:
        if not self.heed(session, frame):
            return
        number, barrier = frame.body[0], self.barrier
        is_told = barrier is not None and barrier is self.told and barrier.number == number
        if not is_told and "mark_open" not in self.job.bugs:
            self.reply(session, "gate_refused", (number,))
            return
        marked: dict[int, Any] = {}
        for slice_number in self.primaries():
            hosted = self.hosted[slice_number]
            marked[slice_number] = Marked(dict(hosted.ledger), dict(hosted.state.clocks))
        self.open_gate()
        self.reply(session, "marked", (number, marked))
        self._let_go()

    # -- what the changes of a server add -------------------------------------------------------------------

    def _is_idle(self) -> bool: ...  # type: ignore[empty-body]
