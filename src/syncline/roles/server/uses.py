"""What commits have used of leases, kept with slice 0 until the coordinator has confirmed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from syncline.core.handing import AskUses, Confirm, Use, Uses
from syncline.core.message import Done
from syncline.net.rpc import Request
from syncline.roles.server.commits import Commits
from syncline.roles.server.hosted import HostedSlice
from syncline.roles.server.work import uses_of

Slots = Iterable[HostedSlice]


def uses_here(commits: Commits, slots: Slots) -> list[Use]:
    """Under `order`: what is not confirmed yet, where slice 0 is; with what the dead have committed and counts,
    though it is not applied yet."""
    first = next((slot for slot in slots if slot.part.id == 0), None)
    if first is None:
        return []
    with first.lock:
        uses = first.state.use_entries()
    return uses + uses_of(commit for commit in commits.flow.unfinished() if commit.item.is_fenced)


class LeaseUses:
    """Answers the coordinator about uses."""

    def __init__(
        self, commits: Callable[[], Commits], slots: Callable[[], Slots], backups: Callable[[], Slots]
    ) -> None:
        self._commits, self._slots, self._backups = commits, slots, backups

    def tell(self, request: Request, message: AskUses) -> None:
        commits = self._commits()
        with commits.order:
            uses = uses_here(commits, self._slots())
        request.reply(Uses(uses))

    def confirm(self, request: Request, message: Confirm) -> None:
        for slot in (*self._slots(), *self._backups()):
            if slot.part.id == 0:
                with slot.lock:
                    slot.state.confirmed(message.uses)
        if request.number:
            request.reply(Done())
