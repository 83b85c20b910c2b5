"""A device channel: hands tensors between worker and server of one process on a GPU, without host memory.

Gradients one way, parameters the other. Each has an event (`torch.cuda`, or None) that the user's stream must wait
for.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple


class Handed(NamedTuple):
    """Bytes on a device, valid after the event."""

    data: Any  # a torch tensor of bytes
    event: Any = None


class DeviceChannel:
    """Between one worker and its server. Thread-safe."""

    def __init__(self, device: str) -> None:
        self.device = device  #: the server's
        self._lock = threading.Lock()
        self._gradients: dict[int, Handed] = {}  # by segment, in its layout
        self._parameters: dict[int, Handed] = {}  # by slice
        self.segments: frozenset[int] = frozenset()  #: that use this channel

    # -- the worker's side --------------------------------------------------------------------------------

    def open_for(self, segment: int) -> None:
        """This segment uses the channel from now on; its parameters are copied to the host only on demand."""
        with self._lock:
            self.segments |= {segment}

    def give(self, segment: int, gradients: Handed) -> None:
        """Hands over a segment's gradients for the next commit; messages tell which slices are complete."""
        self._gradients[segment] = gradients

    def parameters(self, number: int) -> Handed | None:
        """A slice's parameters; not written before this worker's next commit."""
        return self._parameters.get(number)

    # -- the server's side --------------------------------------------------------------------------------

    def gradients(self, segment: int) -> Handed | None:
        return self._gradients.get(segment) if segment in self.segments else None

    def put(self, number: int, parameters: Handed) -> None:
        """A slice has changed."""
        self._parameters[number] = parameters
