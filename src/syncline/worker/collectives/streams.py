"""What one other worker has said, and was not taken yet."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Protocol

from syncline.core.wire.collectives import Describe, Offer, Taken
from syncline.net.transport import Buffer, Memory
from syncline.worker.arrays import Bytes

#: A worker has few of its own.
MOST_MEMORIES = 1 << 12
Key = tuple[tuple[int, ...], int]


class Landing(Protocol):
    """Where chunks of one other worker go, in their order."""

    def place(self, offset: int, num_bytes: int) -> Buffer:
        """For the next one; a FrameError when it is not the next one, or of another size."""

    def came(self) -> None:
        """It is here."""


class Stream:
    """Of one way; changed and read under the lock of all ways."""

    def __init__(self) -> None:
        self.checked: tuple[object, int] = (None, 0)  # a description that was found sound, and the bytes with it
        self.said: collections.deque[tuple[Describe, Sequence[Buffer]]] = collections.deque()
        self.last: Key | None = None  # what it has described last: its chunks come now
        self.heard: Key | None = None  # what of it was taken last
        self.landing: Landing | None = None  # for chunks of that
        self.through: set[Key] = set()
        self.memories: dict[int, Memory] = {}  # of the other side
        self.shared: set[int] = set()  # of mine, that it knows
        # from one to one
        self.num_offered = self.num_taken = 0  # to it by me, from it by me
        self.offers: collections.deque[tuple[Offer, Sequence[Buffer]]] = collections.deque()
        self.wants: set[int] = set()  # of my offers: those whose bytes it wants
        self.answers: dict[int, Taken] = {}
        self.inbox: Inbox | None = None  # for the bytes of an offer of its


class Inbox:
    """Where the bytes of one offer go."""

    def __init__(self, number: int, data: Bytes) -> None:
        self.number, self.data, self.count = number, data, 0
