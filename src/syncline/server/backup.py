"""One slice's copy on a server that is not its primary."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import numpy as np

from syncline.core.wire.traffic import Replicate, Seed
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer
from syncline.server.hosted import HostedSlice
from syncline.server.replication import Region


class Backup:
    """One slice's copy: what waits to be taken in, one after the other."""

    def __init__(self, slot: HostedSlice | None, primary: str) -> None:
        self.slot, self.primary = slot, primary
        self.region: Region | None = None  # lent by the primary
        self.own: Region | None = None  # where what is not lent is put
        self.landed: Sequence[Buffer] | None = None  # what a socket has put there
        self.held: tuple[Replicate, Region | None] | None = None  # in a ring: until all have voted for it
        self.queue: collections.deque[Request | Callable[[], None]] = collections.deque()  # or this server's own sums
        self.is_busy = False
        self.is_named = False  # by the replica sets
        self.is_out = False  # it is no backup any more


def slot_of(backup: Backup, message: Replicate) -> HostedSlice:
    if backup.slot is None:
        raise ProtocolError(f"the seed of slice {message.slice} did not come")
    return backup.slot


def is_held(backup: Backup, message: Seed | Replicate) -> bool:
    if backup.held is None or not isinstance(message, Replicate) or message.ballot is None:
        return False
    return backup.held[0].ballot == message.ballot


def is_of(message: Replicate, generation: int) -> bool:
    """In a ring: what is late, from before a change, may come while the sum of a round after it is made."""
    return message.ballot is None or message.ballot.generation == generation


def own_region(backup: Backup, slot: HostedSlice) -> Region:
    if backup.own is None:
        backup.own = Region(np.zeros(slot.part.num_bytes, np.uint8), slot.part.dtype)
    return backup.own
