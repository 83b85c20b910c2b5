"""Spread slices at a server of a ring: all pushes of them come here too, and are summed up for the copy here.

Every server sums in the order of worker names, from the same bytes: all come to the same bits, and no sum travels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from syncline import faults
from syncline.core.ring import Spread
from syncline.core.wire.traffic import Replicate
from syncline.server.backup import Backup, own_region
from syncline.server.backups import Backups
from syncline.server.copies import Copies
from syncline.server.homes import Home
from syncline.server.hosted import HostedSlice
from syncline.server.replication import Region, message_of
from syncline.server.work import RoundWork

#: Has something held for a round, unless that was dropped meanwhile; whether it was.
Holds = Callable[[RoundWork, Callable[[], None]], bool]
Held = tuple[Replicate, Region | None]


class Spreading:
    """Sums for these copies."""

    def __init__(self, spread: Spread, copies: Copies, backups: Backups, home: Home) -> None:
        self._spread, self._copies, self._backups, self._home = spread, copies, backups, home
        copies.backups = backups
        self.find: Callable[[Spread], frozenset[int]] = lambda spread: frozenset()
        self.primaries: Callable[[], list[HostedSlice]] = list
        self.holds: Holds = lambda work, take: False
        self.fail: Callable[[RoundWork, Exception], None] = lambda work, error: None

    def begin(self) -> None:
        """Seats have changed, under `order`."""
        self._copies.numbers = self.find(self._spread)
        for slot in self.primaries():
            slot.is_spread, slot.sum_coder = slot.part.id in self._copies.numbers, self._spread.sums

    def expect(self, work: RoundWork) -> None:
        """Under `order`: a round is whole here."""
        work.is_for_copies(self._copies.slots())

    def sum_up(self, work: RoundWork) -> None:
        for slot in work.copies:
            self._backups.queue_up(slot.part.id, functools.partial(self._sum_up, work, slot.part.id))

    def _sum_up(self, work: RoundWork, number: int) -> None:
        backup = self._backups.backups.get(number)
        if backup is None or backup.slot is None:
            return  # replica sets have changed: the round is dropped
        try:
            held = self._summed(work, backup, backup.slot)
        except Exception as error:  # whoever waits must hear of it, whatever it is
            if self.holds(work, lambda: None):  # else it was dropped meanwhile, and what its workers staged is gone
                self.fail(work, error)
            return

        def take() -> None:
            backup.held = held

        if self.holds(work, take):
            if faults.armed is not None:
                faults.reach("replicate.held")
            work.slice_held()

    def _summed(self, work: RoundWork, backup: Backup, slot: HostedSlice) -> Held:
        with slot.lock, self._home.at_work():
            update = slot.summed(work, own_region(backup, slot))
            return message_of(slot, update, work.ballot), update.region if update.has else None
