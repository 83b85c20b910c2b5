"""The transport interface: a connection, whatever carries it (TCP, TLS, Unix sockets, or calls within one
process).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from syncline.core.wire.message import Message
from syncline.net.frame import Header
from syncline.stats import WireStats

Buffer = memoryview


def buffer_of(array: npt.NDArray[np.uint8]) -> Buffer:
    """The bytes of an array, for a socket."""
    return memoryview(array)  # type: ignore[arg-type]


class Memory(Protocol):
    """Bytes that both sides of a connection can see."""

    array: npt.NDArray[np.uint8]

    def close(self) -> None:
        """Releases it; the bytes are freed with the last array."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """The authenticated peer."""

    role: str
    name: str
    incarnation: int

    def __str__(self) -> str:
        return self.name


class Receiver(Protocol):
    """Receives a connection's frames. A FrameError from either call closes the connection."""

    def buffers_for(self, header: Header, message: Message) -> Sequence[Buffer]:
        """Receive buffers for the payload, `header.payload_bytes` in total; or a ProtocolError."""

    def deliver(self, header: Header, message: Message, payload: Sequence[Buffer], attachment: Memory | None) -> None:
        """A complete frame."""

    def lost(self, reason: str) -> None:
        """The connection is closed."""


class Connection(abc.ABC):
    """An authenticated connection to one peer. Any thread may send; frames arrive one at a time, in order."""

    shares_memory: bool  #: whether shared memory can be attached to a frame

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._sent = [0, 0]  # frames, bytes; guarded by the sender's lock
        self._received = [0, 0]

    @abc.abstractmethod
    def start(self, receiver: Receiver, *, waiter_reads: bool = False) -> bool:
        """Starts delivering frames. Returns whether callers must `read` themselves.

        A caller that reads for itself need not be woken by another thread. Network connections cannot do this, since
        bytes must be received while no caller waits.
        """

    @abc.abstractmethod
    def read(self, seconds: float) -> bool:
        """Delivers one frame, or the end, in the caller's thread; False on timeout."""

    @abc.abstractmethod
    def send(
        self, header: Header, body: bytes, buffers: Iterable[Buffer] = (), attachment: Memory | None = None
    ) -> None:
        """Sends a frame; the buffers have `header.payload_bytes` in total. Raises ConnectionLost."""

    def post(self, packed: bytes) -> None:
        """Sends a packed frame. Only if callers read."""
        raise NotImplementedError

    def take_like(self, head: bytes, payload_bytes: int, seconds: float) -> Buffer | None:
        """Only if callers read: the payload of the next frame, if it arrives completely in time with a header and
        body like mine. Otherwise consumes nothing.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def create_memory(self, num_bytes: int, *, for_all: bool = False) -> Memory:
        """Memory that can be attached to a frame; an OSError if there is too little. `for_all`: other processes may
        write it too.
        """

    @abc.abstractmethod
    def can_carry(self, memory: Memory) -> bool:
        """Whether this memory can be attached to a frame of this connection."""

    @abc.abstractmethod
    def close(self, reason: str = "closed") -> None:
        """Closes both directions; safe to call again."""

    def stats(self) -> WireStats:
        """Statistics of this connection."""
        return WireStats(
            frames_sent=self._sent[0],
            bytes_sent=self._sent[1],
            frames_received=self._received[0],
            bytes_received=self._received[1],
        )
