"""Where slices are stored: in memory blocks that workers map, or on a GPU with a copy in host memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from syncline.core.layout import Slice
from syncline.core.units import counted
from syncline.core.wire.traffic import AskHosted, Hosted, Map, Mapped
from syncline.errors import ConfigError, ProtocolError
from syncline.net.device_channel import DeviceChannel
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Request
from syncline.net.transport import Memory

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
        self, create_memory: Callable[[int], Memory], home: SliceStorage, log: Callable[[str], None]
    ) -> None:
        self._create_memory, self._home, self._log = create_memory, home, log
        self.blocks: dict[int, _Block] = {}
        self.places: dict[int, tuple[int, int]] = {}  # slice: block, offset
        self._next = 0
        self._lock = threading.Lock()

    def make(self, num_bytes: int) -> int:
        """Allocates a block. It is kept until `let_go`, then as long as a slice lies in it."""
        memory = self._reserve(num_bytes)
        self._home.adopt(memory.array)
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
            self._home.release(block.memory.array)
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


#: cudaHostRegisterReadOnly: for read-only mappings.
_READ_ONLY = 8
_REGISTERED_ALREADY = 712
#: Below this size a failed registration is not reported.
_WORTH_A_WORD = 1 << 20


class RegisteredMemory:
    """Host memory registered with the GPU driver, for the lifetime of this object."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device, self._say = device, say
        self._known: dict[tuple[int, int], tuple[torch.Tensor, Bytes]] = {}
        self._addresses: list[int] = []
        # The finalizer keeps the arrays alive until they are unregistered.
        self.close = weakref.finalize(self, _unregister, device, self._addresses, self._known)
        self.close.atexit = False  # at exit the driver frees everything itself, possibly before us

    def tensor(self, array: Bytes) -> torch.Tensor:
        """The array as a tensor. Registers its memory on first use and keeps it alive."""
        key = (array.ctypes.data, array.nbytes)
        if key not in self._known:
            self._register(array)
            self._known[key] = (bytes_at(array), array)
        return self._known[key][0]

    def release(self, array: Bytes) -> None:
        """Unregisters this memory early."""
        address = array.ctypes.data
        if self._known.pop((address, array.nbytes), None) is not None and address in self._addresses:
            self._addresses.remove(address)
            _unregister(self._device, [address], {})

    def _register(self, array: Bytes) -> None:
        flags = 0 if array.flags.writeable else _READ_ONLY
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, flags))
            if code:
                _forget_error(self._device)
            else:
                self._addresses.append(array.ctypes.data)
        # In one process a server and its worker share memory, which may be registered already.
        if code not in (0, _REGISTERED_ALREADY) and array.nbytes >= _WORTH_A_WORD:
            self._say(f"memory could not be registered with the GPU (CUDA error {code}): copies are slower")


def _unregister(device: torch.device, addresses: list[int], known: dict[Any, Any]) -> None:
    codes = [int(torch.cuda.cudart().cudaHostUnregister(address)) for address in addresses]
    if any(codes):
        _forget_error(device)
    known.clear()


def _forget_error(device: torch.device) -> None:
    """Clears a failed call from the CUDA runtime; otherwise torch's next check raises it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def bytes_at(array: Bytes) -> torch.Tensor:
    """A tensor over an array's memory, which must outlive it. Read-only arrays are allowed."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    # from_numpy warns about read-only arrays; nothing is written through this tensor.
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)


_NOTHING = contextlib.nullcontext()


class SliceStorage:
    """Slices in host memory: rules compute in place."""

    device_channel: DeviceChannel | None = None  #: to the worker of this process
    is_lazy = False  #: whether host memory may be older than the rules' values
    decay = 0.0  #: of the running average; 0: no average

    def adopt(self, memory: Bytes) -> None:
        """Prepares memory that holds slices or gradients."""

    def release(self, memory: Bytes) -> None:
        """The memory is no longer used."""

    def numbers(self, host: torch.Tensor, part: Slice | None = None) -> torch.Tensor:
        """The tensor that rules update, for a slice in host memory."""
        return host

    def bring(self, staged: torch.Tensor) -> torch.Tensor:
        """A staged gradient, where rules can use it."""
        return staged

    def at_work(self) -> AbstractContextManager[object]:
        """Context for everything that one thread does with a slice."""
        return _NOTHING

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """Host memory was written: loads the rules' values from it."""

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """Copies new values to host memory before it returns."""

    def refresh(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """Brings host memory up to date for a reader."""

    def settle(self) -> None:
        """Waits for the work that this thread has started."""

    def close(self) -> None:
        """Releases the prepared memory."""


class DeviceStorage(SliceStorage):
    """Slices on a GPU. Every thread has its own stream. Host memory is complete before workers are told."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device = device
        self._registered = RegisteredMemory(device, say)
        self._threads = threading.local()

    def adopt(self, memory: Bytes) -> None:
        if memory.nbytes:
            self._registered.tensor(memory)

    def release(self, memory: Bytes) -> None:
        self._registered.release(memory)

    def numbers(self, host: torch.Tensor, part: Slice | None = None) -> torch.Tensor:
        return host.to(self._device)

    def bring(self, staged: torch.Tensor) -> torch.Tensor:
        return staged.to(self._device, non_blocking=True)

    def at_work(self) -> AbstractContextManager[object]:
        if not hasattr(self._threads, "stream"):
            self._threads.stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._threads.stream)

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        numbers.copy_(host)

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(numbers, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._registered.close()


def home_of(name: str, say: Callable[[str], None]) -> SliceStorage:
    """The storage for `--server-device`; a ConfigError if the device does not exist."""
    if name == "cpu":
        return SliceStorage()
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        there = f"torch sees {counted(count, 'GPU') if count else 'no GPUs'} on the server's host"
        raise ConfigError(f"--server-device {name}: {there}; leave it out, or use cpu")
    return DeviceStorage(torch.device("cuda", index), say)
