"""One call, with all who take part: what each has said of it, and where the data lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from syncline.core.collectives import given, hosts_of, is_inline
from syncline.core.wire.collectives import Describe
from syncline.net.transport import Buffer
from syncline.worker.arrays import Bytes
from syncline.worker.collectives.party import Party
from syncline.worker.collectives.streams import Key
from syncline.worker.collectives.waiting import Gone, Waiting

NOTHING: Bytes = np.empty(0, np.uint8)


class Again(Exception):
    """Members have come, or left between two calls: all describe it again, with those who are there."""


class Told(Exception):
    """An error that all others have, or find by themselves."""


class Call(NamedTuple):
    """What this rank has called."""

    said: Describe  # but for where the data lie
    data: Bytes  # that it gives, and where the result of a reduction comes to be
    is_own: bool = False  # the data are the caller's, and must not be written


#: Makes the call, given who takes part, and its number.
Make = Callable[[Party, int], Call]


class Begun:
    """A call that this rank has described, and who has said the same of it: what these have given with it."""

    __slots__ = ("number", "party", "payloads")

    def __init__(self, party: Party, number: int) -> None:
        self.party, self.number = party, number
        self.payloads: dict[int, Buffer] = {}  # by place

    @property
    def is_whole(self) -> bool:
        return len(self.payloads) == len(self.party) - 1


class Meeting:
    """One call, with all who take part."""

    def __init__(self, party: Party, number: int, waiting: Waiting) -> None:
        self.party, self.waiting = party, waiting
        self.place, self.group, self.ways, self.streams = party.place, party.group, party.ways, party.streams
        self.key: Key = (party.group, number)
        self.data = NOTHING
        self.is_own = self.is_staged = False  # the data: the caller's, not to be written; in memory that is kept
        self.is_made_again = False  # with other members: this one neither succeeded nor failed
        self.is_in_memory = False  # they lie where others of this host read and write them
        self.said: list[Describe] = []
        self.payloads: dict[int, Sequence[Buffer]] = {}
        self._hosts: list[list[int]] | None = None
        self._is_inline: bool | None = None

    @property
    def hosts(self) -> list[list[int]]:
        """The places of all, host by host."""
        if self._hosts is None:
            self._hosts = hosts_of(self.said)
            if self._hosts is None:
                raise Told("some ranks of a host share memory and some do not; use --transport tcp")
        return self._hosts

    @property
    def mine(self) -> Describe:
        return self.said[self.place]

    @property
    def is_inline(self) -> bool:
        """Whether all data came with the descriptions."""
        if self._is_inline is None:
            self._is_inline = all(is_inline(said, place) for place, said in enumerate(self.said))
        return self._is_inline

    @property
    def is_root(self) -> bool:
        return self.mine.root == self.group[self.place]

    @property
    def host(self) -> list[int]:
        """The places of those on this host."""
        return next(places for places in self.hosts if self.place in places)

    def memory_of(self, place: int) -> Bytes:
        """What a rank of this host gives, where it lies."""
        if place == self.place:
            return self.data
        said, size = self.said[place], given(self.said[place], place)
        memory = self.streams[place].memories.get(said.memory)
        if memory is None or said.offset + size > len(memory.array):
            self.ways[place].close(f"{self.party.names[place]} has described memory that it has not shared")
            raise Gone(self.ways[place], "it has described memory that it has not shared")
        return memory.array[said.offset : said.offset + size]
