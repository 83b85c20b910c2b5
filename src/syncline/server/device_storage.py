"""Slice storage on the GPU of a worker in the same process. Host memory is updated when it is read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from syncline.core.layout import Slice
from syncline.net.device_channel import DeviceChannel, Handed
from syncline.server.storage import Bytes, DeviceStorage, SliceStorage


class ChannelStorage(SliceStorage):
    """All threads use one stream, so that their work is ordered. Only readers of host memory wait: slices of the
    device channel are copied to the host on demand. Without a GPU it works on the CPU.
    """

    device_channel: DeviceChannel
    is_lazy = True

    def __init__(self, device_channel: DeviceChannel, say: Callable[[str], None]) -> None:
        self.device_channel = device_channel
        self._device = device = torch.device(device_channel.device)
        self._inner: SliceStorage = DeviceStorage(device, say) if device.type == "cuda" else SliceStorage()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._parts: dict[int, Slice] = {}  # by the address of their host memory
        self._stale: set[int] = set()
        self._lock = threading.Lock()

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
