"""A member's way to the coordinator: what an answer brings is in force before anything else is heard."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.core.wire.control import AskWhy, Heartbeat, Join, Over, Rejoin
from syncline.core.wire.message import Done
from syncline.net import memory
from syncline.net.link import Link, seconds_to_beat
from syncline.net.rpc import Call, Endpoint, Request, Stamp
from syncline.net.transport import Connection, Peer


class Hears:
    """Keeps what it heard, in order."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def buffers_for(self, peer: Peer, message: Any, payload_bytes: int) -> list[memoryview]:
        return []

    def handle(self, request: Request) -> None:
        self._heard.append(type(request.message).__name__)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        pass


class AnswersAndGoesOn(Hears):
    """A coordinator that has something more to say to who has just joined."""

    def handle(self, request: Request) -> None:
        request.reply(Done())
        request.endpoint.tell(Over(False, "", ""))


def test_what_follows_from_an_answer_is_done_before_the_next_word_is_heard() -> None:
    """A server that answered its first question before it knew its own incarnation was taken for another, and
    fenced: the coordinator's questions may follow its answer at once."""
    heard: list[str] = []

    def dial() -> Connection:
        left, right = memory.pair(Peer("server", "server-0", 0), Peer("coordinator", "coordinator", 0))
        Endpoint(right, Stamp("job"), AnswersAndGoesOn([]))
        return left

    link = Link(
        dial, Hears(heard), Stamp("job"),
        patience_seconds=0.0, say=heard.append, fenced=lambda error: None, gone=lambda reason: None,
    )  # fmt: skip

    def then(call: Call) -> None:
        heard.append("then")
        assert call.answer == Done()

    link.try_call(Join("server", "server-0", "here", 1, None, {}, "process", "kind"), then).wait(PATIENCE)
    assert heard == ["then", "Over"]
    link.close()


class Slow(Hears):
    """A coordinator that answers a member's beats when it is let, and everything else at once."""

    def __init__(self) -> None:
        self.connections: list[Endpoint] = []
        self.order: list[str] = []  # in which a connection was closed by the member, and another one was made
        self.answers_beats, self.beats = threading.Event(), 0
        self.closed: list[Endpoint] = []
        self._asked: list[Request] = []

    def dial(self) -> Connection:
        left, right = memory.pair(Peer("worker", "worker-0", 0), Peer("coordinator", "coordinator", 0))
        self.connections.append(Endpoint(right, Stamp("job"), self))
        close = left.close

        def closing(reason: str = "closed") -> None:
            self.order.append("closed")
            close(reason)

        connection: Any = left
        connection.close = closing
        return left

    def handle(self, request: Request) -> None:
        if isinstance(request.message, Rejoin):
            self.order.append("came back")
        elif isinstance(request.message, Heartbeat):
            self.beats += 1
            if not self.answers_beats.is_set():
                self._asked.append(request)
                return
        elif request.endpoint is self.connections[0]:
            return  # over the connection that is given up nothing is answered
        request.reply(Done())

    def answer(self) -> None:
        self.answers_beats.set()
        for request in self._asked:
            request.reply(Done())

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self.closed.append(endpoint)


def member_of(coordinator: Slow, dial: Callable[[], Connection]) -> Link:
    link = Link(
        dial, Hears([]), Stamp("job"),
        patience_seconds=60.0, say=lambda text: None, fenced=lambda error: None, gone=lambda reason: None,
    )  # fmt: skip
    link.begin("worker-0", 1, beat=Heartbeat, beat_seconds=0.001, silent_seconds=0.01, on_roster=lambda roster: None)
    return link


def until(is_so: Callable[[], object]) -> None:
    for _ in range(30_000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that")


def test_the_connection_to_a_slow_coordinator_is_kept_until_there_is_another() -> None:
    """Closed first, it would be a death to a coordinator that lives: it waits for a moment only, and a member on a
    starved machine does not come back so soon. What was asked over the old one is asked again."""
    coordinator = Slow()
    with contextlib.closing(member_of(coordinator, coordinator.dial)) as link:
        assert link.call(AskWhy(), 300.0) == Done()
        assert coordinator.order[0] == "came back"
        until(lambda: coordinator.connections[0] in coordinator.closed)


def test_a_coordinator_that_answers_late_is_looked_for_no_more() -> None:
    coordinator, is_looked_for, goes_on = Slow(), threading.Event(), threading.Event()

    def dial() -> Connection:
        if coordinator.connections:
            is_looked_for.set()
            assert goes_on.wait(300.0)
        return coordinator.dial()

    with contextlib.closing(member_of(coordinator, dial)):
        assert is_looked_for.wait(300.0)
        coordinator.answer()
        until(lambda: coordinator.beats > 3)
        goes_on.set()
        until(lambda: coordinator.order)
        before = coordinator.beats
        until(lambda: coordinator.beats > before + 3)
        assert coordinator.connections[0] not in coordinator.closed, "it is whole, and stays"
        assert "came back" not in coordinator.order


def test_who_has_no_news_by_a_bug_beats_all_the_same() -> None:
    """Silent, a healthy member would be taken for dead. What is wrong is said once."""
    beats, said, enough = [], [], threading.Event()

    class Counts(Hears):
        def handle(self, request: Request) -> None:
            if isinstance(request.message, Heartbeat):
                beats.append(request.message)
                enough.set() if len(beats) > 2 else None
            request.reply(Done())

    def dial() -> Connection:
        left, right = memory.pair(Peer("worker", "worker-0", 0), Peer("coordinator", "coordinator", 0))
        Endpoint(right, Stamp("job"), Counts([]))
        return left

    def make() -> Heartbeat:
        raise KeyError("x")

    link = Link(
        dial, Hears([]), Stamp("job"),
        patience_seconds=0.0, say=said.append, fenced=lambda error: None, gone=lambda reason: None,
    )  # fmt: skip
    link.try_call(AskWhy()).wait(PATIENCE)
    link.begin("worker-0", 1, beat=make, beat_seconds=0.001, silent_seconds=PATIENCE, on_roster=lambda roster: None)
    assert enough.wait(PATIENCE)
    link.close()
    assert said == ["a sign of life without news: KeyError: 'x'"]


def test_members_of_a_host_beat_at_the_same_moments() -> None:
    """Whenever they began, and however long an answer took: each is at a whole multiple of the interval."""
    for every in (0.25, 0.5, 2.5):
        for now in (0.0, 1e6 + 0.1, 123.456):
            wait = seconds_to_beat(now, every)
            assert 0 < wait <= every
            assert (now + wait) / every == pytest.approx(round((now + wait) / every))
