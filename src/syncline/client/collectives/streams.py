"""What one other worker has said, and was not taken yet."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Protocol

from syncline.client.arrays import Bytes
from syncline.core.collecting import Describe, Offer, Taken
from syncline.net.transport import Buffer, Memory

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
        self.said: collections.deque[tuple[Describe, Sequence[Buffer]]] = collections.deque()
        self.last: Key | None = None  # what it has described last: its chunks come now
        self.heard: Key | None = None  # what of it was taken last
        self.landing: Landing | None = None  # for chunks of that
        self.through: set[Key] = set()
        self.memories: dict[int, Memory] = {}  # of the other side
        self.shared: set[int] = set()  # of mine, that it knows
        # from one to one
        self.offers: collections.deque[tuple[Offer, Sequence[Buffer]]] = collections.deque()
        self.num_offered = self.num_taken = 0  # by me, from it
        self.takes: set[int] = set()  # of my offers: those whose bytes it wants
        self.answers: dict[int, Taken] = {}
        self.awaits = -1  # the number of my offer that its script waits for
        self.inbox: tuple[int, Bytes, int] | None = None  # number, where its bytes go, how many are here

