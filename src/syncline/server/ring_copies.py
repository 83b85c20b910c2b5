"""Copies of spread slices whose primary is on another server of the ring. Their pushes come here too."""

from __future__ import annotations

from syncline.server.backups import Backups
from syncline.server.slices import HostedSlice


class Copies:
    """The copies of spread slices; empty without a ring."""

    def __init__(self) -> None:
        self.numbers: frozenset[int] = frozenset()  #: all spread slices
        self.backups: Backups | None = None

    def get(self, number: int) -> HostedSlice | None:
        return self.backups.slot_of(number) if self.backups is not None and number in self.numbers else None

    def slots(self) -> list[HostedSlice]:
        return [slot for number in sorted(self.numbers) if (slot := self.get(number)) is not None]
