"""Tensors in memory that the processes of a pipeline share.

The leader's model is whole: the parameters, buffers and gradients of its other stages are tensors like any other, and
lie where the stage processes compute with them. So whatever the script, the optimizer and the exchange read and write
in the leader is read and written for all stages, and no byte is copied between these processes.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Sequence

import torch

from syncline.core.layout import ALIGN
from syncline.net import shm
from syncline.torch.parameters import as_tensor
from syncline.torch.pipelining.orders import Block, Place
from syncline.worker.arrays import Bytes


def layout(tensors: Iterable[torch.Tensor], start: int = 0) -> tuple[list[int], int]:
    """Offsets for these tensors one behind the other, and the end."""
    offsets = []
    for tensor in tensors:
        offsets.append(start)
        start += -(-tensor.numel() * tensor.dtype.itemsize // ALIGN) * ALIGN
    return offsets, start


class SharedBlocks:
    """The leader's shared memory, by number; found again by address."""

    def __init__(self) -> None:
        self._blocks: dict[int, shm.SharedMemory] = {}
        self._starts: list[tuple[int, int]] = []  # address and number, sorted
        self._next = 0
        self._adopted: set[int] = set()

    @property
    def num_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self._blocks.values())

    @property
    def numbers(self) -> set[int]:
        return set(self._blocks)

    def create_numbered(self, num_bytes: int) -> tuple[int, Bytes]:
        """Zeros that stage processes can map."""
        memory = shm.create(max(1, num_bytes), for_all=True)
        number, self._next = self._next, self._next + 1
        self._blocks[number] = memory
        bisect.insort(self._starts, (memory.array.ctypes.data, number))
        return number, memory.array[: max(1, num_bytes)]

    def adopt(self, memory: shm.SharedMemory) -> int:
        """Numbers memory of the job's, which the job closes."""
        number, self._next = self._next, self._next + 1
        self._blocks[number] = memory
        self._adopted.add(number)
        bisect.insort(self._starts, (memory.array.ctypes.data, number))
        return number

    def place_of(self, index: int, tensor: torch.Tensor) -> Place | None:
        """Where this tensor lies; None: not in shared memory."""
        address = tensor.data_ptr()
        found = bisect.bisect_right(self._starts, (address, self._next)) - 1
        if found < 0:
            return None
        start, number = self._starts[found]
        end = address + tensor.numel() * tensor.dtype.itemsize
        return Place(index, number, address - start) if end <= start + self._blocks[number].num_bytes else None

    def view(self, place: Place, like: torch.Tensor) -> torch.Tensor:
        return _view(self._blocks[place.block].array, place, like)

    def describe(self, numbers: Iterable[int]) -> tuple[list[Block], list[int]]:
        """These blocks, and their file descriptors."""
        wanted = sorted(set(numbers))
        return [Block(n, self._blocks[n].num_bytes) for n in wanted], [self._blocks[n].fd for n in wanted]

    def drop(self, numbers: Iterable[int]) -> None:
        """Forgets these blocks: their memory is freed with the last tensor in it."""
        for number in numbers:
            memory = self._blocks.pop(number)
            if number not in self._adopted:
                memory.close()
        self._starts = [(start, number) for start, number in self._starts if number in self._blocks]


class MappedBlocks:
    """A stage process's view of its leader's shared memory."""

    def __init__(self) -> None:
        self._arrays: dict[int, Bytes] = {}

    def add(self, blocks: Sequence[Block], fds: Sequence[int]) -> None:
        for block, fd in zip(blocks, fds, strict=True):
            self._arrays[block.number] = shm.SharedMemory(os.dup(fd), block.num_bytes, writable=True).array
            os.close(fd)

    def view(self, place: Place, like: torch.Tensor) -> torch.Tensor:
        return _view(self._arrays[place.block], place, like)

    def drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._arrays.pop(number, None)


def _view(block: Bytes, place: Place, like: torch.Tensor) -> torch.Tensor:
    """A tensor with a storage of its own, so that `torch.save` writes it alone, beside others of other types."""
    own = block[place.offset : place.offset + like.numel() * like.dtype.itemsize]
    return as_tensor(own, 0, like.shape, like.dtype)
