"""Byte streams over sockets: plain ones that can carry file descriptors, and TLS.

Plain sockets block: `sendmsg` and `recv_into` go straight from and into final buffers. A TLS socket has no
`sendmsg`, and never has two threads in it at once: a lock, with the waiting done outside of it.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Protocol

from syncline.errors import ConnectionLost

_FD_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0


class Stream(Protocol):
    """Bytes in both directions. One thread reads; any thread writes, one at a time."""

    carries_fds: bool

    def write(self, buffers: list[memoryview], fd: int | None = None) -> None:
        """Sends all of these bytes."""

    def read(self, view: memoryview, fds: list[int] | None = None) -> None:
        """Fills the view; raises ConnectionLost at the end of the stream."""

    def shut(self) -> None:
        """Ends both directions and wakes whoever waits; safe to call again."""

    def close(self) -> None:
        """Gives the socket back. Nobody may be in it any more: its number is somebody else's from now on."""


class PlainStream:
    """A TCP or Unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.carries_fds = sock.family == getattr(socket, "AF_UNIX", None)

    def write(self, buffers: list[memoryview], fd: int | None = None) -> None:
        pending = [view for view in buffers if len(view)]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        try:
            while pending:
                sent = self._sock.sendmsg(pending[:64], ancillary)
                ancillary = []
                while pending and sent >= len(pending[0]):
                    sent -= len(pending.pop(0))
                if sent:
                    pending[0] = pending[0][sent:]
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"the connection broke while sending: {error}") from None

    def read(self, view: memoryview, fds: list[int] | None = None) -> None:
        try:
            while len(view):
                if fds is not None and self.carries_fds:
                    count, ancillary, _, _ = self._sock.recvmsg_into([view], _FD_SPACE)
                    _collect_fds(ancillary, fds)
                else:
                    count = self._sock.recv_into(view)
                if not count:
                    raise ConnectionLost("the other side closed the connection")
                view = view[count:]
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionLost):
                raise
            raise ConnectionLost(f"the connection broke: {error}") from None

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def _collect_fds(ancillary: Iterable[tuple[int, int, bytes]], fds: list[int]) -> None:
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

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._closed = False
        # A pipe wakes the poll of whoever waits when the stream is closed.
        self._wake_read, self._wake_write = os.pipe()

    def write(self, buffers: list[memoryview], fd: int | None = None) -> None:
        assert fd is None
        for view in buffers:
            while len(view):
                view = view[self._attempt(lambda chunk=view: self._sock.send(chunk[: 1 << 20]), "sending") :]

    def read(self, view: memoryview, fds: list[int] | None = None) -> None:
        while len(view):
            count = self._attempt(lambda target=view: self._sock.recv_into(target), "receiving")
            if not count:
                raise ConnectionLost("the other side closed the connection")
            view = view[count:]

    def _attempt(self, action: object, doing: str) -> int:
        while True:
            try:
                with self._lock:
                    if self._closed:
                        raise ConnectionLost("the connection is closed")
                    return action()  # type: ignore[operator, no-any-return]
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except ConnectionLost:
                raise
            except (OSError, ValueError) as error:
                raise ConnectionLost(f"the connection broke while {doing}: {error}") from None

    def _wait(self, event: int) -> None:
        poll = select.poll()
        try:
            poll.register(self._sock, event)
            poll.register(self._wake_read, select.POLLIN)
            poll.poll()
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"the connection is closed: {error}") from None

    def shut(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            os.close(self._wake_write)

    def close(self) -> None:
        self.shut()
        with contextlib.suppress(OSError):
            self._sock.close()
        os.close(self._wake_read)
