"""Byte streams over sockets: plain ones, which can carry file descriptors, and TLS.

Plain sockets block: `sendmsg` and `recv_into` use the final buffers. A TLS socket has no `sendmsg` and allows only
one thread at a time: a lock, with waiting done outside of it.
"""

from __future__ import annotations

import array
import collections
import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Collection, Iterable
from typing import Protocol

from syncline.errors import ConnectionLost
from syncline.net.stalls import STALL_SECONDS, Stall, Stalled, bound, look_seconds, why_broken

__all__ = ["PlainStream", "Stalled", "Stream", "TlsStream"]

#: Most frames without payload are smaller than this.
AHEAD_BYTES = 1 << 13
#: If waiting callers read: small payloads should come with their message in one call.
AHEAD_BYTES_WAITING = 20 << 10
_MOST_SECONDS = 86_400.0  # limit of a poll
_MOST_FDS = 8
_FD_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0


class Stream(Protocol):
    """Bytes in both directions. One thread reads at a time; one thread writes at a time."""

    carries_fds: bool

    @property
    def fds(self) -> Collection[int]:
        """File descriptors that were received and not taken."""

    def write(self, buffers: list[memoryview], fd: int | None = None) -> None:
        """Sends all bytes. Raises Stalled if the peer reads nothing for too long."""

    def read(self, view: memoryview) -> None:
        """Fills the view; raises ConnectionLost at the end of the stream."""

    def take(self, count: int) -> memoryview:
        """The next bytes, valid until the next call."""

    def take_fd(self) -> int | None:
        """The oldest received file descriptor that was not taken yet."""

    @property
    def is_drained(self) -> bool:
        """Whether nothing was read ahead."""

    def shut(self) -> None:
        """Ends both directions and wakes waiting threads; idempotent."""

    def close(self) -> None:
        """Releases the socket. No thread may still use it: its descriptor may be reused at once."""


class PlainStream:
    """A TCP or Unix socket. It reads ahead a little, so that a small frame takes one call."""

    def __init__(
        self, sock: socket.socket, peer: str = "the other side", stall_seconds: float = STALL_SECONDS
    ) -> None:
        self.sock, self._peer, self.stall_seconds = sock, peer, stall_seconds
        bound(sock, socket.SO_SNDTIMEO, look_seconds(stall_seconds))
        self.carries_fds = sock.family == getattr(socket, "AF_UNIX", None)
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._start = self._end = 0
        self.fds: collections.deque[int] = collections.deque()
        self._poll: select.poll | None = None

    def write(self, buffers: list[memoryview], fd: int | None = None) -> None:
        if len(buffers) == 1 and fd is None:
            self._write_one(buffers[0])
            return
        pending = [view for view in buffers if len(view)]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        stall: Stall | None = None
        while pending:
            try:
                sent = self.sock.sendmsg(pending[:64], ancillary)
            except BlockingIOError:
                stall = stall or Stall(self.sock, self._peer, self.stall_seconds)
                stall.check()
                continue
            except (OSError, ValueError) as error:
                raise self._not_sent(error) from None
            ancillary, stall = [], None
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if sent:
                pending[0] = pending[0][sent:]

    def take(self, count: int) -> memoryview:
        start = self._start
        end = start + count
        if end > self._end:
            if self._end != start or count > len(self._ahead):
                view = memoryview(bytearray(count))
                self.read(view)
                return view
            self._fill(count)
            start, end = 0, count
        self._start = end
        return self._ahead[start:end]

    def _fill(self, count: int) -> None:
        """Reads ahead until there are this many bytes; the buffer is empty before."""
        try:
            self._read_ahead()
            while self._end < count:
                more = self.sock.recv_into(self._ahead[self._end : count])
                self._end += self._some(more)
        except (OSError, ValueError) as error:
            raise self._not_read(error) from None

    def _write_one(self, view: memoryview) -> None:
        """For large buffers: one blocking call, until all is sent or it takes too long."""
        sent, stall = 0, None
        while sent < len(view):
            try:
                sent += self.sock.send(view[sent:] if sent else view)
                stall = None
            except BlockingIOError:
                stall = stall or Stall(self.sock, self._peer, self.stall_seconds)
                stall.check()
            except (OSError, ValueError) as error:
                raise self._not_sent(error) from None

    def _not_sent(self, error: Exception) -> Exception:
        """The kernel also gives up on a peer that does not read; only this sender is told."""
        given_up = isinstance(error, TimeoutError)
        return (Stalled if given_up else ConnectionLost)(why_broken(error, self._peer))

    def bound_reads(self) -> None:
        """For waiting callers: a read timeout, so that they do not wait for ever within a frame."""
        bound(self.sock, socket.SO_RCVTIMEO, self.stall_seconds)
        ahead, self._ahead = self._ahead, memoryview(bytearray(AHEAD_BYTES_WAITING))
        self._ahead[: len(ahead)] = ahead

    def _not_read(self, error: Exception) -> ConnectionLost:
        if isinstance(error, ConnectionLost):
            return error
        if isinstance(error, BlockingIOError):
            return ConnectionLost(f"nothing more of a frame came from {self._peer} within {self.stall_seconds:g} s")
        return ConnectionLost(why_broken(error, self._peer))

    def read(self, view: memoryview) -> None:
        try:
            while size := len(view):
                if self._start == self._end:
                    if size >= len(self._ahead):
                        view = view[self._some(self.sock.recv_into(view, size, socket.MSG_WAITALL)) :]
                        continue
                    self._read_ahead()
                count = min(size, self._end - self._start)
                view[:count] = self._ahead[self._start : self._start + count]
                self._start += count
                view = view[count:]
        except (OSError, ValueError) as error:
            raise self._not_read(error) from None

    def _read_ahead(self) -> None:
        if self.carries_fds:
            count, ancillary, _, _ = self.sock.recvmsg_into([self._ahead], _FD_SPACE)
            if ancillary:
                _collect_fds(ancillary, self.fds)
                if len(self.fds) > _MOST_FDS:
                    raise ConnectionLost(f"{len(self.fds)} file descriptors came that no frame has asked for")
        else:
            count = self.sock.recv_into(self._ahead)
        self._start, self._end = 0, self._some(count)

    @staticmethod
    def _some(count: int) -> int:
        if not count:
            raise ConnectionLost("the other side closed the connection")
        return count

    def wait(self, seconds: float) -> bool:
        """Whether there is something to read (or the end) within this time."""
        if self._start != self._end:
            return True
        try:
            if self._poll is None:
                self._poll = select.poll()
                self._poll.register(self.sock, select.POLLIN)
            return bool(self._poll.poll(min(seconds, _MOST_SECONDS) * 1e3))
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"the connection is closed: {error}") from None

    def peek(self, count: int) -> memoryview | None:
        """The next bytes without consuming them; None if not all are here, or a descriptor came with them."""
        if self._start == self._end:
            try:
                self._read_ahead()
            except (OSError, ValueError) as error:
                raise self._not_read(error) from None
        if self.fds or self._end - self._start < count:
            return None
        return self._ahead[self._start : self._start + count]

    def take_fd(self) -> int | None:
        return self.fds.popleft() if self.fds else None

    @property
    def is_drained(self) -> bool:
        return self._start == self._end

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.popleft())
        self.sock.close()


def _collect_fds(ancillary: Iterable[tuple[int, int, bytes]], fds: collections.deque[int]) -> None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            for fd in received:
                os.set_inheritable(fd, False)
                fds.append(fd)


class TlsStream:
    """A TLS 1.3 socket, non-blocking inside."""

    carries_fds = False
    fds: Collection[int] = ()

    def __init__(
        self, sock: ssl.SSLSocket, peer: str = "the other side", stall_seconds: float = STALL_SECONDS
    ) -> None:
        sock.setblocking(False)
        self.sock, self._peer, self.stall_seconds = sock, peer, stall_seconds
        self._lock = threading.Lock()
        self._closed = False
        # A pipe that wakes waiting threads when the stream is closed.
        self._wake_read, self._wake_write = os.pipe()

    def write(self, buffers: list[memoryview], fd: int | None = None) -> None:
        assert fd is None
        for view in buffers:
            while len(view):
                view = view[self._attempt(lambda chunk=view: self.sock.send(chunk[: 1 << 20]), "sending") :]

    def take(self, count: int) -> memoryview:
        view = memoryview(bytearray(count))
        self.read(view)
        return view

    def take_fd(self) -> None:
        return None

    @property
    def is_drained(self) -> bool:
        return True

    def read(self, view: memoryview) -> None:
        while len(view):
            count = self._attempt(lambda target=view: self.sock.recv_into(target), "receiving")
            if not count:
                raise ConnectionLost("the other side closed the connection")
            view = view[count:]

    def _attempt(self, action: object, doing: str) -> int:
        stall: Stall | None = None
        while True:
            try:
                with self._lock:
                    if self._closed:
                        raise ConnectionLost("the connection is closed")
                    return action()  # type: ignore[operator, no-any-return]
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except ConnectionLost:
                raise
            except (OSError, ValueError) as error:
                given_up = doing == "sending" and isinstance(error, TimeoutError)
                reason = why_broken(error, self._peer, f" while {doing}")
                raise (Stalled if given_up else ConnectionLost)(reason) from None
            if doing == "sending":
                stall = stall or Stall(self.sock, self._peer, self.stall_seconds)
                if not self._wait(event, look_seconds(self.stall_seconds)):
                    stall.check()
            else:
                self._wait(event, None)

    def _wait(self, event: int, seconds: float | None) -> bool:
        poll = select.poll()
        try:
            poll.register(self.sock, event)
            poll.register(self._wake_read, select.POLLIN)
            return bool(poll.poll(None if seconds is None else seconds * 1e3))
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"the connection is closed: {error}") from None

    def shut(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            os.close(self._wake_write)

    def close(self) -> None:
        self.shut()
        with contextlib.suppress(OSError):
            self.sock.close()
        os.close(self._wake_read)
