"""One connection's life: its end is told once, its last words are heard, and its number is not reused too early."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.core.members import Address
from syncline.core.wire.control import Leave, Over
from syncline.core.wire.traffic import Upload
from syncline.errors import ConnectionLost, TokenError
from syncline.net import frame, tcp
from syncline.net.certificate import Certificate, client_context
from syncline.net.frame import Header
from syncline.net.streams import TlsStream
from syncline.net.transport import buffer_of

Make = Callable[..., Any]
SECONDS = PATIENCE
UPLOAD = Upload(0, [1])


def send(connection: Any, message: Any, buffers: Any = (), num_bytes: int = 0) -> None:
    body = frame.encode(message)
    header = Header(frame.kind_of(message), 1, body_bytes=len(body), payload_bytes=num_bytes)
    connection.send(header, body, buffers)


@pytest.fixture(params=["tcp", "unix", "tls"])
def linked(request: pytest.FixtureRequest, host: Make) -> Any:
    """Both ends of a connection of each kind."""
    if request.param == "tls":
        request.getfixturevalue("force_tls")
    pair = host(unix=True).pair(unix=request.param == "unix")
    assert isinstance(pair[0][0].stream, TlsStream) is (request.param == "tls")
    return pair


def test_large_payloads_go_both_ways_at_once(linked: Any) -> None:
    """Both sides send more than the network holds before either reads: without a reader of its own, each
    would wait for the other. Under TLS the two directions also share one lock."""
    num_frames, num_bytes = 3, 6 << 20
    data = [np.random.default_rng(k).integers(0, 256, num_bytes, np.uint8) for k in range(num_frames)]

    def push(connection: Any) -> None:
        for each in data:
            send(connection, UPLOAD, [buffer_of(each[:1000]), buffer_of(each[1000:])], num_bytes)

    senders = [
        threading.Thread(target=push, args=(end,), name=f"push {k}", daemon=True) for k, (end, _) in enumerate(linked)
    ]
    for sender in senders:
        sender.start()
    for end, inbox in linked:
        for each in data:
            assert hashlib.sha256(inbox.next()[2]).digest() == hashlib.sha256(each).digest()
        assert end.stats().bytes_received > num_frames * num_bytes
    for sender in senders:
        sender.join(SECONDS)
        assert not sender.is_alive()


def test_many_threads_send_and_no_frame_is_mixed_with_another(linked: Any) -> None:
    (one, _), (_, at_two) = linked

    def push(number: int) -> None:
        for _ in range(30):
            send(one, Upload(number, []), [memoryview(bytes([number]) * 3000)] * 30, 90_000)

    senders = [
        threading.Thread(target=push, args=(number,), name=f"push {number}", daemon=True) for number in range(4)
    ]
    for sender in senders:
        sender.start()
    for _ in range(4 * 30):
        _, message, payload, _ = at_two.next()
        assert payload == bytes([message.segment]) * 90_000
    for sender in senders:
        sender.join(SECONDS)


def test_more_buffers_than_one_system_call_takes_arrive_whole(linked: Any) -> None:
    (one, _), (_, at_two) = linked
    pieces = [memoryview(bytes([number % 256]) * (number % 5)) for number in range(1000)]
    send(one, UPLOAD, pieces, sum(map(len, pieces)))
    assert at_two.next()[2] == b"".join(pieces)


def test_the_end_is_told_once_on_each_side(linked: Any) -> None:
    (one, at_one), (two, at_two) = linked
    one.close("enough")
    one.close("again")
    assert at_one.end() == "enough"
    assert "the other side closed the connection" in at_two.end() or "the connection broke" in at_two.end()
    two.close()
    assert at_one.ends.empty() and at_two.ends.empty()
    with pytest.raises(ConnectionLost, match="enough"):
        send(one, Leave())


def test_closing_wakes_a_sender_that_waits_for_room(linked: Any) -> None:
    """A worker in the middle of a push to a server that does not read: Ctrl-C must end it."""
    (one, _), (_, at_two) = linked
    blocked, go = threading.Event(), threading.Event()
    at_two.on_deliver = lambda header, message: (blocked.set(), go.wait(SECONDS))
    failed: list[Exception] = []

    def push() -> None:
        try:
            send(one, Leave())
            for _ in range(64):
                send(one, UPLOAD, [memoryview(bytes(4 << 20))], 4 << 20)
        except ConnectionLost as error:
            failed.append(error)

    sender = threading.Thread(target=push, name="push", daemon=True)
    sender.start()
    assert blocked.wait(SECONDS)
    sender.join(0.2)
    assert sender.is_alive(), "the receiver does not read: the sender must be waiting"
    one.close("closed by the test")
    sender.join(SECONDS)
    go.set()
    assert not sender.is_alive() and len(failed) == 1


def test_a_frame_that_cannot_be_sent_whole_ends_the_connection(linked: Any) -> None:
    """Half of a payload is out when the maker of the other half fails: the next frame would be read as the rest."""
    (one, at_one), (_, at_two) = linked

    def buffers() -> Iterator[memoryview]:
        yield memoryview(bytes(50_000))
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        send(one, UPLOAD, buffers(), 100_000)
    assert at_one.end() == "a frame could not be sent whole: RuntimeError: no more"
    with pytest.raises(ConnectionLost):
        send(one, Leave())
    at_two.end()
    assert at_two.frames.empty(), "nothing of it was taken for a frame"


@pytest.mark.parametrize("size", [9, 200_000])
def test_fewer_bytes_than_announced_end_the_connection(linked: Any, size: int) -> None:
    (one, at_one), (_, at_two) = linked
    with pytest.raises(AssertionError, match=f"{size - 1} bytes sent, {size} announced"):
        send(one, UPLOAD, [memoryview(bytes(size - 1))], size)
    assert "a frame could not be sent whole" in at_one.end()
    at_two.end()
    assert at_two.frames.empty()


def test_the_last_words_of_the_other_side_are_heard(linked: Any) -> None:
    """The coordinator says why the job is over and closes. A worker that is just then sending must still read
    it: were a failed send the end of the connection, the user would read `broken pipe` for a verdict."""
    (one, at_one), (two, at_two) = linked
    reading, go = threading.Event(), threading.Event()

    def hold(header: Header, message: object) -> None:
        reading.set()
        assert go.wait(SECONDS)

    at_one.on_deliver = hold
    send(two, Leave())
    assert reading.wait(SECONDS)
    verdict = Over(True, "worker-1", "worker-1 raised ValueError")
    send(two, verdict)
    two.close()
    at_two.end()
    with pytest.raises(ConnectionLost):
        while True:
            send(one, UPLOAD, [memoryview(bytes(100_000))], 100_000)
    assert at_one.ends.empty()
    go.set()
    assert [at_one.next()[1], at_one.next()[1]] == [Leave(), verdict]
    at_one.end()


def test_a_descriptor_is_kept_until_nobody_is_in_it(linked: Any) -> None:
    """A reader between two reads still has the socket's number. Given back by then, the number could be another
    connection's, and the reader would take that one's bytes."""
    (one, at_one), (two, _) = linked
    number = one.stream.sock.fileno()
    reading, go = threading.Event(), threading.Event()
    at_one.on_deliver = lambda header, message: (reading.set(), go.wait(SECONDS))
    send(two, Leave())
    assert reading.wait(SECONDS)
    before = os.stat(number).st_ino
    one.close()
    assert os.stat(number).st_ino == before, "the reader is still there"
    go.set()


def test_a_connection_that_ended_before_it_began_says_so(host: Make, inbox: Make) -> None:
    """Closed between the handshake and the start: whoever asks over it must hear that, not wait."""
    connection, late = host().connect(), inbox()
    connection.close("too late")
    connection.start(late)
    assert late.end() == "too late"


def test_a_bug_in_a_receiver_ends_in_a_reason(linked: Any) -> None:
    (one, _), (_, at_two) = linked

    def broken(header: Header, message: object) -> None:
        raise ZeroDivisionError("ours")

    at_two.on_deliver = broken
    send(one, Leave())
    assert at_two.end() == "ZeroDivisionError: ours"


def test_between_hosts_nobody_in_the_middle_gets_through(host: Make, force_tls: None) -> None:
    """It has a certificate of its own, speaks TLS to both sides and passes every byte on. Both proofs contain
    the certificate that each side saw, and these differ."""
    there = host()
    middle, real = tcp.bind("127.0.0.1", 0), there.address

    def pass_on() -> None:
        sock, _ = middle.accept()
        near = Certificate.create().server_context().wrap_socket(sock, server_side=True)
        far = client_context().wrap_socket(socket.create_connection((real.host, real.port), SECONDS))
        with near, far:
            far.sendall(near.recv(512))
            near.sendall(far.recv(512))
            near.recv(512)  # the end, since the challenge proves another certificate

    thread = threading.Thread(target=pass_on, name="middle", daemon=True)
    thread.start()
    there.address = Address("", *middle.getsockname())
    with pytest.raises(TokenError, match="server-0 does not prove the token of job job-1"):
        there.connect()
    thread.join(SECONDS)
    middle.close()
    assert "worker-0 did not prove the token of this job" in there.log()
    assert there.accepted.empty()
    there.address = real
    there.connect()
    assert there.next()[0].peer.name == "worker-0"


def test_between_hosts_it_is_tls_1_3_and_nothing_is_in_the_clear(host: Make, force_tls: None) -> None:
    there = host()
    connection = there.connect()
    assert connection.stream.sock.version() == "TLSv1.3"
    there.next()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with socket.create_connection((there.address.host, there.address.port)) as sock, pytest.raises(ssl.SSLError):
        old.wrap_socket(sock)
    assert "was refused: SSLError" in there.log()


def test_a_plain_stranger_is_refused_between_hosts(host: Make, force_tls: None) -> None:
    there = host()
    with socket.create_connection((there.address.host, there.address.port), timeout=SECONDS) as sock:
        sock.sendall(b"SYNH\x01\x05\x00hello and more")
        with contextlib.suppress(ConnectionResetError):
            sock.recv(512)
    assert "was refused: SSLError" in there.log()
    assert there.accepted.empty()
