"""A connection over a socket: frames in both directions, read by its own thread or by a waiting caller."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from syncline.errors import ConnectionLost, FrameError, ProtocolError
from syncline.net import frame, shm
from syncline.net.frame import Header
from syncline.net.streams import PlainStream, Stalled, Stream
from syncline.net.transport import Buffer, Connection, Memory, Peer, Receiver


class SocketConnection(Connection):
    """Frames over one stream, read by its own thread or by a waiting caller. A bad frame closes the connection."""

    def __init__(self, stream: Stream, peer: Peer, label: str) -> None:
        super().__init__(peer)
        self.shares_memory = stream.carries_fds
        self.stream, self._label = stream, label
        self._sender = struct.pack("<Q", peer.incarnation)
        self._waited_on: PlainStream | None = None  # the same stream, if waiting callers read it
        self._send_lock = threading.Lock()
        self._read_lock = threading.Lock()  # held while reading from the stream
        self._closing = threading.Lock()
        self._closed: str | None = None  # the reason
        self._gone = False  # the socket is released
        self._receiver: Receiver | None = None

    def start(self, receiver: Receiver, *, waiter_reads: bool = False) -> bool:
        with self._closing:
            self._receiver, closed = receiver, self._closed
        if closed is not None:
            receiver.lost(closed)
            return False
        if waiter_reads and self.shares_memory and isinstance(self.stream, PlainStream):
            self._waited_on = self.stream
            self._waited_on.bound_reads()
            return True
        self._read_lock.acquire()
        threading.Thread(target=self._read_frames, name=f"read {self._label}", daemon=True).start()
        return False

    def send(
        self, header: Header, body: bytes, buffers: Iterable[Buffer] = (), attachment: Memory | None = None
    ) -> None:
        fd = attachment.fd if isinstance(attachment, shm.SharedMemory) else None
        num_bytes = frame.HEADER.size + len(body) + header.payload_bytes
        self._put(num_bytes, self._write, header, body, buffers, fd)

    def post(self, packed: bytes) -> None:
        self._put(len(packed), self.stream.write, [memoryview(packed)])

    def _put(self, num_bytes: int, write: Callable[..., None], *what: Any) -> None:
        try:
            with self._send_lock:
                if self._closed is not None:
                    raise ConnectionLost(self._closed)
                write(*what)
                self._sent[0] += 1
                self._sent[1] += num_bytes
        except ConnectionLost:
            raise  # the reader will see it too, after the peer's last messages
        except Stalled as stalled:
            self.close(str(stalled))  # the reader would not notice
            raise ConnectionLost(str(stalled)) from None
        except BaseException as error:
            # Part of the frame may be sent: the peer would read the next frame as its rest.
            self.close(f"a frame could not be sent whole: {type(error).__name__}: {error}")
            raise

    def _write(self, header: Header, body: bytes, buffers: Iterable[Buffer], fd: int | None) -> None:
        first = memoryview(header.pack() + body)
        if not header.payload_bytes and not buffers:
            self.stream.write([first], fd)
            return
        if header.payload_bytes < 1 << 16:
            views = list(buffers)
            num_bytes = sum(map(len, views))
            self.stream.write([first, *views], fd)
        else:
            # Buffers may be produced one by one, each while the previous one is being sent.
            self.stream.write([first], fd)
            num_bytes = 0
            for buffer in buffers:
                num_bytes += len(buffer)
                self.stream.write([buffer])
        assert num_bytes == header.payload_bytes, f"{num_bytes} bytes sent, {header.payload_bytes} announced"

    def _read_frames(self) -> None:
        """The reader thread: reads frames until the end."""
        try:
            while self._read_or_close():
                pass
        finally:
            self._read_lock.release()
            self._give_back()

    def read(self, seconds: float) -> bool:
        """Reads one frame in a waiting caller, if it arrives in time."""
        until = time.monotonic() + seconds
        if not self._read_lock.acquire(blocking=False):
            # Another thread reads: its frame may be the one this caller waits for.
            if not self._read_lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
                return False
            self._read_lock.release()
            return True
        try:
            if self._closed is None:
                if not self._is_ready(until):
                    return False
                self._read_or_close()
            return True
        finally:
            self._read_lock.release()
            if self._closed is not None:
                self._give_back()

    def take_like(self, head: bytes, payload_bytes: int, seconds: float) -> Buffer | None:
        stream, payload = self._waited_on, None
        if stream is None or not self._read_lock.acquire(False):
            return None
        try:
            if self._closed is None and stream.wait(seconds):
                size = len(head)
                whole = stream.peek(size + payload_bytes)
                if whole is not None and frame.is_like(head, bytes(whole[:size]), self._sender):
                    payload = memoryview(bytearray(whole[size:]))
                    stream.take(len(whole))
                    self._received[0] += 1
                    self._received[1] += len(whole)
        except ConnectionLost as error:
            self.close(str(error))
        finally:
            self._read_lock.release()
            if self._closed is not None:
                self._give_back()
        return payload

    def _is_ready(self, until: float) -> bool:
        assert self._waited_on is not None, "read by a thread of its own"
        try:
            return self._waited_on.wait(max(0.0, until - time.monotonic()))
        except ConnectionLost as error:
            self.close(str(error))
            return True

    def _read_or_close(self) -> bool:
        """Reads a frame. Returns False, and closes, at the end or on an error."""
        try:
            self._read_frame()
            return True
        except ConnectionLost as error:
            reason = str(error)
        except ProtocolError as error:
            reason = f"refused what {self.peer} sent: {type(error).__name__}: {error}"
        except Exception as error:  # a bug must surface as an error, not as a hang
            reason = f"{type(error).__name__}: {error}"
        except BaseException:  # Ctrl-C: the rest of the frame must not be read as the next one
            self.close("interrupted within a frame")
            raise
        self.close(reason)
        return False

    def _give_back(self) -> None:
        """Releases the socket. Its descriptor may be reused at once, so no thread may still use it."""
        if self._closed is None or not self._read_lock.acquire(blocking=False):
            return  # the reading thread does this when it sees the end
        try:
            with self._send_lock:  # a woken sender may still be inside the socket
                if not self._gone:
                    self._gone = True
                    self.stream.close()
        finally:
            self._read_lock.release()

    def _read_frame(self) -> None:
        assert self._receiver is not None
        header = frame.parse_header(self.stream.take(frame.HEADER.size))
        message = frame.decode(header.kind, self.stream.take(header.body_bytes))
        payload: Sequence[Buffer] = ()
        if header.payload_bytes:
            payload = self._receiver.buffers_for(header, message)
            if sum(len(buffer) for buffer in payload) != header.payload_bytes:
                raise FrameError(f"a payload of {header.payload_bytes} bytes does not fit its message")
            for buffer in payload:
                self.stream.read(buffer)
        is_attached = header.flags & frame.ATTACHED or self.stream.fds
        attachment = self._attachment(header, message) if is_attached else None
        self._received[0] += 1
        self._received[1] += frame.HEADER.size + header.body_bytes + header.payload_bytes
        self._receiver.deliver(header, message, payload, attachment)

    def _attachment(self, header: Header, message: Any) -> shm.SharedMemory | None:
        fd = self.stream.take_fd() if header.flags & frame.ATTACHED else None
        # Data read ahead may hold the frame that another descriptor belongs to.
        stray = self.stream.take_fd() if self.stream.is_drained else None
        if header.flags & frame.ATTACHED:
            if fd is not None and stray is None and isinstance(getattr(message, "num_bytes", None), int):
                return shm.accept(fd, message.num_bytes)
            reason = "shared memory was announced and did not come"
        elif stray is None:
            return None
        else:
            reason = "a file descriptor that was not announced"
        for number in (fd, stray):
            if number is not None:
                os.close(number)
        raise FrameError(reason)

    def create_memory(self, num_bytes: int, *, for_all: bool = False) -> Memory:
        return shm.create(num_bytes, for_all=for_all)

    def can_carry(self, memory: Memory) -> bool:
        return self.shares_memory and isinstance(memory, shm.SharedMemory)

    def close(self, reason: str = "closed") -> None:
        with self._closing:
            if self._closed is not None:
                return
            self._closed = reason
            receiver = self._receiver
        self.stream.shut()
        self._give_back()
        if receiver is not None:
            receiver.lost(reason)
