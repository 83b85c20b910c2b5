"""Where workers' bytes wait at a server: in their own shared arenas, or in buffers that sockets fill."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container

import numpy as np
import torch

from syncline.core.layout import Slice
from syncline.core.slice_state import Identity
from syncline.net.hatch import Hatch
from syncline.net.transport import Buffer, Memory, buffer_of
from syncline.server.copies import Copies
from syncline.server.rules import Bytes, tensor_of


class Staging:
    """The staged bytes of all workers, by worker, slot and slice. A worker that came back is another one.

    Workers bring their arenas while others' bytes are added up, each in a thread of its own.
    """

    def __init__(self, release: Callable[[Bytes], None] = lambda array: None, hatch: Hatch | None = None) -> None:
        """`hatch`: to the worker of this process."""
        self._release, self._hatch = release, hatch
        self.copies = Copies()
        self._lock = threading.Lock()  # for all tables but `_handed`; what is known is found without it
        self._arenas: dict[tuple[Identity, int, int], Memory] = {}  # worker, segment, slot
        self._buffers: dict[tuple[Identity, int, int], Bytes] = {}  # worker, slot, slice
        self._tensors: dict[tuple[Identity, int, int], torch.Tensor] = {}
        self._handed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by slice: what it is of, and itself

    def attach(self, worker: Identity, segment: int, slot: int, arena: Memory) -> None:
        """In the place of the one before it: a worker that has reached us again brings its arena again."""
        with self._lock:
            before = self._arenas.get((worker, segment, slot))
            self._arenas[worker, segment, slot] = arena
            for key in [k for k in self._tensors if k[0] == worker and k[1] == slot]:
                del self._tensors[key]
        if before is not None:
            self._let_go(before)

    def is_shared(self, worker: Identity, slot: int, part: Slice) -> bool:
        is_handed = self._hatch is not None and part.segment in self._hatch.segments
        return is_handed or (worker, part.segment, slot) in self._arenas

    def buffer(self, worker: Identity, slot: int, part: Slice) -> Buffer:
        """Where a socket puts a slice's bytes; made once, used again for every clock of this slot."""
        key = (worker, slot, part.id)
        with self._lock:
            array = self._buffers.get(key)
            if array is None:
                array = self._buffers[key] = np.zeros(part.num_bytes, np.uint8)  # of an encoding, not all is written
        return buffer_of(array)

    def tensor(self, worker: Identity, slot: int, part: Slice) -> torch.Tensor:
        """The staged bytes of one slice, as numbers, where they lie."""
        handed = self._hatch.gradients(part.segment) if self._hatch is not None else None
        if handed is not None:
            if handed.event is not None:
                handed.event.wait()  # the caller's stream does
            return self._handed_slice(handed.data, part)
        key = (worker, slot, part.id)
        known = self._tensors.get(key)
        return known if known is not None else self._make_tensor(worker, slot, part)

    def _make_tensor(self, worker: Identity, slot: int, part: Slice) -> torch.Tensor:
        key = (worker, slot, part.id)
        with self._lock:
            arena = self._arenas.get((worker, part.segment, slot))
            if arena is not None:
                array = arena.array[part.offset : part.offset + part.num_bytes]
            else:
                array = self._buffers[key]
            made = self._tensors[key] = tensor_of(array, part.dtype)
        return made

    def _handed_slice(self, data: torch.Tensor, part: Slice) -> torch.Tensor:
        """It lies where it lies, mostly: the same tensor again."""
        known = self._handed.get(part.id)
        if known is None or known[0] is not data:
            view = data[part.offset : part.offset + part.num_bytes].view(getattr(torch, part.dtype))
            known = self._handed[part.id] = (data, view)
        return known[1]

    def forget_worker(self, worker: Identity) -> None:
        """Nothing of this worker is needed any more."""
        with self._lock:
            for table in (self._tensors, self._buffers):
                for key in [k for k in table if k[0] == worker]:
                    del table[key]
            arenas = [self._arenas.pop(place) for place in [k for k in self._arenas if k[0] == worker]]
        for arena in arenas:
            self._let_go(arena)

    def keep_only(self, slices: Container[int]) -> None:
        """Others are not here any more; but for those of which there are copies."""
        with self._lock:
            for table in (self._tensors, self._buffers):
                for key in [k for k in table if k[2] not in slices and k[2] not in self.copies.numbers]:
                    del table[key]

    def _let_go(self, arena: Memory) -> None:
        self._release(arena.array)
        arena.close()

    def close(self) -> None:
        with self._lock:
            self._tensors.clear()
            self._buffers.clear()
            arenas = list(self._arenas.values())
            self._arenas.clear()
        for arena in arenas:
            arena.close()
