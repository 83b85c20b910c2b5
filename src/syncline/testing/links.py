"""One connection through a `Proxy`: two sockets and the two threads that pass bytes on between them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Literal

#: up: from the client to the target; down: from the target to the client.
Direction = Literal["up", "down"]
CHUNK_BYTES = 1 << 16
JOIN_SECONDS = 10.0
#: Takes a chunk of a direction, and waits as it is told to. Returns the bytes to send on, and how to cut after them.
Pass = Callable[["ProxiedLink", Direction, bytes], tuple[bytes, "CutLink | None"]]


class CutLink:
    """How a connection is cut: `reset` is an RST, otherwise it is closed in an orderly way (FIN)."""

    def __init__(self, reset: bool) -> None:
        self.reset = reset


class Recording:
    """What one connection carried."""

    def __init__(self) -> None:
        self.up, self.down = bytearray(), bytearray()


class ProxiedLink:
    """`may_read` waits until a direction flows, `pass_on` says what becomes of a chunk, `ended` wakes who waits."""

    def __init__(
        self,
        client: socket.socket,
        target: socket.socket,
        may_read: Callable[[ProxiedLink, Direction], bool],
        pass_on: Pass,
        ended: Callable[[], None],
        recording: Recording | None,
    ) -> None:
        self.ended = False
        self._ends: dict[Direction, tuple[socket.socket, socket.socket]] = {
            "up": (client, target),
            "down": (target, client),
        }
        self._may_read, self._pass_on, self._when_ended = may_read, pass_on, ended
        self._recording = recording
        self._reset = False
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()  # its end wakes both threads
        self._num_flowing = 2
        for sock in (client, target):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=self._flow, args=(direction,), name=f"proxy {direction}", daemon=True)
            for direction in self._ends
        ]
        for thread in self._threads:
            thread.start()

    def _flow(self, direction: Direction) -> None:
        source, target = self._ends[direction]
        try:
            while self._may_read(self, direction) and self._is_ready(source, select.POLLIN):
                if not self._may_read(self, direction):  # it was stopped while nothing came
                    break
                try:
                    data = source.recv(CHUNK_BYTES)
                except BlockingIOError:
                    continue
                if not data:
                    target.shutdown(socket.SHUT_WR)  # the other direction may go on
                    break
                data, cut = self._pass_on(self, direction, data)
                if self._recording is not None:  # before the receiver has it, which may look here at once
                    (self._recording.up if direction == "up" else self._recording.down).extend(data)
                self._send(target, data)
                if cut is not None:
                    self.end(cut)
        except OSError:
            self.end(CutLink(reset=True))  # as it broke on one side, so on the other
        finally:
            self._give_back()

    def _is_ready(self, sock: socket.socket, event: int) -> bool:
        """Waits; False when the link has ended."""
        poll = select.poll()
        poll.register(sock, event)
        poll.register(self._wake_read, select.POLLIN)
        poll.poll()
        return not self.ended

    def _send(self, target: socket.socket, data: bytes) -> None:
        left = memoryview(data)
        while left and self._is_ready(target, select.POLLOUT):
            with contextlib.suppress(BlockingIOError):
                left = left[target.send(left) :]

    def end(self, cut: CutLink) -> None:
        """Both threads end, and then both sockets are closed; does not wait for that."""
        with self._lock:
            if self.ended:
                return
            self.ended, self._reset = True, cut.reset
            os.close(self._wake_write)
        self._when_ended()

    @property
    def is_over(self) -> bool:
        """Whether its sockets are closed."""
        return not self._num_flowing

    def join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)

    def _give_back(self) -> None:
        with self._lock:
            self._num_flowing -= 1
            if self._num_flowing:
                return
            for sock in self._ends["up"]:
                if self._reset:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)  # a close with bytes unread would be a reset
                sock.close()
            if not self.ended:
                self.ended = True
                os.close(self._wake_write)
            os.close(self._wake_read)
