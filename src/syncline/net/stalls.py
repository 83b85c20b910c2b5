"""Send timeouts: a peer that does not read is disconnected, a slow one is not."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import termios
import time

#: Without progress for this long, the connection is lost.
STALL_SECONDS = 30.0
#: The peer closed without a message, usually because it was killed.
BROKEN_OFF = "the connection broke off"
#: Checks within that time.
_LOOKS = 8


class Stalled(Exception):
    """The peer has read nothing for too long; the message names it."""


class Stall:
    """One wait for room in a socket, created only when the socket is full.

    The kernel wakes a sender when much of its buffer is free, which may take long with a slow reader. So the fill
    level of the buffer is checked: less than before is progress.
    """

    def __init__(self, sock: socket.socket, peer: str, seconds: float) -> None:
        self._sock, self._peer, self._seconds = sock, peer, seconds
        self._unsent, self._since = unsent_bytes(sock), time.monotonic()

    def check(self) -> None:
        """Still no room: raises Stalled if nothing was read for too long."""
        unsent, now = unsent_bytes(self._sock), time.monotonic()
        if unsent != self._unsent:
            self._unsent, self._since = unsent, now
        elif now - self._since >= self._seconds:
            raise Stalled(f"{self._peer} has not read for {self._seconds:g} s")


def look_seconds(stall_seconds: float) -> float:
    """The interval of these checks."""
    return stall_seconds / _LOOKS


def bound(sock: socket.socket, option: int, seconds: float) -> None:
    """Sets a timeout for blocking calls (SO_SNDTIMEO: send, SO_RCVTIMEO: receive)."""
    microseconds = max(1, round(seconds * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(microseconds, 1_000_000)))


def why_broken(error: Exception, peer: str, when: str = "") -> str:
    """A readable reason, else the kernel's."""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return BROKEN_OFF
    if isinstance(error, TimeoutError):
        return f"{peer} took nothing for too long: it does not read, or its host is out of reach"
    return f"the connection broke{when}: {error}"


def unsent_bytes(sock: socket.socket) -> int:
    """Unsent bytes in the socket; -1 if unknown."""
    answer = array.array("i", [-1])
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(sock, termios.TIOCOUTQ, answer)
    return answer[0]
