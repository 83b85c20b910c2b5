"""Memory for copies of marked slices, which whoever is about to change a slice waits for."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_HUGE_BYTES = 2 << 20


def new_memory(num_bytes: int) -> Bytes:
    """Fresh memory, in huge pages where there are any: the first touch of a small page takes longer than the copy
    into it. Nothing beyond `num_bytes` is ever touched."""
    if num_bytes < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(num_bytes, np.uint8)
    room = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array: Bytes = np.frombuffer(room, np.uint8)
    start = -array.ctypes.data % _HUGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // _HUGE_BYTES * _HUGE_BYTES)
    return array[start : start + num_bytes]


class CopyMemory:
    """What a save may copy, at most so much at a time; memory that is free again is used again."""

    def __init__(self, most_bytes: int, num_copies: int) -> None:
        """`most_bytes`: 0 for all there is. `num_copies`: that are asked for, at most."""
        self.most_bytes, self._num_left = most_bytes, num_copies
        self.used = 0
        self._spare: list[Bytes] = []

    def take(self, num_bytes: int) -> Bytes | None:
        """None: so much may not be copied now."""
        self._num_left -= 1
        found = next((k for k, one in enumerate(self._spare) if one.nbytes == num_bytes), None)
        if found is None and self.most_bytes and self.used + self.num_spare + num_bytes > self.most_bytes:
            self._spare.clear()
            if self.used + num_bytes > self.most_bytes:
                return None
        self.used += num_bytes
        return self._spare.pop(found) if found is not None else new_memory(num_bytes)

    @property
    def num_spare(self) -> int:
        """Bytes that are free, and kept."""
        return sum(one.nbytes for one in self._spare)

    def give_back(self, memory: Bytes) -> None:
        self.used -= memory.nbytes
        self._spare.append(memory)
        if self._num_left <= 0:
            self._spare.clear()

    def drop(self) -> None:
        """Nothing is copied any more."""
        self._num_left = 0
        self._spare.clear()
