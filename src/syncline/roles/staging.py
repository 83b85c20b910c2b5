"""Where workers' bytes wait at a server: in their own shared arenas, or in buffers that sockets fill."""

from __future__ import annotations

import numpy as np
import torch

from syncline.core.layout import Slice
from syncline.net.transport import Buffer, Memory, buffer_of
from syncline.roles.rules import Bytes, tensor_of


class Staging:
    """The staged bytes of all workers, by worker, slot and slice."""

    def __init__(self) -> None:
        self._arenas: dict[tuple[str, int, int], Memory] = {}  # worker, segment, slot
        self._buffers: dict[tuple[str, int, int], Bytes] = {}  # worker, slot, slice
        self._tensors: dict[tuple[str, int, int], torch.Tensor] = {}

    def attach(self, worker: str, segment: int, slot: int, arena: Memory) -> None:
        self._arenas[worker, segment, slot] = arena

    def is_shared(self, worker: str, slot: int, part: Slice) -> bool:
        return (worker, part.segment, slot) in self._arenas

    def buffer(self, worker: str, slot: int, part: Slice) -> Buffer:
        """Where a socket puts a slice's bytes; made once, used again for every clock of this slot."""
        key = (worker, slot, part.id)
        if key not in self._buffers:
            self._buffers[key] = np.empty(part.num_bytes, np.uint8)
        return buffer_of(self._buffers[key])

    def tensor(self, worker: str, slot: int, part: Slice) -> torch.Tensor:
        """The staged bytes of one slice, as numbers, where they lie."""
        key = (worker, slot, part.id)
        if key not in self._tensors:
            arena = self._arenas.get((worker, part.segment, slot))
            if arena is not None:
                array = arena.array[part.offset : part.offset + part.num_bytes]
            else:
                array = self._buffers[key]
            self._tensors[key] = tensor_of(array, part.dtype)
        return self._tensors[key]

    def close(self) -> None:
        self._tensors.clear()
        self._buffers.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
