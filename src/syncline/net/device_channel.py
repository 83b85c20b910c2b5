"""A device channel: what the worker and the server of one process hand each other on a GPU, past the host's memory.

Gradients one way, new parameters the other. What is handed over has an event (of `torch.cuda`, or None): whoever uses
it has its stream wait for that.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple


class Handed(NamedTuple):
    """Bytes on a device: there, when the event has come."""

    data: Any  # a torch tensor of bytes
    event: Any = None


class DeviceChannel:
    """Between one worker and its server. Each side may look from any thread."""

    def __init__(self, device: str) -> None:
        self.device = device  #: the server's
        self._lock = threading.Lock()
        self._gradients: dict[int, Handed] = {}  # by segment, laid out as it is
        self._parameters: dict[int, Handed] = {}  # by slice
        self.segments: frozenset[int] = frozenset()  #: whose gradients and parameters go through here

    # -- the worker's side --------------------------------------------------------------------------------

    def open_for(self, segment: int) -> None:
        """From now on this segment is handed over here; its parameters are in host memory only when asked for."""
        with self._lock:
            self.segments |= {segment}

    def give(self, segment: int, gradients: Handed) -> None:
        """Of a segment what is there so far, for the next commit: which slices is told then, or all at the commit."""
        self._gradients[segment] = gradients

    def parameters(self, number: int) -> Handed | None:
        """A slice as its server has it; not written before this worker's next commit."""
        return self._parameters.get(number)

    # -- the server's side --------------------------------------------------------------------------------

    def gradients(self, segment: int) -> Handed | None:
        return self._gradients.get(segment) if segment in self.segments else None

    def put(self, number: int, parameters: Handed) -> None:
        """A slice has changed."""
        self._parameters[number] = parameters
