"""Slices on a GPU: of the server, or of a worker in the same process; memory of workers on the server's GPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from syncline.core.layout import Slice
from syncline.core.units import counted
from syncline.core.wire.traffic import AttachDevice
from syncline.errors import ConfigError
from syncline.net.device_channel import DeviceChannel, Handed
from syncline.net.device_memory import DeviceMemory, DeviceMemoryError, namespace
from syncline.server.storage import Bytes, SliceStorage

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


class MappedArena:
    """A worker's memory on this GPU, allocated by its process. Everything is queued on one stream."""

    def __init__(self, offer: AttachDevice, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._stream, size = stream, offer.num_bytes
        self._memory = DeviceMemory.map(device.index or 0, offer.memory, 2 * size)
        try:
            self._filled = torch.cuda.Event.from_ipc_handle(device, offer.filled)
            self._answered = torch.cuda.Event.from_ipc_handle(device, offer.answered)
        except (RuntimeError, TypeError, ValueError) as error:
            self._memory.close()
            raise DeviceMemoryError(f"the events cannot be opened: {str(error).splitlines()[0]}") from None
        whole = torch.as_tensor(self._memory, device=device)
        self._gradients, self._parameters = whole[:size], whole[size : 2 * size]
        self._views: dict[int, torch.Tensor] = {}

    def gradients(self, part: Slice) -> torch.Tensor:
        self._filled.wait(self._stream)
        view = self._views.get(part.id)
        if view is None:
            view = self._views[part.id] = _of(self._gradients, part).view(getattr(torch, part.dtype))
        return view

    def land(self, part: Slice, numbers: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            _of(self._parameters, part).copy_(numbers.view(torch.uint8), non_blocking=True)

    def answer(self) -> None:
        self._answered.record(self._stream)

    def close(self) -> None:
        self._stream.synchronize()
        self._memory.close()


def _of(flat: torch.Tensor, part: Slice) -> torch.Tensor:
    return flat[part.offset : part.offset + part.num_bytes]


def uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class DeviceStorage(SliceStorage):
    """Slices on a GPU. Every thread has its own stream. Host memory is complete before workers are told.

    From the first arena on that a worker of another process has here, all threads use one stream, so that their work
    is ordered, and slices are copied to the host on demand.
    """

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device = device
        self._registered = RegisteredMemory(device, say)
        self._threads = threading.local()
        self._shared: torch.cuda.Stream | None = None  # the one stream
        self._stale: set[int] = set()  # host memory that is older, by its address
        self._lock = threading.Lock()

    @property
    def is_lazy(self) -> bool:
        return self._shared is not None

    def open_arena(self, offer: AttachDevice) -> MappedArena:
        if offer.device != uuid_of(self._device):
            raise DeviceMemoryError("worker and server have different GPUs")
        if offer.namespace != namespace():
            raise DeviceMemoryError("worker and server are in different IPC namespaces")
        with self._lock:
            stream = self._shared or torch.cuda.Stream(self._device)
        arena = MappedArena(offer, self._device, stream)
        with self._lock:
            if self._shared is None:
                self._shared = stream
        return arena

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
        if self._shared is not None:
            return torch.cuda.stream(self._shared)
        if not hasattr(self._threads, "stream"):
            self._threads.stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._threads.stream)

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        with self.at_work():
            numbers.copy_(host)
        self.settle()
        with self._lock:
            self._stale.discard(host.data_ptr())

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._shared is None:
            host.copy_(numbers, non_blocking=True)
            current.synchronize()
            return
        if current != self._shared:  # begun before the first arena was opened
            current.synchronize()
        with self._lock:
            self._stale.add(host.data_ptr())

    def refresh(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        if self._shared is None:
            return
        with self._lock:
            if host.data_ptr() in self._stale:
                with self.at_work():
                    host.copy_(numbers, non_blocking=True)
                self._shared.synchronize()
                self._stale.discard(host.data_ptr())

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        if self._shared is not None:
            self._shared.synchronize()

    def close(self) -> None:
        self._registered.close()


def device_storage_of(name: str, say: Callable[[str], None]) -> DeviceStorage:
    """`--server-device cuda` or `cuda:N`."""
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        there = f"torch sees {counted(count, 'GPU') if count else 'no GPUs'} on the server's host"
        raise ConfigError(f"--server-device {name}: {there}; leave it out, or use cpu")
    return DeviceStorage(torch.device("cuda", index), say)


class ChannelStorage(SliceStorage):
    """All threads use one stream, so that their work is ordered. Only readers of host memory wait: slices of the
    device channel are copied to the host on demand. Without a GPU it works on the CPU.
    """

    device_channel: DeviceChannel

    def __init__(self, device_channel: DeviceChannel, say: Callable[[str], None]) -> None:
        self.device_channel = device_channel
        self._device = device = torch.device(device_channel.device)
        self._inner: SliceStorage = DeviceStorage(device, say) if device.type == "cuda" else SliceStorage()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._parts: dict[int, Slice] = {}  # by the address of their host memory
        self._stale: set[int] = set()
        self._lock = threading.Lock()

    @property
    def is_lazy(self) -> bool:
        return True

    def adopt(self, memory: Bytes) -> None:
        self._inner.adopt(memory)

    def release(self, memory: Bytes) -> None:
        self._inner.release(memory)

    def numbers(self, host: torch.Tensor, part: Slice | None = None) -> torch.Tensor:
        numbers = host.to(self._device, copy=True)
        self.settle()
        if part is not None:
            with self._lock:
                self._parts[host.data_ptr()] = part
                self._stale.discard(host.data_ptr())
        return numbers

    def bring(self, staged: torch.Tensor) -> torch.Tensor:
        return staged.to(self._device, non_blocking=True)

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        with self.at_work():
            numbers.copy_(host)
        self.settle()
        with self._lock:
            self._stale.discard(host.data_ptr())
            part = self._parts.get(host.data_ptr())
        if part is not None:
            self.device_channel.put(part.id, Handed(numbers.view(torch.uint8)))

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        part = self._parts.get(host.data_ptr())
        if part is None or part.segment not in self.device_channel.segments:
            self._copy(numbers, host)
            return
        with self._lock:
            self._stale.add(host.data_ptr())
        event = torch.cuda.Event() if self._stream is not None else None
        if event is not None:
            event.record(self._stream)
        self.device_channel.put(part.id, Handed(numbers.view(torch.uint8), event))

    def refresh(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        with self._lock:
            if host.data_ptr() not in self._stale:
                return
            self._copy(numbers, host)
            self._stale.discard(host.data_ptr())

    def _copy(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        with self.at_work():
            host.copy_(numbers, non_blocking=True)
        self.settle()

    def settle(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()
            self._stream.synchronize()

    def close(self) -> None:
        self._inner.close()
