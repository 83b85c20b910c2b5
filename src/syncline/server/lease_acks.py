"""Lease ranges consumed by commits, kept with slice 0 until the coordinator confirms them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from syncline.core.slice_state import Identity
from syncline.core.wire.leases import AskLeaseAcks, Confirm, GivenLeaseAcks, LeaseAck
from syncline.core.wire.message import Done, Message
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.server.backups import Backups
from syncline.server.commits import Commits
from syncline.server.slices import HostedSlice


def unconfirmed_here(slots: Iterable[HostedSlice]) -> tuple[list[LeaseAck], list[LeaseAck]]:
    """Unconfirmed lease acks of slice 0, if it is here: of applied commits, and of late ones."""
    first = next((slot for slot in slots if slot.part.id == 0), None)
    if first is None:
        return [], []
    with first.lock:
        return first.state.ack_entries(), first.state.late_entries()


def open_here(commits: Commits) -> list[Identity]:
    """Under `state_lock`: removed workers with unapplied commits, which may still be applied or dropped."""
    fenced = (commit for commit in commits.flow.unfinished() if commit.item.is_fenced)
    return sorted({(commit.worker, commit.item.incarnation) for commit in fenced})


def ack_handlers(
    commits: Callable[[], Commits], slices: Mapping[int, HostedSlice], backups: Backups
) -> dict[type[Message], Callable[[Request, Any], None]]:
    """Handlers for the coordinator's requests about lease acks."""

    def tell(request: Request, message: AskLeaseAcks) -> None:
        known = commits()
        with known.state_lock:
            waiting, slots = open_here(known), list(slices.values())
        # In this order: what is applied in between is given twice, and not left out.
        acks, late = unconfirmed_here(slots)
        if not any(slot.part.id == 0 for slot in slots):
            raise ProtocolError("slice 0 has another primary")
        request.reply(GivenLeaseAcks(acks, late, waiting))

    def confirm(request: Request, message: Confirm) -> None:
        for slot in (*slices.values(), *backups.slots()):
            if slot.part.id == 0:
                with slot.lock:
                    slot.state.confirmed(message.acks, message.late)
        if request.number:
            request.reply(Done())

    return {AskLeaseAcks: tell, Confirm: confirm}
