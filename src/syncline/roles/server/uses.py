"""What commits have used of leases, kept with slice 0 until the coordinator has confirmed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from syncline.core.handing import AskUses, Confirm, Use, Uses
from syncline.core.message import Done, Message
from syncline.net.rpc import Request
from syncline.roles.server.backups import Backups
from syncline.roles.server.commits import Commits
from syncline.roles.server.hosted import HostedSlice
from syncline.roles.server.work import uses_of


def uses_here(commits: Commits, slots: Iterable[HostedSlice]) -> list[Use]:
    """Under `order`: what is not confirmed yet, where slice 0 is; with what the dead have committed and counts,
    though it is not applied yet."""
    first = next((slot for slot in slots if slot.part.id == 0), None)
    if first is None:
        return []
    with first.lock:
        uses = first.state.use_entries()
    return uses + uses_of(commit for commit in commits.flow.unfinished() if commit.item.is_fenced)


def late_here(slots: Iterable[HostedSlice]) -> list[Use]:
    """Likewise, of commits that were late."""
    first = next((slot for slot in slots if slot.part.id == 0), None)
    if first is None:
        return []
    with first.lock:
        return first.state.late_entries()


def uses_handlers(
    commits: Callable[[], Commits], slices: Mapping[int, HostedSlice], backups: Backups
) -> dict[type[Message], Callable[[Request, Any], None]]:
    """Answers the coordinator about uses."""

    def tell(request: Request, message: AskUses) -> None:
        known = commits()
        with known.order:
            uses, late = uses_here(known, list(slices.values())), late_here(list(slices.values()))
        request.reply(Uses(uses, late))

    def confirm(request: Request, message: Confirm) -> None:
        for slot in (*slices.values(), *backups.slots()):
            if slot.part.id == 0:
                with slot.lock:
                    slot.state.confirmed(message.uses, message.late)
        if request.number:
            request.reply(Done())

    return {AskUses: tell, Confirm: confirm}
