"""Messages with descriptors between the keeper and its processes, over socket pairs that keep their bounds."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from syncline.errors import FrameError
from syncline.serve.replicas.messages import Beat, FromKeeper, ToKeeper

BEAT_SECONDS = 0.5
_MOST_BYTES = 1 << 17  # of a message; a socket's buffer is larger
_MOST_DESCRIPTORS = 4
_MOST_WORDS = 2000  # characters of a text that the operator's code or its data made
_END_SECONDS = 2.0
_encoder = msgspec.msgpack.Encoder()
FROM_KEEPER: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)
TO_KEEPER: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)

M = TypeVar("M")


def fitting(words: str) -> str:
    """Words of an error, so that a message can hold them: not too long, and valid UTF-8."""
    cut = words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}… ({len(words)} characters)"
    return cut.encode(errors="backslashreplace").decode()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class MessageSocket(Generic[M]):
    """One end of a pair. It receives messages of one kind, and sends those of the other."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self.sock, self._decoder = sock, decoder

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """BlockingIOError: the other side has not read for a while. Other OSErrors: it is gone."""
        content = _encoder.encode(message)
        if len(content) > _MOST_BYTES:
            raise FrameError(f"a {type(message).__name__} of {len(content)} bytes; at most {_MOST_BYTES}")
        socket.send_fds(self.sock, [content], descriptors, socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[M, list[int]] | None:
        """The next message and its descriptors; None: the other side is gone."""
        try:
            content, descriptors, flags, _ = socket.recv_fds(
                self.sock, _MOST_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except OSError:
            return None
        if not content:
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise FrameError("a message was cut")
            return self._decoder.decode(content), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def close(self) -> None:
        self.sock.close()


class KeeperLink:
    """A process's way to its keeper. One thread reads; another writes, and says again and again that this works."""

    def __init__(
        self,
        sock: socket.socket,
        heard: Callable[[FromKeeper, list[int]], None],
        lost: Callable[[], None],
    ) -> None:
        """`heard` is called for each message, in order, in the thread that reads; `lost` when the keeper is gone."""
        self._link = MessageSocket(sock, FROM_KEEPER)
        self._heard, self._lost = heard, lost
        self._outgoing: queue.SimpleQueue[tuple[ToKeeper, Sequence[int]] | None] = queue.SimpleQueue()
        self._works: Callable[[], bool] | None = None
        self._reader = threading.Thread(target=self._read, name="syncline keeper in", daemon=True)
        self._writer = threading.Thread(target=self._write, name="syncline keeper out", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def beat_while(self, works: Callable[[], bool]) -> None:
        """From now on the process works only while this says so."""
        self._works = works

    def send(self, message: ToKeeper, descriptors: Sequence[int] = ()) -> None:
        """Never waits. Descriptors are copied now."""
        self._outgoing.put((message, [os.dup(descriptor) for descriptor in descriptors]))

    def close(self) -> None:
        """Returns when all was sent."""
        self._outgoing.put(None)
        self._writer.join(_END_SECONDS)

    def _read(self) -> None:
        try:
            while (received := self._link.receive()) is not None:
                self._heard(*received)
        finally:
            self._lost()

    def _write(self) -> None:
        next_beat = 0.0
        with contextlib.suppress(OSError):  # the reader hears of it too
            while True:
                if time.monotonic() >= next_beat:
                    if self._works is None or self._works():
                        self._link.send(Beat())
                    next_beat = time.monotonic() + BEAT_SECONDS
                try:
                    outgoing = self._outgoing.get(timeout=max(0.0, next_beat - time.monotonic()))
                except queue.Empty:
                    continue
                if outgoing is None:
                    return
                message, descriptors = outgoing
                try:
                    self._link.send(message, descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
