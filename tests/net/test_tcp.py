"""Listeners and connections over loopback: who may come in, and what ends a connection that is no good."""

from __future__ import annotations

import contextlib
import errno
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.core.wire.control import Died, Leave
from syncline.core.wire.tables import PROTOCOL
from syncline.core.wire.traffic import Pull, Upload
from syncline.errors import ConfigError, ConnectionLost, FrameError, TokenError, VersionError
from syncline.net import frame, handshake, tcp
from syncline.net.frame import Header
from syncline.net.transport import Connection, Peer, buffer_of

from .conftest import JOB, TOKEN, Inbox

Make = Callable[..., Any]
SECONDS = PATIENCE
_PREFIX = b"SYNH" + bytes([PROTOCOL])


def send(connection: Any, message: Any, payload: bytes = b"", **fields: int) -> None:
    body = frame.encode(message)
    header = Header(frame.kind_of(message), 1, body_bytes=len(body), payload_bytes=len(payload), **fields)
    connection.send(header, body, [memoryview(payload)] if payload else ())


def raw_bytes(message: Any, payload: bytes = b"", **fields: int) -> bytes:
    body = frame.encode(message)
    return Header(frame.kind_of(message), 1, body_bytes=len(body), payload_bytes=len(payload), **fields).pack() + body


def stranger(host: Any) -> socket.socket:
    return socket.create_connection((host.address.host, host.address.port), timeout=SECONDS)


def check_works(host: Any) -> None:
    """A new connection carries a frame in each direction."""
    (one, at_one), (two, at_two) = host.pair()
    send(one, Leave())
    assert at_two.next()[1] == Leave()
    send(two, Died("worker-1", "x"))
    assert at_one.next()[1] == Died("worker-1", "x")


@pytest.mark.parametrize("unix", [False, True])
def test_both_sides_know_each_other_and_frames_go_both_ways(host: Make, unix: bool) -> None:
    (one, at_one), (two, at_two) = host(unix=True).pair(unix=unix)
    assert one.peer == Peer("server", "server-0", 7) and two.peer == Peer("worker", "worker-0", 3)
    assert one.shares_memory is two.shares_memory is unix
    send(one, Pull([1, 2], None, True), generation=9, job=5, incarnation=3)
    header, message, _, _ = at_two.next()
    assert (message, header.generation, header.job, header.incarnation) == (Pull([1, 2], None, True), 9, 5, 3)
    send(two, Leave())
    assert at_one.next()[1] == Leave()
    assert one.stats().bytes_sent == two.stats().bytes_received > frame.HEADER.size
    assert (one.stats().frames_sent, one.stats().frames_received) == (1, 1)


def test_a_wrong_token_is_said_on_both_sides_and_harms_nobody(host: Make) -> None:
    """The user reads what to do; the log of the other side says who it was; a connection next to it goes on."""
    there = host()
    (one, _), (_, at_two) = there.pair()
    with pytest.raises(TokenError) as caught:
        there.connect(token=bytes(32), name="worker-9")
    assert str(caught.value) == "server-0 does not prove the token of job job-1; use the job file of this job"
    logged = there.log()
    assert logged.startswith("a connection from 127.0.0.1:")
    assert "worker-9 did not prove the token of this job" in logged
    send(one, Leave())
    assert at_two.next()[1] == Leave()
    check_works(there)


def test_a_wrong_proof_is_refused_by_the_listener_itself(host: Make) -> None:
    """A stranger that ignores our proof and sends one of its own is told no, and logged."""
    there = host()
    with stranger(there) as sock:
        side = handshake.Connecting(bytes(32), "job-1", Peer("worker", "worker-9", 3), "")
        sock.sendall(side.hello())
        sock.recv(512)
        sock.sendall(handshake.pack(handshake.Proof(bytes(32))))
        with pytest.raises(TokenError, match="worker-9 does not prove the token of job job-1"):
            side.finish(sock.recv(512)[handshake.PREFIX_BYTES :])
        assert sock.recv(1) == b""
    assert "was refused: TokenError: worker-9 does not prove the token of job job-1" in there.log()
    assert there.accepted.empty()


def test_another_job_is_refused_on_both_sides(host: Make) -> None:
    there = host()
    with pytest.raises(TokenError, match="worker-0 asks for another job than job-1; use the job file of this job"):
        there.connect(job="job-2")
    assert "was refused: TokenError: worker-0 asks for another job" in there.log()


def test_another_protocol_version_is_said_on_both_sides(host: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    there, ours = host(), handshake.pack

    def pack_as_one(part: handshake.Part) -> bytes:
        data = bytearray(ours(part))
        data[4] = 1 if isinstance(part, handshake.Hello) else PROTOCOL
        return bytes(data)

    monkeypatch.setattr(handshake, "pack", pack_as_one)
    with pytest.raises(
        VersionError, match=f"the other side speaks protocol 1, this one {PROTOCOL}; use one version of syncline"
    ):
        there.connect()
    assert f"was refused: VersionError: the other side speaks protocol 1, this one {PROTOCOL}" in there.log()
    monkeypatch.undo()
    check_works(there)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "was refused: FrameError: not a handshake of ours: it begins with b'GET '"),
        (_PREFIX + b"\xff\xff", "was refused: FrameError: a handshake of 65535 bytes; at most 512"),
        (_PREFIX + b"\x05\x00\xc1\xc1\xc1\xc1\xc1", "was refused: FrameError: a handshake that cannot be read"),
        (_PREFIX, "ended: the other side closed the connection during the handshake"),
        (b"", "ended: the other side closed the connection during the handshake"),
    ],
)
def test_a_stranger_that_talks_nonsense_is_sent_away(host: Make, data: bytes, reason: str) -> None:
    there = host()
    with stranger(there) as sock:
        port = sock.getsockname()[1]
        sock.sendall(data)
        with contextlib.suppress(OSError):  # closed with bytes of ours unread, perhaps already
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    assert f"127.0.0.1:{port} {reason}" in there.log()
    assert there.accepted.empty()
    check_works(there)


@pytest.mark.parametrize("trickles", [False, True])
def test_a_slow_stranger_is_dropped(host: Make, monkeypatch: pytest.MonkeyPatch, trickles: bool) -> None:
    """Who sends nothing, or one byte now and then to keep each read alive, has the same few seconds in all."""
    monkeypatch.setattr(handshake, "SECONDS", 0.3)
    there = host()
    hello = _PREFIX + (505).to_bytes(2, "little") + bytes(505)  # all that a stranger may send: over in minutes only
    with stranger(there) as sock:
        sent = 0
        if trickles:
            with pytest.raises(OSError):
                for sent in range(len(hello)):
                    sock.sendall(hello[sent : sent + 1])
                    time.sleep(0.2)
            assert sent < len(hello) - 1
        else:
            data = sock.recv(512)
            with pytest.raises(FrameError, match=r"no handshake within 0\.3 s"):
                handshake.Connecting(b"", "", Peer("worker", "w", 0), "").answer(data[handshake.PREFIX_BYTES :])
    assert "was refused: FrameError: no handshake within 0.3 s" in there.log()
    monkeypatch.undo()
    check_works(there)


def test_a_stranger_has_512_bytes_for_all_of_its_handshake(host: Make) -> None:
    """A hello and a proof of 512 bytes each would be twice what a stranger may send."""
    there = host()
    with stranger(there) as sock:
        long = Peer("worker", "𝕨" * 64, 3)
        sock.sendall(handshake.Connecting(bytes(32), "job-1", long, "").hello())
        sock.recv(512)
        sock.sendall(handshake.pack(handshake.Proof(bytes(400))))
        assert b"a handshake of more than 512 bytes" in sock.recv(512)
    assert "was refused: FrameError: a handshake of more than 512 bytes" in there.log()


def test_a_listener_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a lost connection, which may be tried again: a process may be slow to wake up behind its socket."""
    monkeypatch.setattr(handshake, "SECONDS", 0.2)
    with tcp.bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionLost, match=r"no handshake within 0\.2 s"):
        tcp.connect_tcp(*sock.getsockname(), tcp.Identity("j", bytes(32), Peer("worker", "w", 0)), SECONDS)


def test_closing_a_listener_sends_its_strangers_away_at_once(host: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends does not wait for somebody who never says hello."""
    monkeypatch.setattr(handshake, "SECONDS", 10 * SECONDS)
    there = host()
    with stranger(there) as sock:
        deadline = time.monotonic() + SECONDS
        while not there.listener.num_strangers:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        there.close()
        while sock.recv(512):
            pass
    assert there.logged.empty()


def test_too_many_open_files_do_not_end_the_listener(host: Make) -> None:
    """accept() fails while the process is out of descriptors; when there are some again, it goes on."""
    there = host()
    here, other = socket.socketpair()

    ready, end = socket.socketpair()
    end.send(b"x")  # somebody is always waiting to be accepted

    class Crowded:
        def __init__(self) -> None:
            self.turns = [OSError(errno.EMFILE, "Too many open files")] * 2 + [(here, None), OSError(errno.EBADF, "")]

        def fileno(self) -> int:
            return ready.fileno()

        def accept(self) -> Any:
            turn = self.turns.pop(0)
            if isinstance(turn, OSError):
                raise turn
            return turn

    there.listener.serve(Crowded())
    assert there.log() == "a connection could not be accepted: [Errno 24] Too many open files"
    assert there.logged.empty(), "said once"
    identity = tcp.Identity("job-1", bytes(range(32)), Peer("worker", "worker-0", 3))
    connection = tcp.connected(other, identity, "")
    there.connections.append(connection)
    assert there.next()[0].peer.name == "worker-0"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00" * 52, "FrameError: not a frame of ours: it begins with b'\\x00\\x00\\x00\\x00'"),
        (raw_bytes(Leave())[:30], "the other side closed the connection"),
        (raw_bytes(Died("a", "b"))[:-2], "the other side closed the connection"),
        (raw_bytes(Upload(0, [1]), b"x" * 100) + b"x" * 40, "the other side closed the connection"),
        (Header(1, 1, body_bytes=0xFFFFFFFF).pack(), "FrameError: a body of 4294967295 bytes; at most 67108864"),
        (Header(1, 1, payload_bytes=1 << 60).pack(), "FrameError: a payload of 1152921504606846976 bytes; at most"),
        (b"SYNC\x01" + bytes(47), f"VersionError: the other side speaks protocol 1, this one {PROTOCOL}; use one"),
        (Header(0xFFFF, 1).pack(), "FrameError: unknown kind 65535"),
        (Header(3, 1, body_bytes=4).pack() + b"\xc1\xc1\xc1\xc1", "FrameError: a Joined that cannot be read"),
        (random.Random(1).randbytes(300), "FrameError: not a frame of ours: it begins with"),
    ],
    ids=["zeros", "half a header", "half a body", "half a payload", "long body", "long payload", "version", "kind",
         "no such message", "random"],
)  # fmt: skip
@pytest.mark.parametrize("unix", [False, True])
def test_a_bad_frame_closes_its_connection_with_a_reason_and_no_other(
    host: Make, data: bytes, reason: str, unix: bool
) -> None:
    """After a good handshake: zeros, a frame cut short, a header of a terabyte, random bytes."""
    there = host(unix=True)
    (_, at_one), (good, _) = there.pair(name="worker-1")
    bad = there.connect(unix=unix)
    bad.stream.write([memoryview(data)])
    bad.stream.sock.shutdown(socket.SHUT_WR)
    refused, at_refused = there.next()
    assert reason in at_refused.end()
    assert at_refused.frames.empty()
    with pytest.raises(ConnectionLost):
        send(refused, Leave())
    send(good, Leave())
    assert at_one.next()[1] == Leave()
    check_works(there)


def test_a_port_in_use_is_said(host: Make) -> None:
    port = host().address.port
    with pytest.raises(ConfigError) as caught:
        tcp.bind("127.0.0.1", port)
    expected = (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another port with --bind, or 0 for any"
    )
    assert str(caught.value) == expected


def test_a_port_is_taken_before_anybody_is_accepted() -> None:
    """Two jobs started at once on one port: the second must hear of it from bind, not later."""
    with tcp.bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="Address already in use"):
        tcp.bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "port", "message"),
    [
        (
            "192.0.2.1",
            0,
            "cannot listen on 192.0.2.1: Cannot assign requested address; is it an address of this host?",
        ),
        ("127.0.0.1", 70000, "cannot listen on 127.0.0.1:70000: bind(): port must be 0-65535.; choose another port"),
        ("a" * 70, 0, "is it an address of this host?"),
    ],
)
def test_an_address_that_cannot_be_is_said(address: str, port: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tcp.bind(address, port)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::1%lo", True),
     ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False), ("0.0.0.0", False), ("host", False)],
)  # fmt: skip
def test_loopback_is_where_nothing_leaves_the_host(address: str, expected: bool) -> None:
    assert tcp.is_loopback(address) is expected


def test_a_listener_on_all_addresses_is_reached_by_loopback_too() -> None:
    """It sees the other side as ::ffff:127.0.0.1: if only one side took that for loopback, one would speak TLS."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    identity = tcp.Identity("job-1", bytes(32), Peer("server", "server-0", 7))
    came, sock = threading.Event(), tcp.bind("::", 0)
    made: list[Any] = []
    listener = tcp.Listener(identity, lambda c: (made.append(c), came.set()), sock=sock, log=print)
    try:
        made.append(tcp.connect_tcp("127.0.0.1", listener.address.port, identity, SECONDS))
        assert came.wait(SECONDS)
    finally:
        listener.close()
        for connection in made:
            connection.close()


def test_a_payload_goes_straight_into_the_receivers_buffers(host: Make) -> None:
    (one, _), (_, at_two) = host().pair()
    data = np.random.default_rng(0).integers(0, 256, 1_000_003, np.uint8)
    at_two.piece_bytes = 4096
    body = frame.encode(Upload(0, [1]))
    header = Header(frame.kind_of(Upload(0, [1])), 1, body_bytes=len(body), payload_bytes=data.nbytes)
    one.send(header, body, (buffer_of(part) for part in np.array_split(data, 7)))
    assert at_two.next()[2] == data.tobytes()


def test_a_payload_that_does_not_fit_its_message_is_refused(host: Make) -> None:
    (one, _), (_, at_two) = host().pair()
    at_two.most_bytes = 10
    send(one, Upload(0, [1]), b"x" * 11)
    assert "FrameError: a payload of 11 bytes does not fit its message" in at_two.end()


def test_a_listener_that_closes_leaves_a_shared_socket_to_the_others() -> None:
    """A coordinator that was replaced must not take the socket with it, on which the next one listens."""
    sock = tcp.bind("127.0.0.1", 0)
    log: list[str] = []
    identity = tcp.Identity("job-1", bytes(range(32)), Peer("coordinator", "coordinator", 0))
    accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    first = tcp.Listener(identity, lambda connection: None, sock=sock.dup(), log=log.append)
    second = tcp.Listener(identity, accepted.put, sock=sock.dup(), log=log.append)
    first.close()
    sock.close()
    me = tcp.Identity("job-1", bytes(range(32)), Peer("worker", "worker-0", 3))
    connection = tcp.connect_tcp("127.0.0.1", second.address.port, me, SECONDS)
    assert accepted.get(timeout=PATIENCE).peer.name == "worker-0"
    connection.close()
    second.close()


def test_a_flood_of_strangers_is_a_few_lines_in_the_log(host: Make) -> None:
    there = host()
    for _ in range(40):
        with stranger(there) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while sock.recv(512):
                pass
    check_works(there)
    there.listener.close()
    lines = [there.log() for _ in range(4)]
    assert all("begins with b'GET '" in line for line in lines)
    assert lines[-1].startswith("37 more failed connections in the last ")


def test_who_dials_before_we_have_an_incarnation_is_not_accepted() -> None:
    """It drops the connection and dials again. Accepted late, the first connection would replace the second."""
    accepted: queue.Queue[Any] = queue.Queue()
    sock, unnamed = tcp.bind("127.0.0.1", 0), tcp.Identity(JOB, TOKEN, Peer("worker", "worker-1", 0))
    listener = tcp.Listener(unnamed, accepted.put, sock=sock, log=print, needs_incarnation=True)
    me = tcp.Identity(JOB, TOKEN, Peer("worker", "worker-0", 3))
    try:
        first = tcp.connect_tcp(listener.address.host, listener.address.port, me, SECONDS)
        listener.rename(7)
        second = tcp.connect_tcp(listener.address.host, listener.address.port, me, SECONDS)
        assert (first.peer.incarnation, second.peer.incarnation) == (0, 7)
        taken = accepted.get(timeout=SECONDS)
        second.close()
        inbox = Inbox()
        first.start(inbox)
        assert "closed" in inbox.end() and accepted.empty()
        taken.close()
    finally:
        listener.close()
