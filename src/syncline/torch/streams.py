"""Copies on side streams, ordered by marks; and host memory that a GPU copies fast.

Nothing here blocks the user's stream. Tests replace the GPU (`open_side`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from syncline.server.device_storage import RegisteredMemory
from syncline.worker.arrays import Bytes


class StreamMark(Protocol):
    """A place in a side's queue."""

    def done(self) -> bool:
        """Whether everything queued before it has happened."""

    def wait(self) -> None:
        """Blocks the caller until it is done."""

    def order(self) -> None:
        """Orders the caller's stream after it."""


class Side(Protocol):
    """A queue of copies between host and device, besides the user's stream."""

    def current(self) -> Hashable:
        """The caller's stream."""

    def follow(self, stream: Any = None) -> None:
        """Later copies wait for everything queued so far on a stream (by default the caller's)."""

    def follow_event(self, event: Any) -> None:
        """Later copies wait for an event of another stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy; both tensors must stay unchanged until a later mark is done."""

    def mark(self) -> StreamMark:
        """Done when everything queued so far is."""

    def host_memory(self, array: Bytes) -> torch.Tensor:
        """Foreign host memory as a tensor that copies fast; registered once and kept alive."""

    def new_host_memory(self, num_bytes: int) -> torch.Tensor:
        """New host memory that copies fast."""


def open_side(device: torch.device, say: Callable[[str], None]) -> Side | None:
    """A side of this device; None if it gains nothing."""
    return CudaSide(device, say) if device.type == "cuda" else None


class CudaMark:
    """An event."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaSide:
    """A stream of its own."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._registered = RegisteredMemory(device, say)

    def current(self) -> Hashable:
        return torch.cuda.current_stream(self._device)

    def follow(self, stream: Any = None) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device) if stream is None else stream)

    def follow_event(self, event: Any) -> None:
        self._stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> StreamMark:
        return CudaMark(self._device, self._stream)

    def host_memory(self, array: Bytes) -> torch.Tensor:
        return self._registered.tensor(array)

    def new_host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
