"""Blocks: the memory that slices lie in at their server; workers map whole ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from syncline.core.layout import Slice
from syncline.core.wire.traffic import AskHosted, Hosted, Map, Mapped
from syncline.errors import ProtocolError
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Request
from syncline.net.transport import Memory
from syncline.server.homes import Home

Bytes = npt.NDArray[np.uint8]


class _Block:
    """Some memory, and who needs it."""

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self.memory, self.num_bytes = memory, num_bytes
        self.slices: set[int] = set()
        self.is_kept = True  # by whoever made it: more slices may come


class Blocks:
    """Numbered blocks, made for slices and gone with the last of them."""

    def __init__(self, create_memory: Callable[[int], Memory], home: Home, log: Callable[[str], None]) -> None:
        self._create_memory, self._home, self._log = create_memory, home, log
        self._blocks: dict[int, _Block] = {}
        self._places: dict[int, tuple[int, int]] = {}  # slice: block, offset
        self._next = 0
        self._lock = threading.Lock()

    def make(self, num_bytes: int) -> int:
        """A new block, kept until `let_go`, and after that as long as a slice lies in it."""
        memory = self._reserve(num_bytes)
        self._home.adopt(memory.array)
        with self._lock:
            self._next += 1
            self._blocks[self._next] = _Block(memory, num_bytes)
            return self._next

    def _reserve(self, size: int) -> Memory:
        try:
            return self._create_memory(size)
        except OSError as error:
            self._log(
                f"too little memory to share {size} bytes of parameters: {error.strerror or error}; "
                "falls back to TCP: they go over the socket"
            )
            return HeapMemory(size)

    def take(self, number: int, part: Slice, offset: int) -> Bytes:
        """The bytes of a slice within a block."""
        with self._lock:
            block = self._blocks[number]
            view = block.memory.array[offset : offset + part.num_bytes]
            if offset < 0 or view.nbytes != part.num_bytes:
                raise ProtocolError(f"slice {part.id} does not fit where it is said to lie")
            self._leave(part.id)
            block.slices.add(part.id)
            self._places[part.id] = (number, offset)
            return view

    def let_go(self, number: int) -> None:
        """No more slices will come into this block."""
        with self._lock:
            self._blocks[number].is_kept = False
            self._close_if_empty(number)

    def drop(self, slices: Iterable[int]) -> None:
        """These slices do not lie here any more."""
        with self._lock:
            for number in slices:
                self._leave(number)

    def _leave(self, number: int) -> None:
        block, _ = self._places.pop(number, (0, 0))
        if block:
            self._blocks[block].slices.discard(number)
            self._close_if_empty(block)

    def _close_if_empty(self, number: int) -> None:
        block = self._blocks[number]
        if not block.slices and not block.is_kept:
            del self._blocks[number]
            self._home.release(block.memory.array)
            block.memory.close()  # whoever has mapped it keeps it

    # -- what workers ask ---------------------------------------------------------------------------------

    def tell(self, request: Request, message: AskHosted, primaries: Iterable[int]) -> None:
        with self._lock:
            places = {number: self._places[number] for number in primaries if number in self._places}
            used = sorted({block for block, _ in places.values()})
            shared = [
                (number, self._blocks[number].num_bytes)
                for number in used
                if request.endpoint.can_carry(self._blocks[number].memory)
            ]
        request.reply(Hosted(shared, [(number, *place) for number, place in places.items()]))

    def give(self, request: Request, message: Map, who: str) -> None:
        with self._lock:
            block = self._blocks.get(message.block)
        if block is None or not request.endpoint.can_carry(block.memory):
            raise ProtocolError(f"{who} shares no block {message.block}")
        request.reply(Mapped(block.num_bytes), attachment=block.memory)

    def close(self) -> None:
        for block in list(self._blocks.values()):
            block.memory.close()
