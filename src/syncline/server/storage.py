"""Where slices are stored: in memory blocks that workers map, or on a GPU with a copy in host memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from syncline.core.layout import Slice
from syncline.core.wire.traffic import AskHosted, AttachDevice, Hosted, Map, Mapped
from syncline.errors import ConfigError, ProtocolError
from syncline.net.device_channel import DeviceChannel
from syncline.net.device_memory import DeviceMemoryError
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Request
from syncline.net.transport import Memory
from syncline.reduce.kernels import Numbers

Bytes = npt.NDArray[np.uint8]


class _Block:
    """Memory and its users."""

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self.memory, self.num_bytes = memory, num_bytes
        self.slices: set[int] = set()
        self.is_kept = True  # its maker may add slices


class Blocks:
    """Numbered blocks of slices; each is freed with its last slice."""

    def __init__(
        self, create_memory: Callable[[int], Memory], storage: SliceStorage, log: Callable[[str], None]
    ) -> None:
        self._create_memory, self._storage, self._log = create_memory, storage, log
        self.blocks: dict[int, _Block] = {}
        self.places: dict[int, tuple[int, int]] = {}  # slice: block, offset
        self._next = 0
        self._lock = threading.Lock()

    def make(self, num_bytes: int) -> int:
        """Allocates a block. It is kept until `let_go`, then as long as a slice lies in it."""
        memory = self._reserve(num_bytes)
        self._storage.adopt(memory.array)
        with self._lock:
            self._next += 1
            self.blocks[self._next] = _Block(memory, num_bytes)
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
            block = self.blocks[number]
            view = block.memory.array[offset : offset + part.num_bytes]
            if offset < 0 or view.nbytes != part.num_bytes:
                raise ProtocolError(f"slice {part.id} does not fit where it is said to lie")
            self._leave(part.id)
            block.slices.add(part.id)
            self.places[part.id] = (number, offset)
            return view

    def let_go(self, number: int) -> None:
        """No more slices will be added to this block."""
        with self._lock:
            self.blocks[number].is_kept = False
            self._close_if_empty(number)

    def drop(self, slices: Iterable[int]) -> None:
        """Removes these slices."""
        with self._lock:
            for number in slices:
                self._leave(number)

    def _leave(self, number: int) -> None:
        block, _ = self.places.pop(number, (0, 0))
        if block:
            self.blocks[block].slices.discard(number)
            self._close_if_empty(block)

    def _close_if_empty(self, number: int) -> None:
        block = self.blocks[number]
        if not block.slices and not block.is_kept:
            del self.blocks[number]
            self._storage.release(block.memory.array)
            block.memory.close()  # processes that have mapped it keep it

    # -- what workers ask ---------------------------------------------------------------------------------

    def tell(self, request: Request, message: AskHosted, primaries: Iterable[int]) -> None:
        with self._lock:
            places = {number: self.places[number] for number in primaries if number in self.places}
            used = sorted({block for block, _ in places.values()})
            shared = [
                (number, self.blocks[number].num_bytes)
                for number in used
                if request.endpoint.can_carry(self.blocks[number].memory)
            ]
        request.reply(Hosted(shared, [(number, *place) for number, place in places.items()]))

    def give(self, request: Request, message: Map, who: str) -> None:
        with self._lock:
            block = self.blocks.get(message.block)
        if block is None or not request.endpoint.can_carry(block.memory):
            raise ProtocolError(f"{who} shares no block {message.block}")
        request.reply(Mapped(block.num_bytes), attachment=block.memory)

    def close(self) -> None:
        for block in list(self.blocks.values()):
            block.memory.close()


class DeviceArena(Protocol):
    """A worker's memory on the GPU of this server, for one segment and slot."""

    def gradients(self, part: Slice) -> Numbers:
        """The worker's gradients of a slice. Orders the stream of the caller (`at_work`) after them."""

    def land(self, part: Slice, numbers: Numbers) -> None:
        """Queues a copy of a slice's parameters to the worker."""

    def answer(self) -> None:
        """What is queued so far belongs to the answer that is sent next."""

    def close(self) -> None:
        """Waits for what is queued, and lets the memory go."""


_NOTHING = contextlib.nullcontext()


class SliceStorage:
    """Slices in host memory: rules compute in place."""

    device_channel: DeviceChannel | None = None  #: to the worker of this process
    decay = 0.0  #: of the running average; 0: no average

    @property
    def is_lazy(self) -> bool:
        """Whether host memory may be older than the rules' values."""
        return False

    def open_arena(self, offer: AttachDevice) -> DeviceArena:
        """Maps a worker's memory on the GPU; a DeviceMemoryError says why it cannot be."""
        raise DeviceMemoryError("the server's parameters are in host memory")

    def adopt(self, memory: Bytes) -> None:
        """Prepares memory that holds slices or gradients."""

    def release(self, memory: Bytes) -> None:
        """The memory is no longer used."""

    def numbers(self, host: Numbers, part: Slice | None = None) -> Numbers:
        """The tensor that rules update, for a slice in host memory."""
        return host

    def bring(self, staged: Numbers) -> Numbers:
        """A staged gradient, where rules can use it."""
        return staged

    def at_work(self) -> AbstractContextManager[object]:
        """Context for everything that one thread does with a slice."""
        return _NOTHING

    def load(self, numbers: Numbers, host: Numbers) -> None:
        """Host memory was written: loads the rules' values from it."""

    def publish(self, numbers: Numbers, host: Numbers) -> None:
        """Copies new values to host memory before it returns."""

    def refresh(self, numbers: Numbers, host: Numbers) -> None:
        """Brings host memory up to date for a reader."""

    def settle(self) -> None:
        """Waits for the work that this thread has started."""

    def close(self) -> None:
        """Releases the prepared memory."""


def storage_of(name: str, say: Callable[[str], None]) -> SliceStorage:
    """The storage for `--server-device`; a ConfigError if the device does not exist."""
    if name == "cpu":
        return SliceStorage()
    try:
        from syncline.server.device_storage import device_storage_of
    except ImportError:
        raise ConfigError(f"--server-device {name}: it needs torch: pip install 'syncline[torch]'") from None

    return device_storage_of(name, say)
