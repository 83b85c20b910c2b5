"""Real listeners and connections over loopback, closed after each test; nothing may be left behind."""

from __future__ import annotations

import gc
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.core.wire.message import Message
from syncline.net import tcp
from syncline.net.connection import SocketConnection
from syncline.net.frame import Header
from syncline.net.transport import Connection, Memory, Peer, buffer_of

SECONDS = PATIENCE  # the deadline of every wait here: much more than anything needs
GRACE_SECONDS = 60.0
JOB, TOKEN = "job-1", bytes(range(32))


def _open_files() -> list[tuple[str, str]]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append((number, os.readlink(f"/proc/self/fd/{number}")))
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread and no file descriptor outlives its test, whatever it is called."""
    threads, files = set(threading.enumerate()), set(_open_files())
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        left = [t.name for t in threading.enumerate() if t not in threads] + sorted(set(_open_files()) - files)
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.005)
        if time.monotonic() > deadline - GRACE_SECONDS + 0.5:
            gc.collect()  # slow; a mapping goes with its last array, which only a cycle may hold


class Inbox:
    """A receiver that keeps what comes. Payloads land in pieces, as they do in slices."""

    def __init__(self, piece_bytes: int = 100_000) -> None:
        self.frames: queue.Queue[tuple[Header, Message, bytes, Memory | None]] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        self.piece_bytes, self.most_bytes = piece_bytes, 1 << 30
        self.on_buffers_for: Callable[[Header, Message], None] = lambda header, message: None
        self.on_deliver: Callable[[Header, Message], None] = lambda header, message: None

    def buffers_for(self, header: Header, message: Message) -> Sequence[memoryview]:
        self.on_buffers_for(header, message)
        left, pieces = min(header.payload_bytes, self.most_bytes), []
        while left > 0:
            pieces.append(buffer_of(np.zeros(min(left, self.piece_bytes), np.uint8)))
            left -= len(pieces[-1])
        return pieces

    def deliver(
        self, header: Header, message: Message, payload: Sequence[memoryview], attachment: Memory | None
    ) -> None:
        self.on_deliver(header, message)
        self.frames.put((header, message, b"".join(map(bytes, payload)), attachment))

    def lost(self, reason: str) -> None:
        self.ends.put(reason)

    def next(self) -> tuple[Header, Message, bytes, Memory | None]:
        return self.frames.get(timeout=SECONDS)

    def end(self) -> str:
        return self.ends.get(timeout=SECONDS)


class Host:
    """A listener, what it accepted, and what it logged."""

    def __init__(self, *, token: bytes = TOKEN, job: str = JOB, unix: bool = False, start: bool = True) -> None:
        self.accepted: queue.Queue[tuple[Connection, Inbox]] = queue.Queue()
        self.logged: queue.Queue[str] = queue.Queue()
        self.connections: list[Connection] = []
        self._start = start
        identity = tcp.Identity(job, token, Peer("server", "server-0", 7))
        name = f"@syncline-test-{secrets.token_hex(8)}" if unix else ""
        sock = tcp.bind("127.0.0.1", 0)
        self.listener = tcp.Listener(identity, self._accept, sock=sock, unix=name, log=self.logged.put)
        self.address = self.listener.address

    def _accept(self, connection: Connection) -> None:
        inbox = Inbox()
        self.connections.append(connection)
        if self._start:
            connection.start(inbox)
        self.accepted.put((connection, inbox))

    def next(self) -> tuple[Connection, Inbox]:
        return self.accepted.get(timeout=SECONDS)

    def log(self) -> str:
        return self.logged.get(timeout=SECONDS)

    def connect(
        self, *, token: bytes = TOKEN, job: str = JOB, name: str = "worker-0", unix: bool = False
    ) -> SocketConnection:
        identity = tcp.Identity(job, token, Peer("worker", name, 3))
        if unix:
            connection = tcp.connect_unix(self.address.unix, identity, SECONDS)
        else:
            connection = tcp.connect_tcp(self.address.host, self.address.port, identity, SECONDS)
        self.connections.append(connection)
        return connection

    def pair(self, **how: Any) -> tuple[tuple[Connection, Inbox], tuple[Connection, Inbox]]:
        """A worker's end and the server's end of a new connection, both started."""
        connection, inbox = self.connect(**how), Inbox()
        connection.start(inbox)
        return (connection, inbox), self.next()

    def close(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    """Makes listeners that are closed, with all of their connections, when the test ends."""
    made: list[Host] = []

    def make(**how: Any) -> Host:
        made.append(Host(**how))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def inbox() -> Callable[..., Inbox]:
    return Inbox


@pytest.fixture
def force_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback counts as another host: on both sides, as between two real ones."""
    monkeypatch.setattr(tcp, "is_loopback", lambda address: False)
