"""The in-memory transport: a send is a call. Messages are still encoded, limited and decoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from syncline.core.layout import ALIGN
from syncline.errors import ConnectionLost, FrameError, SynclineError
from syncline.net import frame
from syncline.net.frame import Header
from syncline.net.transport import Buffer, Connection, Memory, Peer, Receiver


def aligned_zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Cache-line aligned bytes: vector code is slower on unaligned numbers."""
    array = np.zeros(max(1, num_bytes) + ALIGN, np.uint8)
    start = -array.ctypes.data % ALIGN
    return array[start : start + max(1, num_bytes)]


class HeapMemory:
    """Plain memory: within one process, everything is shared."""

    def __init__(self, num_bytes: int) -> None:
        self.array = aligned_zeros(num_bytes)

    def close(self) -> None:
        """Both sides hold this object: it is freed when neither does."""


class MemoryConnection(Connection):
    """One end of a pair. Frames are delivered in the sender's thread, so nothing is queued."""

    shares_memory = True

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.other: MemoryConnection | None = None
        self._receiver: Receiver | None = None
        self._lock = threading.Lock()

    def start(self, receiver: Receiver, *, waiter_reads: bool = False) -> bool:
        self._receiver = receiver
        return False  # frames are delivered in the sender's thread

    def read(self, seconds: float) -> bool:
        return False

    def send(
        self, header: Header, body: bytes, buffers: Iterable[Buffer] = (), attachment: Memory | None = None
    ) -> None:
        other = self.other
        receiver = other._receiver if other is not None else None
        if other is None or receiver is None:
            raise ConnectionLost("the other side closed the connection")
        num_bytes = frame.HEADER.size + len(body) + header.payload_bytes
        with self._lock:
            self._sent[0] += 1
            self._sent[1] += num_bytes
        try:
            parsed = frame.parse_header(header.pack())
            message = frame.decode(parsed.kind, body)
            payload = list(receiver.buffers_for(parsed, message)) if parsed.payload_bytes else []
            if parsed.payload_bytes:
                _copy(buffers, payload, parsed.payload_bytes)
        except SynclineError as error:
            other.close(f"refused what {other.peer} sent: {type(error).__name__}: {error}")
            return
        other.count_received(num_bytes)
        receiver.deliver(parsed, message, payload, attachment)

    def count_received(self, num_bytes: int) -> None:
        """Counts a frame that the other side sent."""
        with self._lock:
            self._received[0] += 1
            self._received[1] += num_bytes

    def create_memory(self, num_bytes: int, *, for_all: bool = False) -> Memory:
        return HeapMemory(num_bytes)

    def can_carry(self, memory: Memory) -> bool:
        return True

    def close(self, reason: str = "closed") -> None:
        with self._lock:
            other, self.other = self.other, None
            receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.lost(reason)
        if other is not None:
            other.close("the other side closed the connection" if reason == "closed" else reason)


class Dialled(MemoryConnection):
    """An end that passes the other end to `accept` once it is started."""

    def __init__(self, peer: Peer, accept: Callable[[Connection], None]) -> None:
        super().__init__(peer)
        self._accept = accept

    def start(self, receiver: Receiver, *, waiter_reads: bool = False) -> bool:
        super().start(receiver)
        assert self.other is not None
        self._accept(self.other)
        return False

    def share_nothing(self) -> None:
        """Makes both ends behave like network connections."""
        assert self.other is not None
        self.shares_memory = self.other.shares_memory = False


def _copy(buffers: Iterable[Buffer], targets: list[Buffer], num_bytes: int) -> None:
    if sum(len(buffer) for buffer in targets) != num_bytes:
        raise FrameError(f"a payload of {num_bytes} bytes does not fit its message")
    remaining = iter(targets)
    target = next(remaining, memoryview(b""))
    for source in buffers:
        while len(source):
            if not len(target):
                target = next(remaining)
            count = min(len(source), len(target))
            target[:count] = source[:count]
            source, target = source[count:], target[count:]


def pair(one: Peer, two: Peer) -> tuple[MemoryConnection, MemoryConnection]:
    """Two connected ends: the first belongs to `one` and leads to `two`."""
    left, right = MemoryConnection(two), MemoryConnection(one)
    left.other, right.other = right, left
    return left, right


def dialled(one: Peer, two: Peer, accept: Callable[[Connection], None]) -> Dialled:
    """The end of `one`, leading to `two`; the other is accepted when this one is started."""
    left, right = Dialled(two, accept), MemoryConnection(one)
    left.other, right.other = right, left
    return left
