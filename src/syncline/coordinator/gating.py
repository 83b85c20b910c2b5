"""The cut at the coordinator: gates are closed, in turns, until the job is level; then it is marked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from syncline import faults
from syncline.coordinator.recording import Taken
from syncline.core.checkpoint.snapshot import CUT_SECONDS, Cut, ledger_at
from syncline.core.wire.checkpoints import Mark, SnapshotBarrierClosed
from syncline.core.wire.message import Message
from syncline.errors import WaitTimeout

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class Asking(Protocol):
    """Who asks servers and waits for their answers."""

    def ask_servers(
        self, messages: Mapping[str, Message], *, gives_way: bool = False, until: float | None = None
    ) -> dict[str, Message]:
        """The answers of all; none where something urgent came up, or the time is over."""


def find_level(coordinator: Coordinator, cut: Cut, asking: Asking) -> Taken | None:
    """Gates are closed, in turns, until the job is level; then it is marked. None: something was urgent."""
    verdict, began = "further", time.monotonic()
    while verdict == "further":
        answers = asking.ask_servers(dict.fromkeys(cut.servers, cut.close()), gives_way=True, until=cut.until)
        if not answers and time.monotonic() < cut.until:
            return None
        closed = {name: answer for name, answer in answers.items() if isinstance(answer, SnapshotBarrierClosed)}
        if closed.keys() != set(cut.servers):
            raise WaitTimeout(f"not all commits that had begun came to their end within {CUT_SECONDS:g} s")
        verdict = cut.decide(closed, time.monotonic())
    if verdict == "late":
        raise WaitTimeout(f"steps of {', '.join(cut.behind())} came to some servers only within {CUT_SECONDS:g} s")
    with coordinator.lock:
        state = coordinator.membership.state
        segments = tuple(coordinator.registry.layout.segments)
        taken = Taken(
            number=cut.number,
            servers=cut.servers,
            clocks=dict(cut.clocks),
            workers={name: state.members[name].incarnation for name in coordinator.membership.workers()},
            segments=segments,
            leases=ledger_at(state.leases, cut.uses, cut.late),
            num_updates=cut.num_updates,
            versions=cut.versions,
            seconds=state.saves.seconds + coordinator.reporting.seconds(),
        )
    faults.reach("gate.closed")
    if not asking.ask_servers(dict.fromkeys(cut.servers, Mark(cut.number)), gives_way=False, until=cut.until + 1.0):
        raise WaitTimeout("the servers did not mark their slices in time")
    taken.gate_seconds = time.monotonic() - began
    faults.reach("save.marked")
    return taken
