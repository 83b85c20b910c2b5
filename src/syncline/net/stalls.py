"""How long the other side may take nothing: whoever does not read is cut off, whoever reads slowly is not."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import termios
import time

#: Nothing taken for so long, or nothing more of a frame: the connection is lost.
STALL_SECONDS = 30.0
#: The other side is gone without a word: its process was killed, mostly.
BROKEN_OFF = "the connection broke off"
#: A wait is looked at so often within that time.
_LOOKS = 8


class Stalled(Exception):
    """The other side has taken nothing for too long; the message names it."""


class Stall:
    """One wait for room in a socket. Made only when the socket is full: what flows costs nothing.

    A kernel wakes a sender when a good part of its buffer is free. A slow reader may take long to come so far, so
    it is asked how much lies in the buffer: less than before is progress.
    """

    def __init__(self, sock: socket.socket, peer: str, seconds: float) -> None:
        self._sock, self._peer, self._seconds = sock, peer, seconds
        self._unsent, self._since = unsent_bytes(sock), time.monotonic()

    def check(self) -> None:
        """There is still no room: raises Stalled when nothing at all was taken for so long."""
        unsent, now = unsent_bytes(self._sock), time.monotonic()
        if unsent != self._unsent:
            self._unsent, self._since = unsent, now
        elif now - self._since >= self._seconds:
            raise Stalled(f"{self._peer} has not read for {self._seconds:g} s")


def look_seconds(stall_seconds: float) -> float:
    """After so long without room, the wait is looked at."""
    return stall_seconds / _LOOKS


def bound(sock: socket.socket, option: int, seconds: float) -> None:
    """A blocking call on this socket (SO_SNDTIMEO: to send, SO_RCVTIMEO: to receive) ends after so long."""
    microseconds = max(1, round(seconds * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(microseconds, 1_000_000)))


def why_broken(error: Exception, peer: str, when: str = "") -> str:
    """The kernel's own word, where ours is not plainer."""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return BROKEN_OFF
    if isinstance(error, TimeoutError):
        return f"{peer} took nothing for too long: it does not read, or its host is out of reach"
    return f"the connection broke{when}: {error}"


def unsent_bytes(sock: socket.socket) -> int:
    """What lies in the socket and was not taken yet; -1 where the system does not say."""
    answer = array.array("i", [-1])
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(sock, termios.TIOCOUTQ, answer)
    return answer[0]
