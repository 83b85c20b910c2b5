"""Device channels: gradients and parameters on a GPU pass between a worker and its servers without host memory.

`DeviceChannel` joins a worker to the server in its own process, which hands it tensors; `torch.peer_channel` joins it
to servers in other processes of its host. What is handed over has an event (`torch.cuda`, or None) that the user's
stream must wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from syncline.core.layout import Segment
from syncline.net.rpc import Endpoint


class Handed(NamedTuple):
    """Bytes on a device, valid after the event."""

    data: Any  # a torch tensor of bytes
    event: Any = None


class WorkerChannel(Protocol):
    """The worker's side of a device channel. Slots are those of its arenas."""

    @property
    def device(self) -> Any:
        """The servers', for torch."""

    @property
    def segments(self) -> frozenset[int]:
        """Those that use this channel: their host arenas are not read."""

    def open_for(self, segment: Segment) -> bool:
        """This segment uses the channel from now on. False: it cannot."""

    def memory(self, segment: int, slot: int) -> Handed | None:
        """Where the gradients of the next commit must lie, and the event to record behind them; None: anywhere."""

    def wait_until_read(self, segment: Segment, slot: int) -> None:
        """Orders the caller's stream after what servers still read of an earlier commit."""

    def give(self, segment: int, gradients: Handed) -> None:
        """Hands over a segment's gradients for the next commit; messages tell which slices are complete."""

    def arrived(self, slot: int) -> None:
        """The commit of this slot is answered: `parameters` are those of the answer."""

    def parameters(self, number: int) -> Handed | None:
        """A slice's parameters; not written before the next commit of the same slot."""

    def follow(self, hosting: Callable[[int], Collection[str]], endpoints: Mapping[str, Endpoint]) -> None:
        """Servers have changed. `hosting`: those of a segment."""

    def forget(self, server: str) -> None:
        """The connection to this server is gone."""

    def close(self) -> None:
        """The connections are closed."""


class DeviceChannel:
    """Between one worker and the server of its process. Thread-safe."""

    def __init__(self, device: str) -> None:
        self.device = device  #: the server's
        self._lock = threading.Lock()
        self._gradients: dict[int, Handed] = {}  # by segment, in its layout
        self._parameters: dict[int, Handed] = {}  # by slice
        self.segments: frozenset[int] = frozenset()  #: their parameters are copied to the host only on demand

    # -- the worker's side --------------------------------------------------------------------------------

    def open_for(self, segment: Segment) -> bool:
        with self._lock:
            self.segments |= {segment.index}
        return True

    def memory(self, segment: int, slot: int) -> Handed | None:
        return None

    def wait_until_read(self, segment: Segment, slot: int) -> None:
        for part in segment.slices:  # the server may still be at work on what was there before
            handed = self._parameters.get(part.id)
            if handed is not None and handed.event is not None:
                handed.event.wait()  # the caller's stream does

    def give(self, segment: int, gradients: Handed) -> None:
        self._gradients[segment] = gradients

    def arrived(self, slot: int) -> None:
        """There is one answer at a time."""

    def parameters(self, number: int) -> Handed | None:
        return self._parameters.get(number)

    def follow(self, hosting: Callable[[int], Collection[str]], endpoints: Mapping[str, Endpoint]) -> None:
        """The server of this process stays."""

    def forget(self, server: str) -> None:
        """Nothing is kept of other servers."""

    def close(self) -> None:
        """Tensors are freed with it."""

    # -- the server's side --------------------------------------------------------------------------------

    def gradients(self, segment: int) -> Handed | None:
        return self._gradients.get(segment) if segment in self.segments else None

    def put(self, number: int, parameters: Handed) -> None:
        """A slice has changed."""
        self._parameters[number] = parameters
