"""Answers in parts, and answers that wait in the socket for whoever waits for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.core.wire.control import GivenWhy, Leave
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import Committed, Rest
from syncline.errors import ConnectionLost, FrameError, RuleError, WaitTimeout
from syncline.net import frame, memory
from syncline.net.frame import MORE, Header
from syncline.net.rpc import Endpoint, NoService, Request, Stamp
from syncline.net.transport import Peer

Make = Callable[..., Any]
SECONDS = PATIENCE
WORKER, SERVER = Peer("worker", "worker-0", 3), Peer("server", "server-0", 7)


class Service(NoService):
    """Answers by the function given, and keeps what came."""

    def __init__(self, handle: Callable[[Request], None] = lambda request: request.reply(Done())) -> None:
        self._handle = handle
        self._requests: queue.Queue[Request] = queue.Queue()

    def handle(self, request: Request) -> None:
        self._requests.put(request)
        self._handle(request)

    def next(self) -> Request:
        return self._requests.get(timeout=SECONDS)


def stamp(incarnation: int) -> Stamp:
    made = Stamp("job-1")
    made.incarnation = incarnation
    return made


@pytest.fixture(params=["memory", "tcp", "unix", "read by the waiter"])
def link(request: pytest.FixtureRequest, host: Make) -> Iterator[Make]:
    """Makes a worker's endpoint whose server answers as told, over each carrier."""
    made: list[Endpoint] = []

    def make(at_server: Any) -> Endpoint:
        if request.param == "memory":
            near, far = memory.pair(WORKER, SERVER)
        else:
            there = host(unix=True, start=False)
            near = there.connect(unix=request.param != "tcp")
            far = there.next()[0]
        server = Endpoint(far, stamp(7), at_server)
        worker = Endpoint(near, stamp(3), waiter_reads=request.param == "read by the waiter")
        made.extend((worker, server))
        return worker

    yield make
    for endpoint in made:
        endpoint.close()


# -- answers in parts ---------------------------------------------------------------------------------------


def test_an_answer_in_parts_lands_part_by_part_and_ends_once(link: Make) -> None:
    """Each part's bytes go where its own message says; the call is done with the last one only."""
    data = {number: bytearray(3) for number in (1, 2, 3)}
    heard: list[list[int]] = []
    go_on = threading.Event()

    def answer(request: Request) -> None:
        def work() -> None:
            request.reply_part(Committed(1, [7], [2]), [memoryview(b"two")], 3)
            go_on.wait(SECONDS)
            request.reply_part(Committed(1, [7], [3]), [memoryview(b"thr")], 3)
            request.reply(Committed(1, [7], [1]), [memoryview(b"one")], 3)

        threading.Thread(target=work, name="Thread-answer").start()

    worker = link(Service(answer))

    def part(message: Any) -> None:
        heard.append(message.slices)
        go_on.set()

    call = worker.call(Leave(), into=lambda m: [memoryview(data[n]) for n in m.slices], on_part=part)
    assert call.wait(SECONDS) == Committed(1, [7], [1])
    assert heard == [[2], [3]]
    assert {n: bytes(b) for n, b in data.items()} == {1: b"one", 2: b"two", 3: b"thr"}


def test_a_refusal_may_end_an_answer_in_parts(link: Make) -> None:
    def answer(request: Request) -> None:
        request.reply_part(Committed(1, [], []))
        request.refuse(RuleError("the update could not be applied"))

    worker = link(Service(answer))
    with pytest.raises(RuleError, match="could not be applied"):
        worker.call(Leave(), on_part=lambda message: None).wait(SECONDS)
    assert worker.is_open


def test_parts_of_what_was_not_asked_so_close_the_connection(link: Make) -> None:
    worker = link(Service(lambda request: request.reply_part(Committed(1, [], []))))
    with pytest.raises(ConnectionLost, match="answered in parts what was not asked so"):
        worker.call(Leave()).wait(SECONDS)


def test_only_an_answer_can_have_parts() -> None:
    with pytest.raises(FrameError, match="unknown flags"):
        frame.parse_header(Header(0, 1, MORE).pack())


# -- whoever waits reads ------------------------------------------------------------------------------------


@pytest.fixture
def reading(host: Make) -> Iterator[Callable[..., tuple[Endpoint, Endpoint]]]:
    """A worker whose answers stay in the socket until it waits for them."""
    made: list[Endpoint] = []

    def make(at_server: Any) -> tuple[Endpoint, Endpoint]:
        there = host(unix=True, start=False)
        near, far = there.connect(unix=True), there.next()[0]
        made.extend((Endpoint(near, stamp(3), waiter_reads=True), Endpoint(far, stamp(7), at_server)))
        return made[0], made[1]

    yield make
    for endpoint in made:
        endpoint.close()


def test_no_thread_reads_for_a_waiter_that_reads(reading: Make) -> None:
    worker, _ = reading(Service())
    assert "read server-0" not in {thread.name for thread in threading.enumerate()}
    assert worker.call(Leave()).wait(SECONDS) == Done()


def test_a_network_connection_keeps_its_reader(host: Make) -> None:
    """Bytes must be taken in while nobody waits."""
    there = host(start=False)
    near, far = there.connect(), there.next()[0]
    worker, server = Endpoint(near, stamp(3), waiter_reads=True), Endpoint(far, stamp(7), Service())
    assert not worker.waiter_reads
    assert worker.call(Leave()).wait(SECONDS) == Done()
    worker.close()
    server.close()


def test_asking_whether_it_is_done_looks_for_the_answer(reading: Make) -> None:
    at_server = Service(lambda request: None)
    worker, _ = reading(at_server)
    call = worker.call(Leave())
    request = at_server.next()
    assert not call.done()
    request.reply(Done())
    deadline = time.monotonic() + SECONDS
    while not call.done():
        assert time.monotonic() < deadline
    assert call.wait(0) == Done()


def test_a_waiter_reads_the_answers_of_others_too(reading: Make) -> None:
    """Two threads wait on one connection: each gets its own answer, whoever reads it."""
    at_server = Service(lambda request: None)
    worker, _ = reading(at_server)
    calls = [worker.call(Rest(number, False)) for number in range(2)]
    requests = [at_server.next() for _ in calls]
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(calls[0].wait(SECONDS).reason), name="Thread-waits")
    thread.start()
    for request in reversed(requests):
        request.reply(GivenWhy(str(request.message.phase)))
    assert calls[1].wait(SECONDS).reason == "1"
    thread.join(SECONDS)
    assert found == ["0"]


@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_close_wakes_a_waiter_that_reads(reading: Make, who: str) -> None:
    at_server = Service(lambda request: None)
    worker, server = reading(at_server)
    call = worker.call(Leave())
    at_server.next()
    threading.Timer(0.05, (worker if who == "worker" else server).close, ("enough",)).start()
    with pytest.raises(ConnectionLost, match="server-0 is gone"):
        call.wait(SECONDS)
    with pytest.raises(ConnectionLost, match="server-0 is gone"):
        worker.call(Leave())


def test_a_timeout_of_a_waiter_that_reads_leaves_the_call_open(reading: Make) -> None:
    at_server = Service(lambda request: None)
    worker, _ = reading(at_server)
    call = worker.call(Leave())
    with pytest.raises(WaitTimeout, match="no answer within"):
        call.wait(0.02)
    at_server.next().reply(Done())
    assert call.wait(SECONDS) == Done()


def test_ctrl_c_within_a_frame_ends_the_connection(reading: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the frame would be read as the next one."""
    worker, _ = reading(Service())
    call = worker.call(Leave())
    connection: Any = worker.connection

    def interrupted(count: int) -> memoryview:
        raise KeyboardInterrupt

    monkeypatch.setattr(connection.stream, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call.wait(SECONDS)
    with pytest.raises(ConnectionLost, match="interrupted within a frame"):
        call.wait(SECONDS)
