"""Whoever does not read is cut off, by name; whoever reads slowly is not; and no waiter hangs within a frame."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.core.wire.tables import Leave, Upload
from syncline.errors import ConnectionLost
from syncline.net import frame, stalls
from syncline.net.certificate import Certificate, client_context
from syncline.net.connection import SocketConnection
from syncline.net.frame import Header
from syncline.net.stalls import Stall, Stalled
from syncline.net.streams import PlainStream, TlsStream
from syncline.net.transport import Peer

Make = Callable[..., Any]
SECONDS = PATIENCE
WORKER = Peer("worker", "worker-2", 3)


def frame_of(message: Any, payload: bytes = b"") -> bytes:
    body = frame.encode(message)
    header = Header(frame.kind_of(message), 1, body_bytes=len(body), payload_bytes=len(payload))
    return header.pack() + body + payload


def send(connection: Any, num_bytes: int) -> None:
    body = frame.encode(Upload(0, [1]))
    header = Header(frame.kind_of(Upload(0, [1])), 1, body_bytes=len(body), payload_bytes=num_bytes)
    connection.send(header, body, [memoryview(bytes(num_bytes))])


def send_until_lost(connection: Any, num_bytes: int = 1 << 20) -> str:
    with pytest.raises(ConnectionLost) as caught:
        while True:
            send(connection, num_bytes)
    return str(caught.value)


def sockets(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        return near, listening.accept()[0]


def wrapped(near: socket.socket, far: socket.socket) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    made: list[ssl.SSLSocket] = []
    context = Certificate.create().server_context()
    thread = threading.Thread(target=lambda: made.append(context.wrap_socket(far, server_side=True)), name="wrap")
    thread.start()
    client = client_context().wrap_socket(near)
    thread.join(SECONDS)
    return client, made[0]


@pytest.fixture
def reach(inbox: Make) -> Iterator[Make]:
    """Makes a connection to worker-2 that gives up after so long, its inbox, and the bare socket at the other end."""
    made: list[Any] = []

    def make(kind: str, stall_seconds: float, **how: bool) -> tuple[SocketConnection, Any, socket.socket]:
        near, far = sockets("unix" if kind == "unix" else "tcp")
        stream: Any
        if kind == "tls":
            near, far = wrapped(near, far)
            stream = TlsStream(near, "worker-2", stall_seconds)
        else:
            stream = PlainStream(near, "worker-2", stall_seconds)
        connection, at_near = SocketConnection(stream, WORKER, "worker-2"), inbox()
        connection.start(at_near, **how)
        made.extend((connection, far))
        return connection, at_near, far

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
@pytest.mark.parametrize("num_bytes", [1 << 10, 8 << 20])
def test_a_reader_that_does_not_read_is_cut_off_by_name(reach: Make, kind: str, num_bytes: int) -> None:
    """A server that answers a stopped worker would keep the thread, and the bytes, for ever. Small frames fill
    the socket too, on another way through the stream than large ones."""
    connection, inbox, _ = reach(kind, 0.2)
    assert send_until_lost(connection, num_bytes) == "worker-2 has not read for 0.2 s"
    assert inbox.end() == "worker-2 has not read for 0.2 s"
    assert inbox.ends.empty()


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_all_who_wait_to_send_hear_of_it(reach: Make, kind: str) -> None:
    """One is in the socket, the others wait for their turn: no second stall for each of them."""
    connection, inbox, _ = reach(kind, 0.3)
    reasons: queue.Queue[str] = queue.Queue()
    senders = [
        threading.Thread(target=lambda: reasons.put(send_until_lost(connection)), name="send", daemon=True)
        for _ in range(4)
    ]
    for sender in senders:
        sender.start()
    assert {reasons.get(timeout=SECONDS) for _ in senders} == {"worker-2 has not read for 0.3 s"}
    assert inbox.end() == "worker-2 has not read for 0.3 s"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_little_that_is_taken_is_progress(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel wakes a sender when much of its buffer is free. A reader that takes a little now and then, over
    a slow network, never comes so far within the time: it is slow, and not gone."""
    near, far = sockets(kind)
    with near, far:
        clock = types.SimpleNamespace(now=1000.0)
        monkeypatch.setattr(stalls, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(1 << 16))
        stall = Stall(near, "worker-2", 30.0)
        for _ in range(4):
            clock.now += 29.0
            before = stalls.unsent_bytes(near)
            deadline = time.monotonic() + SECONDS
            while stalls.unsent_bytes(near) == before:  # a receiver tells of room when there is enough of it
                assert time.monotonic() < deadline
                far.recv(20_000, socket.MSG_DONTWAIT)
                time.sleep(0.001)
            stall.check()
        clock.now += 29.0
        stall.check()
        clock.now += 1.0
        with pytest.raises(Stalled, match="worker-2 has not read for 30 s"):
            stall.check()


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_a_reader_that_comes_back_in_time_gets_every_byte(reach: Make, kind: str) -> None:
    """A send that was interrupted to look at the time goes on where it was: not a byte is lost or doubled."""
    connection, inbox, far = reach(kind, SECONDS)
    if kind != "tls":
        stalls.bound(connection.stream.sock, socket.SO_SNDTIMEO, 0.02)
    payload = bytes(range(256)) * (40 << 10)
    body = frame.encode(Upload(0, [1]))
    header = Header(frame.kind_of(Upload(0, [1])), 1, body_bytes=len(body), payload_bytes=len(payload))
    push = lambda: connection.send(header, body, [memoryview(payload)])  # noqa: E731
    sender = threading.Thread(target=push, name="send", daemon=True)
    sender.start()
    got, expected = bytearray(), header.pack() + body + payload
    far.settimeout(SECONDS)
    while len(got) < len(expected):
        if len(got) < 4 << 20:
            time.sleep(0.005)
        got += far.recv(1 << 17)
    sender.join(SECONDS)
    assert bytes(got) == expected
    assert inbox.ends.empty()


@pytest.mark.parametrize("in_the_socket", ["sender", "reader"])
def test_what_the_kernel_gives_up_has_a_name_too(in_the_socket: str) -> None:
    """TCP_USER_TIMEOUT ends a connection whose reader does not read, before we do, and `Connection timed out` names
    nobody. The kernel tells one thread only: one that sends, or the one that reads."""
    near, far = sockets("tcp")
    with near, far:
        stream = PlainStream(near, "worker-2", 60.0)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
        match = "worker-2 took nothing for too long"
        if in_the_socket == "sender":
            with pytest.raises(Stalled, match=match):
                while True:
                    stream.write([memoryview(bytes(1 << 20))])
        else:
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(bytes(1 << 20), socket.MSG_DONTWAIT)
            with pytest.raises(ConnectionLost, match=match):
                stream.read(memoryview(bytearray(1)))


UPLOAD = frame_of(Upload(0, [1]), bytes(3000))
LARGE = frame_of(Upload(0, [1]), bytes(200_000))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("sent", [1, frame.HEADER.size, frame.HEADER.size + 1, -1, -2000])
def test_a_waiter_that_reads_does_not_hang_within_a_frame(reach: Make, sent: int, large: bool) -> None:
    """The server is stopped (SIGSTOP) in the middle of a frame. Whoever waits has its deadline, but sits in the
    socket by now: in the header, the body, or the payload, small or large."""
    connection, inbox, far = reach("unix", 0.2, waiter_reads=True)
    inbox.piece_bytes = 1 << 20
    data = LARGE if large else UPLOAD

    def write() -> None:
        with contextlib.suppress(OSError):  # itself slow within a frame, it is cut off
            far.sendall(data[:sent])

    writer = threading.Thread(target=write, name="write")
    writer.start()
    assert connection.read(SECONDS)
    writer.join(SECONDS)
    assert inbox.end() == "nothing more of a frame came from worker-2 within 0.2 s"
    assert inbox.frames.empty()


def test_a_waiter_may_wait_between_frames_as_long_as_it_likes(reach: Make) -> None:
    """Only within a frame is silence a fault: a round may take minutes."""
    connection, inbox, far = reach("unix", 0.05, waiter_reads=True)
    assert not connection.read(0.3)
    far.sendall(UPLOAD + UPLOAD)
    assert connection.read(SECONDS) and connection.read(SECONDS)
    assert not connection.read(0.2)
    assert inbox.frames.qsize() == 2 and inbox.ends.empty()


def test_a_waiter_takes_what_comes_in_pieces(reach: Make) -> None:
    connection, inbox, far = reach("unix", SECONDS, waiter_reads=True)

    def trickle() -> None:
        for start in range(0, len(LARGE), 10_007):
            far.sendall(LARGE[start : start + 10_007])
            select.select([], [], [], 0.001)

    writer = threading.Thread(target=trickle, name="write")
    writer.start()
    assert connection.read(SECONDS)
    writer.join(SECONDS)
    assert inbox.next()[2] == bytes(200_000)


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_a_reader_of_its_own_may_wait_within_a_frame(reach: Make, kind: str) -> None:
    """Nobody waits for it; a slow network, or a sender that makes one buffer after the other, is no fault."""
    _, inbox, far = reach(kind, 0.05)
    data = frame_of(Leave())
    far.sendall(data[:10])
    time.sleep(0.3)
    far.sendall(data[10:])
    assert inbox.next()[1] == Leave()


@pytest.mark.parametrize("sends", [False, True])
def test_who_is_killed_in_the_middle_of_a_word_has_broken_off(sends: bool) -> None:
    """Not the kernel's own word, with its number: people read it beside the name of who is gone."""
    one, two = socket.socketpair()
    stream = PlainStream(one, "worker-2")
    one.sendall(b"unread")
    two.close()
    with pytest.raises(ConnectionLost) as caught:
        stream.write([memoryview(b"more")]) if sends else stream.take(1)
    stream.close()
    assert str(caught.value) == stalls.BROKEN_OFF == "the connection broke off"
