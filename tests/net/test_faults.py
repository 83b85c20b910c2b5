"""Two real endpoints and a proxy that does harm between them: every call is answered rightly, or ends with a reason.

Loopback is in the clear and has no checksum of ours: a changed byte is found where it breaks the form of a frame.
One in a payload, or in a number of a message, is not, and no test here says otherwise. Between hosts there is TLS,
where every byte is under a MAC.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.core.members import Address
from syncline.core.wire.tables import Done, Message, Pull, Pulled, Upload
from syncline.errors import ConnectionLost, FrameError, ProtocolError, TokenError, WaitTimeout
from syncline.net import frame, stalls, tcp
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Peer
from syncline.testing import Proxy

Make = Callable[..., Any]
SECONDS = PATIENCE
NUM_BYTES = 10_000
UPLOAD, PULL = Upload(7, [1, 2, 3]), Pull([4, 5], None, True)
BODY_BYTES = len(frame.encode(UPLOAD))
PAYLOAD = bytes(k % 251 for k in range(NUM_BYTES))
#: Where each field of a header lies.
FIELDS = {
    "magic": (0, 4), "version": (4, 5), "flags": (5, 6), "kind": (6, 8), "request": (8, 12), "job": (12, 20),
    "incarnation": (20, 28), "generation": (28, 36), "term": (36, 40), "body": (40, 44), "payload": (44, 52),
}  # fmt: skip


class Service:
    """A server that takes uploads of one size and answers pulls; keeps what it handled."""

    def __init__(self) -> None:
        self.handled: queue.Queue[tuple[Message, bytes]] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> list[memoryview]:
        if not isinstance(message, Upload):
            raise FrameError(f"{type(message).__name__} has no payload")
        if payload_bytes != NUM_BYTES:
            raise ProtocolError(f"{payload_bytes} bytes for slices of {NUM_BYTES}")
        return [memoryview(bytearray(NUM_BYTES))]

    def handle(self, request: Request) -> None:
        self.handled.put((request.message, b"".join(request.payload)))
        if isinstance(request.message, Pull):
            request.reply(Pulled([8, 9]), [memoryview(PAYLOAD)], NUM_BYTES)
        else:
            request.reply(Done())

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self.ends.put(reason)

    def end(self) -> str:
        return self.ends.get(timeout=SECONDS)


def stamp(incarnation: int) -> Stamp:
    made = Stamp("job-1")
    made.incarnation = incarnation
    return made


class Between:
    """A listener behind a proxy; `link` makes a worker's endpoint through it, and the service that hears it."""

    def __init__(self, there: Any) -> None:
        self.there = there
        self.proxy = Proxy(there.address.host, there.address.port)
        there.address = Address("", self.proxy.host, self.proxy.port)
        self._made: list[Endpoint] = []

    def link(self) -> tuple[Endpoint, Service]:
        self.proxy.cut()  # of connections before it nothing is on its way any more, which would count
        near, service = self.there.connect(), Service()
        worker = Endpoint(near, stamp(3))
        self._made += [worker, Endpoint(self.there.next()[0], stamp(7), service)]
        return worker, service

    def check_works(self) -> None:
        """Whatever happened to another connection, a new one does its work."""
        worker, service = self.link()
        assert upload(worker).wait(SECONDS) == Done()
        assert service.handled.get(timeout=SECONDS) == (UPLOAD, PAYLOAD)

    def close(self) -> None:
        self.proxy.close()
        for endpoint in self._made:
            endpoint.close()


@pytest.fixture
def between(host: Make) -> Iterator[Between]:
    made = Between(host(start=False))
    yield made
    made.close()


def upload(worker: Endpoint) -> Any:
    return worker.call(UPLOAD, buffers=[memoryview(PAYLOAD)], payload_bytes=NUM_BYTES)


PLACES = [1, frame.HEADER.size, frame.HEADER.size + 2, frame.HEADER.size + BODY_BYTES, frame.HEADER.size + 5000]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("num_bytes", PLACES)
def test_a_question_that_is_cut_is_never_handled_and_its_asker_hears_of_it(
    between: Between, num_bytes: int, reset: bool
) -> None:
    """In the header, between header and body, in the body, before and in the payload."""
    worker, service = between.link()
    between.proxy.cut_after(num_bytes, "up", reset=reset)
    with pytest.raises(ConnectionLost, match="server-0 is gone"):
        upload(worker).wait(SECONDS)
    assert service.end()
    assert service.handled.empty(), "half a frame counted"
    between.check_works()


@pytest.mark.parametrize("num_bytes", PLACES)
def test_an_answer_that_is_cut_is_none(between: Between, num_bytes: int) -> None:
    """The server has done it, and the asker cannot know: it must hear that the connection broke, not `done`."""
    worker, service = between.link()
    between.proxy.cut_after(num_bytes, "down")
    call = worker.call(PULL, into=[memoryview(bytearray(NUM_BYTES))])
    with pytest.raises(ConnectionLost, match="server-0 is gone"):
        call.wait(SECONDS)
    assert service.handled.get(timeout=SECONDS)[0] == PULL
    between.check_works()


def push_until_lost(worker: Endpoint) -> None:
    """A length that became larger takes the next frames for its own bytes: so many that any is reached."""
    with contextlib.suppress(ConnectionLost):
        for _ in range(3000):
            upload(worker)


@pytest.mark.parametrize("flip", [0xFF, 0x01])
@pytest.mark.parametrize("field", [name for name in FIELDS if name not in ("request", "generation", "term")])
def test_a_changed_header_ends_the_connection(between: Between, field: str, flip: int) -> None:
    """Each byte of each field. Nothing that was not asked may be done meanwhile."""
    for offset in range(*FIELDS[field]):
        worker, service = between.link()
        between.proxy.corrupt(offset, "up", flip)
        push_until_lost(worker)
        assert service.end() != "closed", (field, offset)
        assert service.handled.empty(), (field, offset)
    between.check_works()


@pytest.mark.parametrize("flip", [0xFF, 0x02])
def test_an_answer_to_another_question_ends_the_connection(between: Between, flip: int) -> None:
    """A changed number of the question: it is handled, and its answer is one that nobody waits for. (Were it 0 by
    the change, nothing would be answered: against that there is only the deadline of whoever asks.)"""
    for offset in range(*FIELDS["request"]):
        worker, _ = between.link()
        between.proxy.corrupt(offset, "up", flip)
        with pytest.raises(ConnectionLost, match="server-0 is gone: server-0 answered a question that was not asked"):
            upload(worker).wait(SECONDS)
    between.check_works()


@pytest.mark.parametrize("flip", [0xFF, 0x01])
@pytest.mark.parametrize("field", [name for name in FIELDS if name not in ("generation", "term")])
def test_a_changed_header_of_an_answer_is_never_taken_for_one(between: Between, field: str, flip: int) -> None:
    for offset in range(*FIELDS[field]):
        worker, service = between.link()
        between.proxy.corrupt(offset, "down", flip)
        target = memoryview(bytearray(NUM_BYTES))
        calls = [worker.call(PULL, into=[target])]
        with contextlib.suppress(ConnectionLost):  # more answers, for a length that became larger
            while len(calls) < 3000:
                calls.append(worker.call(PULL, into=[target]))
        with pytest.raises(ConnectionLost, match="server-0 is gone"):
            calls[0].wait(SECONDS)
        assert service.end()


def test_a_changed_body_is_refused_or_is_another_message_of_the_same_form(between: Between) -> None:
    """A number in a body can become another number, which no frame can tell: whoever handles it checks it against
    the layout. What breaks the form ends the connection. Nothing else may happen, and nobody else is harmed."""
    refused = set()
    for offset in range(BODY_BYTES):
        worker, service = between.link()
        between.proxy.corrupt(frame.HEADER.size + offset, "up")
        try:
            assert upload(worker).wait(SECONDS) == Done()
            message, payload = service.handled.get(timeout=SECONDS)
            assert isinstance(message, Upload) and message != UPLOAD and payload == PAYLOAD
        except ConnectionLost:
            assert "refused what worker-0 sent: FrameError" in service.end()
            assert service.handled.empty()
            refused.add(offset)
    assert {0, 2} <= refused, "the marks of the struct and of its list"
    between.check_works()


@pytest.mark.parametrize("directions", [("up",), ("down",), ()])
def test_half_open_is_a_wait_with_a_deadline_and_goes_on_after_it(between: Between, directions: Any) -> None:
    """No side sees an end. The asker's deadline passes, with a word for whom; the call stays open, and is
    answered once the way is free."""
    worker, service = between.link()
    between.proxy.stop(*directions)
    call = upload(worker)
    if directions == ("down",):
        service.handled.put(service.handled.get(timeout=SECONDS))
    with pytest.raises(WaitTimeout, match=r"Upload to server-0: no answer within 0\.2 s"):
        call.wait(0.2)
    assert worker.is_open and service.handled.empty() is (directions != ("down",))
    between.proxy.resume()
    assert call.wait(SECONDS) == Done()
    assert service.handled.get(timeout=SECONDS) == (UPLOAD, PAYLOAD)


@pytest.mark.parametrize("reset", [False, True])
def test_half_open_and_then_cut_is_an_end(between: Between, reset: bool) -> None:
    worker, service = between.link()
    between.proxy.stop("down")
    call = upload(worker)
    service.handled.get(timeout=SECONDS)
    between.proxy.cut(reset=reset)
    with pytest.raises(ConnectionLost, match="server-0 is gone"):
        call.wait(SECONDS)
    assert service.end()


def test_a_sender_into_a_half_open_connection_is_not_held_for_ever(between: Between) -> None:
    """Nothing is read on the other side, and no end is seen: what cannot be sent ends with a reason."""
    worker, _ = between.link()
    stream: Any = worker.connection.stream  # type: ignore[attr-defined]
    stream.stall_seconds = 0.3
    stalls.bound(stream.sock, socket.SO_SNDTIMEO, stalls.look_seconds(0.3))
    between.proxy.stop("up")
    with pytest.raises(ConnectionLost, match=r"server-0 is gone: server-0 has not read for 0\.3 s"):
        while True:
            upload(worker)


def test_a_slow_network_changes_nothing_but_the_time(between: Between) -> None:
    worker, service = between.link()
    between.proxy.delay(0.01)
    calls = [upload(worker) for _ in range(5)]
    assert [call.wait(SECONDS) for call in calls] == [Done()] * 5
    assert [service.handled.get(timeout=SECONDS) for _ in calls] == [(UPLOAD, PAYLOAD)] * 5


def test_a_replayed_connection_is_refused(between: Between) -> None:
    """Somebody has listened on the wire, and says every byte of a worker's connection again, its proof too.
    The proof is over a nonce of the listener's, which is another one each time."""
    between.proxy.record()
    worker, service = between.link()
    assert upload(worker).wait(SECONDS) == Done()
    (recording,) = between.proxy.recordings
    assert bytes(recording.up).endswith(PAYLOAD), "in the clear on loopback: all of it is there"
    assert between.proxy.replay(recording, SECONDS).was_closed
    assert "was refused: TokenError: worker-0 does not prove the token of job job-1" in between.there.log()
    assert between.there.accepted.empty() and service.handled.qsize() == 1


def test_a_replayed_server_is_refused_too(between: Between) -> None:
    """The other way round: what a server has said is played to a worker that connects."""
    between.proxy.record()
    worker, _ = between.link()
    assert upload(worker).wait(SECONDS) == Done()
    played = bytes(between.proxy.recordings[0].down)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def play() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.sendall(played)
                sock.recv(512)

        player = threading.Thread(target=play, name="play", daemon=True)
        player.start()
        identity = tcp.Identity("job-1", bytes(range(32)), Peer("worker", "worker-0", 3))
        with pytest.raises(TokenError, match="server-0 does not prove the token of job job-1"):
            tcp.connect_tcp(*listening.getsockname(), identity, SECONDS)
        player.join(SECONDS)
