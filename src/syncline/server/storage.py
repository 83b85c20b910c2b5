"""Where slices live: in blocks of memory that workers map, or on a GPU with host memory as its copy."""

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
    """Some memory, and who needs it."""

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self.memory, self.num_bytes = memory, num_bytes
        self.slices: set[int] = set()
        self.is_kept = True  # by whoever made it: more slices may come


class Blocks:
    """Numbered blocks, made for slices and gone with the last of them."""

    def __init__(
        self, create_memory: Callable[[int], Memory], home: SliceStorage, log: Callable[[str], None]
    ) -> None:
        self._create_memory, self._home, self._log = create_memory, home, log
        self.blocks: dict[int, _Block] = {}
        self.places: dict[int, tuple[int, int]] = {}  # slice: block, offset
        self._next = 0
        self._lock = threading.Lock()

    def make(self, num_bytes: int) -> int:
        """A new block, kept until `let_go`, and after that as long as a slice lies in it."""
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
        """No more slices will come into this block."""
        with self._lock:
            self.blocks[number].is_kept = False
            self._close_if_empty(number)

    def drop(self, slices: Iterable[int]) -> None:
        """These slices do not lie here any more."""
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
            block.memory.close()  # whoever has mapped it keeps it

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


#: cudaHostRegisterReadOnly: for memory that is mapped without the right to write.
_READ_ONLY = 8
_REGISTERED_ALREADY = 712
#: Below this, memory that could not be registered is nothing to speak of.
_WORTH_A_WORD = 1 << 20


class RegisteredMemory:
    """Memory that was registered with the GPU's driver, until this object goes."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device, self._say = device, say
        self._known: dict[tuple[int, int], tuple[torch.Tensor, Bytes]] = {}
        self._addresses: list[int] = []
        # What is mapped stays mapped until it is unregistered: the arrays go after this has run.
        self.close = weakref.finalize(self, _unregister, device, self._addresses, self._known)
        self.close.atexit = False  # the driver lets go of everything by itself then, maybe before us

    def tensor(self, array: Bytes) -> torch.Tensor:
        """The same bytes as a tensor; registered when it comes for the first time, and kept alive."""
        key = (array.ctypes.data, array.nbytes)
        if key not in self._known:
            self._register(array)
            self._known[key] = (bytes_at(array), array)
        return self._known[key][0]

    def release(self, array: Bytes) -> None:
        """This memory is to go before this object does."""
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
        # In one process a server and its worker share memory: whoever comes second finds it registered.
        if code not in (0, _REGISTERED_ALREADY) and array.nbytes >= _WORTH_A_WORD:
            self._say(f"memory could not be registered with the GPU (CUDA error {code}): copies are slower")


def _unregister(device: torch.device, addresses: list[int], known: dict[Any, Any]) -> None:
    codes = [int(torch.cuda.cudart().cudaHostUnregister(address)) for address in addresses]
    if any(codes):
        _forget_error(device)
    known.clear()


def _forget_error(device: torch.device) -> None:
    """The runtime remembers a failed call; the next check of torch raises it, and it is forgotten."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def bytes_at(array: Bytes) -> torch.Tensor:
    """A tensor over the memory of an array, which must outlive it; also of one that may not be written."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    # from_numpy warns of read-only arrays; nobody writes through this one.
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)


_NOTHING = contextlib.nullcontext()


class SliceStorage:
    """Slices in host memory: rules run where the bytes lie."""

    hatch: DeviceChannel | None = None  #: to the worker of this process
    is_lazy = False  #: whether host memory may be older than what rules have come to
    decay = 0.0  #: of the average that is kept of parameters; 0: none is

    def adopt(self, memory: Bytes) -> None:
        """This memory holds slices, or arenas with gradients for them."""

    def release(self, memory: Bytes) -> None:
        """It is not used any more."""

    def numbers(self, host: torch.Tensor, part: Slice | None = None) -> torch.Tensor:
        """The tensor that rules work on, for a slice that lies here in host memory."""
        return host

    def bring(self, staged: torch.Tensor) -> torch.Tensor:
        """A staged gradient, where rules can use it."""
        return staged

    def at_work(self) -> AbstractContextManager[object]:
        """Around everything that one thread does with a slice."""
        return _NOTHING

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """The host memory was written: rules begin with what is there."""

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """Workers read the host memory: it holds the new numbers when this returns."""

    def refresh(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """Somebody reads the host memory: it holds what rules have come to."""

    def settle(self) -> None:
        """What this thread has begun is done when this returns."""

    def close(self) -> None:
        """Lets go of the memory that was adopted."""


class DeviceStorage(SliceStorage):
    """Slices on a GPU. Every thread works on a stream of its own; what workers read is complete when it is told."""

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
    """The home that `--server-device` names; a ConfigError where there is no such device."""
    if name == "cpu":
        return SliceStorage()
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        there = f"torch sees {counted(count, 'GPU') if count else 'no GPUs'} on the server's host"
        raise ConfigError(f"--server-device {name}: {there}; leave it out, or say cpu")
    return DeviceStorage(torch.device("cuda", index), say)
