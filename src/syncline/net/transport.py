"""The seam: what a connection is, whatever carries it (TCP, TLS, Unix sockets, or plain calls in one process)."""

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
        """Gives it back; the bytes go when no array uses them any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Who is on the other side, as proved by the handshake."""

    role: str
    name: str
    incarnation: int

    def __str__(self) -> str:
        return self.name


class Receiver(Protocol):
    """What a connection hands its frames to. A FrameError from either call closes the connection."""

    def buffers_for(self, header: Header, message: Message) -> Sequence[Buffer]:
        """Where the payload goes: buffers of `header.payload_bytes` in all, or a ProtocolError."""

    def deliver(self, header: Header, message: Message, payload: Sequence[Buffer], attachment: Memory | None) -> None:
        """A whole frame is here."""

    def lost(self, reason: str) -> None:
        """The connection is closed; nothing more will come."""


class Connection(abc.ABC):
    """One authenticated way to one peer. Any thread may send; frames arrive one at a time, in order."""

    shares_memory: bool  #: whether an attachment (shared memory) can go with a frame

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._sent = [0, 0]  # frames, bytes; changed under the lock of whoever sends
        self._received = [0, 0]

    @abc.abstractmethod
    def start(self, receiver: Receiver, *, waiter_reads: bool = False) -> bool:
        """Begins to hand frames to the receiver; whether that is left to those who wait, who call `read`.

        A waiter that reads for itself need not be woken by another thread. Not every connection can leave it to
        them: over a network, bytes must be taken in while nobody waits.
        """

    @abc.abstractmethod
    def read(self, seconds: float) -> bool:
        """Hands over one frame, or sees the end, in the caller's thread; False when neither came in time."""

    @abc.abstractmethod
    def send(
        self, header: Header, body: bytes, buffers: Iterable[Buffer] = (), attachment: Memory | None = None
    ) -> None:
        """Sends a frame; the buffers have `header.payload_bytes` in all. Raises ConnectionLost."""

    def post(self, packed: bytes) -> None:
        """Sends a frame that is packed already. Only where waiters read."""
        raise NotImplementedError

    def take_like(self, head: bytes, payload_bytes: int, seconds: float) -> Buffer | None:
        """Only where waiters read: the payload of the next frame, if it comes in time, whole, with a header and
        body as these of my own. Otherwise nothing is taken."""
        raise NotImplementedError

    @abc.abstractmethod
    def create_memory(self, num_bytes: int) -> Memory:
        """Memory that can be attached to a frame of this connection; an OSError when there is too little."""

    @abc.abstractmethod
    def can_carry(self, memory: Memory) -> bool:
        """Whether this memory can be attached to a frame of this connection."""

    @abc.abstractmethod
    def close(self, reason: str = "closed") -> None:
        """Closes both directions; safe to call again."""

    def stats(self) -> WireStats:
        """What went over this connection so far."""
        return WireStats(
            frames_sent=self._sent[0],
            bytes_sent=self._sent[1],
            frames_received=self._received[0],
            bytes_received=self._received[1],
        )
