"""Memory that the ranks of a host share: what this worker has given, and knows again by its address."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable

import numpy as np

from syncline.net import shm
from syncline.net.transport import Memory
from syncline.worker.arrays import Bytes

_LEAST_BYTES = 1 << 20


@dataclasses.dataclass(slots=True)
class _Mine:
    memory: Memory
    start: int  # address
    num_bytes: int
    owner: weakref.ref[Bytes]


def address_of(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])


class SharedMemories:
    """This worker's own. Given arrays are held by the script alone: with the last one its memory goes."""

    def __init__(self, create: Callable[[int], Memory]) -> None:
        self._create = create
        self._mine: dict[int, _Mine] = {}
        self._number = 0
        self.by_purpose: dict[str, tuple[int, Bytes]] = {}  # by what it is for
        self.dropped: list[int] = []  # that others may still have

    def empty(self, num_bytes: int) -> Bytes:
        """New memory, all zeros."""
        return self._make(num_bytes)[1]

    def _make(self, num_bytes: int) -> tuple[int, Bytes]:
        memory = self._create(max(1, num_bytes))
        array, memory.array = memory.array, np.empty(0, np.uint8)  # not held by it any more
        owner = array.base if isinstance(array.base, np.ndarray) else array  # what every view of it holds
        self._number = number = self._number + 1
        self._mine[number] = _Mine(memory, address_of(array), len(array), weakref.ref(owner))
        weakref.finalize(owner, self._drop, number).atexit = False
        return number, array[:num_bytes]

    def _drop(self, number: int) -> None:
        mine = self._mine.pop(number, None)
        if mine is not None:
            self.dropped.append(number)
            mine.memory.close()

    def kept(self, purpose: str, num_bytes: int) -> tuple[int, Bytes]:
        """Memory of at least this size, the same again for the same purpose, and its number."""
        number, array = self.by_purpose.get(purpose, (0, None))
        if array is None or len(array) < num_bytes:
            self.by_purpose.pop(purpose, None)
            array = None  # the old one goes first
            size = -(-max(num_bytes, _LEAST_BYTES) // _LEAST_BYTES) * _LEAST_BYTES
            number, array = self.by_purpose[purpose] = self._make(size)
        return number, array[:num_bytes]

    def forget(self, purpose: str) -> None:
        """What was kept for this is not reused: another worker may still read it."""
        self.by_purpose.pop(purpose, None)

    def find(self, data: Bytes) -> tuple[int, int] | None:
        """The memory in which these bytes lie, and where in it."""
        if self._mine:
            start = address_of(data)
            for number, mine in list(self._mine.items()):
                if mine.start <= start and start + len(data) <= mine.start + mine.num_bytes:
                    return number, start - mine.start
        return None

    def attachment(self, number: int) -> tuple[Memory, int]:
        """To be handed to another worker: the memory, and its size."""
        mine = self._mine[number]
        if isinstance(mine.memory, shm.SharedMemory):
            return mine.memory, mine.memory.num_bytes
        handed, owner = copy.copy(mine.memory), mine.owner()
        assert owner is not None
        start = mine.start - address_of(owner)
        handed.array = owner[start : start + mine.num_bytes]
        return handed, mine.num_bytes

    def close(self) -> None:
        self.by_purpose.clear()
        for number in list(self._mine):
            with contextlib.suppress(OSError):
                self._drop(number)
