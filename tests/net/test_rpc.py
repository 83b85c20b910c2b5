"""Calls: every question gets its answer, its error or the end of the connection, once, and within its deadline."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.core.wire.control import AskServerStats, AskWhy, Barrier, Died, GivenWhy, Leave, Over
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import Pull, Pulled, Rest, Upload
from syncline.errors import (
    ConnectionLost,
    LayoutError,
    ProtocolError,
    RuleError,
    SynclineError,
    WaitTimeout,
)
from syncline.net import frame, memory
from syncline.net.frame import ANSWER, Header
from syncline.net.rpc import Call, Endpoint, Request, Stamp, wait_all
from syncline.net.transport import Peer

Make = Callable[..., Any]
SECONDS = PATIENCE
WORKER, SERVER = Peer("worker", "worker-0", 3), Peer("server", "server-0", 7)


class Service:
    """Answers by the function given; keeps what came and why it ended."""

    def __init__(self, handle: Callable[[Request], None] = lambda request: request.reply(Done())) -> None:
        self._handle = handle
        self.requests: queue.Queue[Request] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        self.room, self.num_landed = 1 << 20, 0

    def buffers_for(self, peer: Peer, message: Any, payload_bytes: int) -> list[memoryview]:
        self.num_landed += 1
        if payload_bytes > self.room:
            raise ProtocolError(f"no room for {payload_bytes} bytes")
        return [memoryview(bytearray(payload_bytes))]

    def handle(self, request: Request) -> None:
        self.requests.put(request)
        self._handle(request)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self.ends.put(reason)

    def next(self) -> Request:
        return self.requests.get(timeout=SECONDS)

    def end(self) -> str:
        return self.ends.get(timeout=SECONDS)


def stamp(incarnation: int, job: str = "job-1") -> Stamp:
    made = Stamp(job)
    made.incarnation = incarnation
    return made


@pytest.fixture(params=["memory", "tcp", "unix", "read by the waiter"])
def link(request: pytest.FixtureRequest, host: Make) -> Iterator[Callable[..., tuple[Endpoint, Endpoint]]]:
    """Makes a worker's endpoint and a server's, over each carrier."""
    made: list[Endpoint] = []

    def make(at_worker: Any = None, at_server: Any = None, **how: Any) -> tuple[Endpoint, Endpoint]:
        if request.param == "memory":
            near, far = memory.pair(WORKER, SERVER)
        else:
            there = host(unix=True, start=False)
            near = there.connect(unix=request.param != "tcp")
            far = there.next()[0]
        server = Endpoint(far, how.get("server", stamp(7)), at_server or Service())
        waiter_reads = request.param == "read by the waiter"
        worker = Endpoint(near, how.get("worker", stamp(3)), at_worker, waiter_reads=waiter_reads)
        assert worker.waiter_reads == waiter_reads
        made.extend((worker, server))
        return worker, server

    yield make
    for endpoint in made:
        endpoint.close()


def test_calls_go_both_ways_at_once(link: Make) -> None:
    """A server asked by a worker may ask back before it answers: the answers find their questions."""
    at_worker = Service(lambda request: request.reply(GivenWhy("worker")))

    def ask_back(request: Request) -> None:
        back = request.endpoint.call(Over(False, "", ""))
        back.when_done(lambda: request.reply(GivenWhy(f"server, and {back.wait(0).reason}")))

    at_server = Service(ask_back)
    worker, server = link(at_worker, at_server)
    server.peer = Peer("worker", "worker-0", 3)
    worker.peer = Peer("coordinator", "server-0", 7)  # may say Over
    answers = wait_all([worker.call(AskWhy()) for _ in range(20)], SECONDS)
    assert answers == [GivenWhy("server, and worker")] * 20


def test_answers_may_come_in_any_order(link: Make) -> None:
    at_server = Service(lambda request: None)
    worker, _ = link(None, at_server)
    calls = [worker.call(Rest(number, False)) for number in range(10)]
    requests = [at_server.next() for _ in calls]
    for request in reversed(requests):
        request.reply(GivenWhy(str(request.message.phase)))
    assert [call.wait(SECONDS).reason for call in calls] == [str(number) for number in range(10)]


@pytest.mark.parametrize("kind", [LayoutError, RuleError, ProtocolError, SynclineError])
def test_an_error_comes_back_as_its_class(link: Make, kind: type[Exception]) -> None:
    """`except LayoutError` in a script works although the coordinator raised it."""

    def refuse(request: Request) -> None:
        raise kind("worker-1 registered 'w' otherwise")

    worker, _ = link(None, Service(refuse))
    for _ in range(2):  # and the connection goes on
        with pytest.raises(kind, match="worker-1 registered 'w' otherwise") as caught:
            worker.call(Leave()).wait(SECONDS)
        assert type(caught.value) is kind


def test_a_foreign_error_can_be_given_as_an_answer(link: Make) -> None:
    worker, _ = link(None, Service(lambda request: request.refuse(KeyError("x"))))
    with pytest.raises(SynclineError, match="KeyError: 'x'"):
        worker.call(Leave()).wait(SECONDS)


def test_payloads_go_into_the_buffers_of_the_asker(link: Make) -> None:
    at_server = Service(lambda r: r.reply(Pulled([1]), [memoryview(b"abc"), memoryview(b"defg")], 7))
    worker, _ = link(None, at_server)
    fixed = [memoryview(bytearray(4)), memoryview(bytearray(3))]
    worker.call(Pull([1], None, True), into=fixed).wait(SECONDS)
    assert [bytes(part) for part in fixed] == [b"abcd", b"efg"]
    later: list[memoryview] = []

    def make(answer: Any) -> list[memoryview]:
        later.append(memoryview(bytearray(7 * answer.versions[0])))
        return later

    worker.call(Pull([1], None, True), into=make).wait(SECONDS)
    assert bytes(later[0]) == b"abcdefg"
    worker.call(Upload(0, [1]), buffers=[memoryview(b"xyz")], payload_bytes=3, into=fixed).wait(SECONDS)
    assert [bytes(part) for part in at_server.requests.queue[-1].payload] == [b"xyz"]


def test_a_lost_connection_fails_every_open_call_and_every_later_one(link: Make) -> None:
    """Whoever waits for a server that died must hear of it at once, not after ten minutes."""
    at_server = Service(lambda request: None)
    worker, server = link(None, at_server)
    calls = [worker.call(Leave()) for _ in range(5)]
    for _ in calls:
        at_server.next()
    server.close("killed")
    for call in calls:
        with pytest.raises(ConnectionLost, match="server-0 is gone: "):
            call.wait(SECONDS)
        assert call.done()
    assert not worker.is_open
    with pytest.raises(ConnectionLost, match="server-0 is gone: "):
        worker.call(Leave())
    assert at_server.end() == "killed"


@pytest.mark.parametrize("link", ["tcp", "unix"], indirect=True)
def test_a_call_that_fails_does_not_drown_the_verdict(link: Make) -> None:
    """The coordinator says why the job is over and closes; a worker that asks something just then must hear why,
    not that the connection broke while it was asking."""
    reading, go = threading.Event(), threading.Event()
    at_worker = Service(lambda request: (reading.set(), go.wait(SECONDS)))
    worker, server = link(at_worker)
    worker.peer = Peer("coordinator", "server-0", 7)
    server.tell(Over(False, "", "first"))
    assert reading.wait(SECONDS)
    server.tell(Over(True, "worker-1", "worker-1 raised ValueError"))
    server.close()
    with pytest.raises(ConnectionLost):
        while True:
            worker.call(Leave())
    assert at_worker.ends.empty(), "the end is told after the last words"
    go.set()
    assert [at_worker.next().message.reason for _ in range(2)] == ["first", "worker-1 raised ValueError"]
    at_worker.end()


def test_an_answer_to_one_who_is_gone_is_no_error(link: Make) -> None:
    at_server = Service(lambda request: None)
    worker, server = link(None, at_server)
    call = worker.call(Leave())
    request = at_server.next()
    worker.close()
    at_server.end()
    request.reply(Done())
    assert not server.is_open and at_server.ends.empty(), "that it is gone is told once"
    with pytest.raises(ConnectionLost):
        call.wait(SECONDS)


def test_a_wait_has_a_deadline_that_names_the_question(link: Make) -> None:
    at_server = Service(lambda request: None)
    worker, _ = link(None, at_server)
    call = worker.call(Barrier("end", 1, 0))
    with pytest.raises(WaitTimeout, match=r"Barrier to server-0: no answer within 0\.05 s"):
        call.wait(0.05)
    at_server.next().reply(Done())
    assert call.wait(SECONDS) == Done(), "it can be waited for again"


def test_several_waits_share_one_deadline_and_name_all_of_it(link: Make) -> None:
    """The second call has what the first left; the message must tell the user's deadline, not the rest of it."""
    worker, _ = link(None, Service(lambda request: None))
    calls = [worker.call(Leave()) for _ in range(3)]
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"Leave to server-0: no answer within 0\.1 s"):
        wait_all(calls, 0.1)
    assert time.monotonic() - began < SECONDS
    done = Call(worker, Leave, ())
    done.finish(Done(), None, None)
    with pytest.raises(WaitTimeout, match=r"no answer within 0 s"):
        wait_all([done, calls[0]], 0)


NOBODY: Any = types.SimpleNamespace(waiter_reads=False, peer="nobody")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Died("worker-1", "x"), "a worker may not say Died"),
        (AskServerStats(), "a worker may not say AskServerStats"),
        (Over(True, "", ""), "a worker may not say Over"),
        (Done(), "a worker may not say Done"),
    ],
)
@pytest.mark.parametrize("payload", [b"", b"12345"])
def test_a_role_that_says_what_it_may_not_is_cut_off(link: Make, message: Any, reason: str, payload: bytes) -> None:
    """A worker that could say Over would end the job for all; refused before its payload finds any room."""
    at_server = Service()
    worker, _ = link(None, at_server)
    call = worker.call(message, buffers=[memoryview(payload)] if payload else (), payload_bytes=len(payload))
    assert reason in at_server.end()
    with pytest.raises(ConnectionLost):
        call.wait(SECONDS)
    assert at_server.requests.empty() and at_server.num_landed == 0


@pytest.mark.parametrize(
    ("stamps", "reason"),
    [
        ({"worker": stamp(3, "job-2")}, "worker-0 sent a frame of another job"),
        ({"worker": stamp(4)}, "worker-0 sent a frame of another incarnation"),
        ({"worker": stamp(0)}, "worker-0 sent a frame of another incarnation"),
    ],
)
@pytest.mark.parametrize("payload", [b"", b"12345"])
def test_a_frame_of_another_job_or_incarnation_is_refused(
    link: Make, stamps: dict[str, Stamp], reason: str, payload: bytes
) -> None:
    """The handshake proved one incarnation: a frame that names another is of somebody who was replaced."""
    at_server = Service()
    worker, _ = link(None, at_server, **stamps)
    call = worker.call(Upload(0, [1]), buffers=[memoryview(payload)] if payload else (), payload_bytes=len(payload))
    assert reason in at_server.end()
    with pytest.raises(ConnectionLost):
        call.wait(SECONDS)
    assert at_server.requests.empty() and at_server.num_landed == 0


@pytest.mark.parametrize("payload", [b"", b"12345"])
def test_an_answer_to_nothing_asked_ends_the_connection(link: Make, payload: bytes) -> None:
    at_server = Service()
    worker, _ = link(None, at_server)
    body = frame.encode(Pulled([1]))
    header = Header(
        frame.kind_of(Pulled([1])), 77, ANSWER, frame.job_key("job-1"), 3, body_bytes=len(body),
        payload_bytes=len(payload),
    )  # fmt: skip
    worker.connection.send(header, body, [memoryview(payload)] if payload else ())
    assert "question that was not asked" in at_server.end()


def test_a_payload_without_room_ends_the_connection(link: Make) -> None:
    at_server = Service()
    at_server.room = 4
    worker, _ = link(None, at_server)
    call = worker.call(Upload(0, [1]), buffers=[memoryview(b"12345")], payload_bytes=5)
    assert "no room for 5 bytes" in at_server.end()
    with pytest.raises(ConnectionLost):
        call.wait(SECONDS)


def test_a_side_that_only_asks_refuses_to_be_asked(link: Make) -> None:
    worker, server = link()
    worker.peer = Peer("coordinator", "server-0", 7)
    with pytest.raises(ProtocolError, match="server-0 asks a side that answers nothing"):
        asked = server.call(Over(False, "", ""))
        if worker.waiter_reads:
            assert worker.read(SECONDS)  # nobody waits there, so nobody reads
        asked.wait(SECONDS)


def test_what_is_told_is_not_answered(link: Make) -> None:
    """A reply to something told would be an answer to nothing asked, and the end of the connection."""
    at_server = Service()
    worker, _ = link(None, at_server)
    worker.tell(Leave())
    assert at_server.next().number == 0
    worker.tell(AskWhy())
    assert worker.call(Leave()).wait(SECONDS) == Done()
    assert worker.is_open


def test_a_call_that_could_not_be_sent_leaves_nothing_open(link: Make) -> None:
    worker, _ = link()
    with pytest.raises(OverflowError):
        worker.call(Rest(1 << 70, False))
    assert not worker._calls
    assert worker.call(Leave()).wait(SECONDS) == Done(), "nothing of it was sent"


def test_numbers_of_calls_come_round_without_zero(link: Make) -> None:
    """0 means `not answered`: after four thousand million calls, one would wait for ever."""
    at_server = Service()
    worker, _ = link(None, at_server)
    worker._numbers = itertools.count(0xFFFFFFFE)
    for _ in range(3):
        assert worker.call(Leave()).wait(SECONDS) == Done()
    assert [at_server.next().number for _ in range(3)] == [0xFFFFFFFF, 1, 2]


def test_an_action_runs_once_whoever_comes_first() -> None:
    """The answer comes in one thread while another says what to do then. Run twice, a commit over two servers
    would count one server's answer for both."""
    for _ in range(300):
        call, runs = Call(NOBODY, Leave, ()), []
        start = threading.Barrier(2)

        def bring(call: Call = call, start: threading.Barrier = start) -> None:
            start.wait()
            call.finish(Done(), None, None)

        thread = threading.Thread(target=bring, name="bring", daemon=True)
        thread.start()
        start.wait()
        call.when_done(lambda runs=runs: runs.append(1))
        thread.join(SECONDS)
        assert runs == [1]


def test_an_action_runs_once_in_the_narrowest_gap() -> None:
    """The same race made certain: the answer comes between the two steps of `when_done`."""
    call, runs = Call(NOBODY, Leave, ()), []
    latch = call._latch

    class Gap:
        @property
        def is_open(self) -> bool:
            call._latch = latch
            call.finish(Done(), None, None)
            return latch.is_open

    call._latch = Gap()
    call.when_done(lambda: runs.append(1))
    assert runs == [1]


def test_stats_are_those_of_the_connection(link: Make) -> None:
    worker, server = link()
    worker.call(Leave()).wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    while server.stats().frames_sent < 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (worker.stats().frames_sent, worker.stats().frames_received) == (1, 1)
    assert worker.stats().bytes_sent == server.stats().bytes_received
