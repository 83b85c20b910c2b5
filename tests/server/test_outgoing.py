"""Bytes that are owed and not sent: bounded for each connection and in all; whoever reads gets every answer."""

from __future__ import annotations

import queue
import random
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.core.wire.tables import Done, Pull, Pulled
from syncline.net import memory
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Peer, buffer_of
from syncline.server.pool import InlinePool
from syncline.server.pulls import Pulls
from syncline.server.replies import ALL_BYTES, EACH_BYTES, EACH_TIMES, MOST_PULLS, Outgoing

SECONDS = PATIENCE
MIB = 1 << 20


class Reader:
    """A connection, as far as the count looks at it. `closed` keeps why it was."""

    def __init__(self, name: str = "worker-2") -> None:
        self.peer = name
        self.closed: queue.Queue[str] = queue.Queue()

    def close(self, reason: str) -> None:
        self.closed.put(reason)


class Turns:
    """Keeps whose turn it was, in order."""

    def __init__(self, most_bytes: int | None = None, hosted_bytes: int = 0) -> None:
        self.outgoing: Any = Outgoing(lambda: hosted_bytes, most_bytes)
        self.went: list[str] = []

    def pull(self, reader: Any, num_bytes: int, name: str) -> None:
        self.outgoing.pull(reader, num_bytes, lambda: self.went.append(name))


def test_pulls_beyond_the_bound_in_all_wait_and_go_in_order() -> None:
    """They do not fail, and a small one does not slip past a large one: that one might wait for ever."""
    one, two, three = Reader(), Reader(), Reader()
    turns = Turns(most_bytes=100)
    turns.pull(one, 60, "a")
    turns.pull(two, 60, "b")
    turns.pull(three, 10, "c")
    assert turns.went == ["a"] and turns.outgoing.num_waiting == 2 and turns.outgoing.num_bytes == 60
    turns.outgoing.pulled(one, 60)
    assert turns.went == ["a", "b", "c"] and turns.outgoing.num_waiting == 0 and turns.outgoing.num_bytes == 70
    turns.outgoing.pulled(two, 60)
    turns.outgoing.pulled(three, 10)
    assert turns.outgoing.num_bytes == 0 and turns.outgoing.num_accounts == 0


def test_one_that_is_larger_than_the_bound_goes_alone() -> None:
    """A model larger than the bound would never be pulled."""
    one, two = Reader(), Reader()
    turns = Turns(most_bytes=100)
    turns.pull(one, 60, "small")
    turns.pull(two, 500, "large")
    assert turns.went == ["small"]
    turns.outgoing.pulled(one, 60)
    assert turns.went == ["small", "large"]


def test_commits_that_never_pause_do_not_starve_pulls() -> None:
    """Their slices count and do not wait. Were a pull to wait until they are all sent, it could wait for ever."""
    one, two, three = Reader(), Reader(), Reader()
    turns = Turns(most_bytes=100)
    turns.outgoing.hold(one, 200)
    turns.pull(two, 50, "first")
    turns.pull(three, 50, "second")
    assert turns.went == ["first"] and turns.outgoing.num_bytes == 250
    turns.outgoing.hold(one, -200)
    assert turns.went == ["first", "second"]


def test_a_connection_that_is_behind_holds_up_nobody() -> None:
    """One that reads slowly asks again and again: its own questions wait for each other, those of others do not."""
    slow, quick = Reader(), Reader()
    turns = Turns(most_bytes=1000)
    for number in range(5):
        turns.pull(slow, 10, f"slow {number}")
    turns.pull(quick, 10, "quick")
    assert turns.went == [f"slow {number}" for number in range(MOST_PULLS)] + ["quick"]
    turns.outgoing.pulled(slow, 10)
    assert turns.went[-1] == f"slow {MOST_PULLS}"
    assert turns.outgoing.outstanding(slow) == 40


def test_what_a_lost_connection_waited_for_is_dropped() -> None:
    """Nobody would read it; and what is counted for it would be room that others never get."""
    gone, other = Reader(), Reader()
    turns = Turns(most_bytes=100)
    turns.pull(gone, 90, "gone")
    turns.pull(gone, 90, "never")
    turns.pull(other, 90, "other")
    turns.outgoing.forget(gone)
    assert turns.outgoing.num_waiting == 1 and turns.outgoing.outstanding(gone) == 90
    turns.outgoing.pulled(gone, 90)  # the send failed
    assert turns.went == ["gone", "other"]
    turns.outgoing.pulled(other, 90)
    assert turns.outgoing.num_bytes == 0 and turns.outgoing.num_accounts == 0


@pytest.mark.parametrize("how", ["pulls", "commits", "both"])
def test_whoever_asks_and_does_not_read_is_cut_off_once_by_name(how: str) -> None:
    reader, hosted = Reader(), 100 * MIB
    turns = Turns(hosted_bytes=hosted)
    most = EACH_TIMES * hosted + EACH_BYTES
    for number in range(most // (32 * MIB) + 3):
        assert turns.outgoing.num_cut_off == ((number * 32 * MIB) > most)
        if how == "commits" or (how == "both" and number % 2):
            turns.outgoing.hold(reader, 32 * MIB)
        else:
            turns.pull(reader, 32 * MIB, "")
    assert reader.closed.get(timeout=SECONDS) == (
        "worker-2 has 480 MiB of answers outstanding, at most 464 MiB are allowed: it asks and does not read"
    )
    assert reader.closed.empty()


def test_a_window_of_commits_is_no_fault() -> None:
    """Where a worker may leave eight commits unanswered, all of them may be owed at once over a slow network."""
    reader, hosted = Reader(), 100 * MIB
    turns = Turns(hosted_bytes=hosted)
    turns.outgoing.window = 8
    for _ in range(9):
        turns.outgoing.hold(reader, hosted)
    turns.pull(reader, hosted, "a pull beside them")
    assert turns.outgoing.num_cut_off == 0 and reader.closed.empty()


def test_without_a_bound_of_its_own_everything_hosted_can_go_at_once() -> None:
    one, two, hosted = Reader(), Reader(), 3 << 30
    turns = Turns(hosted_bytes=hosted)
    turns.pull(one, hosted, "all")
    turns.pull(two, ALL_BYTES, "and some")
    turns.pull(two, 1, "no more")
    assert turns.went == ["all", "and some"] and turns.outgoing.num_waiting == 1


def test_any_order_of_events_ends_with_nothing_counted() -> None:
    """What is let go twice, or never, shifts the bounds for the rest of the job."""
    for seed in range(200):
        play(seed)


def play(seed: int) -> None:
    chance, readers = random.Random(seed), [Reader() for _ in range(4)]
    outgoing: Any = Outgoing(lambda: 10, 100)
    going: list[tuple[Reader, int]] = []
    held = dict.fromkeys(readers, 0)
    for _ in range(60):
        reader, num_bytes = chance.choice(readers), chance.randrange(0, 130)
        event = chance.choice(["pull", "pull", "pulled", "hold", "let go", "forget"])
        if event == "pull":
            outgoing.pull(reader, num_bytes, lambda item=(reader, num_bytes): going.append(item))
        elif event == "pulled" and going:
            outgoing.pulled(*going.pop(chance.randrange(len(going))))
        elif event == "hold":
            outgoing.hold(reader, num_bytes)
            held[reader] += num_bytes
        elif event == "let go":
            outgoing.hold(reader, -held[reader])
            held[reader] = 0
        elif event == "forget":
            outgoing.forget(reader)
        pulling = sum(item[1] for item in going)
        assert outgoing.num_bytes == pulling + sum(held.values()), seed
        assert pulling <= 100 or len([item for item in going if item[1]]) == 1, seed
        assert going or not outgoing.num_waiting, f"seed {seed}: somebody waits, and for nobody"
    for reader in readers:
        outgoing.hold(reader, -held[reader])
    while going:
        outgoing.pulled(*going.pop())
    assert (outgoing.num_bytes, outgoing.num_waiting, outgoing.num_accounts) == (0, 0, 0), seed


# -- with pulls that are real -----------------------------------------------------------------------------


class Slot:
    """A hosted slice, as far as a pull looks at it; counts how often it was copied."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.memory = np.full(num_bytes, number, np.uint8)
        self.part = types.SimpleNamespace(id=number, num_bytes=num_bytes)
        self.state: Any = types.SimpleNamespace(version=10 + number, seen={})
        self.num_copies = 0

    def copy_into(self, target: memoryview) -> int:
        self.num_copies += 1
        target[:] = buffer_of(self.memory)
        return int(self.state.version)


class Service:
    """Hands pulls on; whatever is wrong ends up in the test."""

    def __init__(self, pulls: Pulls) -> None:
        self._pulls = pulls
        self.ends: queue.Queue[str] = queue.Queue()

    def buffers_for(self, peer: Peer, message: Any, payload_bytes: int) -> list[memoryview]:
        raise AssertionError

    def handle(self, request: Request) -> None:
        if isinstance(request.message, Pull):
            self._pulls.pull(request, request.message)
        else:
            request.reply(Done())

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self._pulls.forget(endpoint)
        self.ends.put(reason)


class Hosting:
    """Pulls of three slices, and workers' endpoints in the same process; a worker's landing may be made to wait."""

    def __init__(self, num_bytes: int, most_bytes: int | None) -> None:
        self.slots: dict[int, Any] = {number: Slot(number, num_bytes) for number in range(3)}
        self.senders = ThreadPoolExecutor(max_workers=16, thread_name_prefix="send")
        self.pulls = Pulls(self.slots, InlinePool(), self.senders, most_bytes)
        self.service = Service(self.pulls)
        self._made: list[Endpoint] = []

    def worker(self, name: str) -> Endpoint:
        near, far = memory.pair(Peer("worker", name, 0), Peer("server", "server-0", 0))
        self._made += [Endpoint(far, Stamp("job-1"), self.service), Endpoint(near, Stamp("job-1"))]
        return self._made[-1]

    def close(self) -> None:
        for endpoint in self._made:
            endpoint.close()
        self.senders.shutdown()


@pytest.fixture
def hosting() -> Iterator[Callable[..., Hosting]]:
    made: list[Hosting] = []

    def make(num_bytes: int, most_bytes: int | None = None) -> Hosting:
        made.append(Hosting(num_bytes, most_bytes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_pulls_that_wait_are_not_copied_and_all_are_answered(hosting: Callable[..., Hosting]) -> None:
    """Ten workers pull at once and do not read yet. The copies that lie in memory are those of the bound."""
    there, go = hosting(1000, most_bytes=3000), threading.Event()
    calls = []
    targets = [bytearray(1000) for _ in range(10)]
    for k, target in enumerate(targets):

        def buffers_for(message: Any, target: bytearray = target) -> list[memoryview]:
            assert go.wait(SECONDS)
            return [memoryview(target)]

        calls.append(there.worker(f"worker-{k}").call(Pull([1], None, True), into=buffers_for))
    assert there.pulls.outgoing.num_waiting == 7 and there.pulls.outgoing.num_bytes == 3000
    assert there.slots[1].num_copies <= 3
    go.set()
    assert [call.wait(SECONDS) for call in calls] == [Pulled([11])] * 10
    assert all(target == bytes([1]) * 1000 for target in targets)
    there.senders.shutdown()  # whoever has sent counts it after that
    assert there.pulls.outgoing.num_bytes == there.pulls.outgoing.num_waiting == 0
    assert there.pulls.outgoing.num_accounts == 0


def test_a_pull_that_cannot_be_copied_gives_its_room_back(hosting: Callable[..., Hosting]) -> None:
    there = hosting(1000, most_bytes=1000)
    there.slots[0].copy_into = None
    worker = there.worker("worker-0")
    for _ in range(3):
        with pytest.raises(Exception, match="TypeError"):
            worker.call(Pull([0], None, True)).wait(SECONDS)
    assert worker.call(Pull([1], None, True), into=[memoryview(bytearray(1000))]).wait(SECONDS) == Pulled([11])


def test_a_pull_of_nothing_is_answered(hosting: Callable[..., Hosting]) -> None:
    assert hosting(1000, most_bytes=10).worker("worker-0").call(Pull([], None, True)).wait(SECONDS) == Pulled([])


def test_a_pull_that_names_a_slice_again_and_again_is_not_copied(hosting: Callable[..., Hosting]) -> None:
    """A small question with an answer larger than memory. Alone it would be let through, whatever its size."""
    there = hosting(MIB)
    call = there.worker("worker-2").call(Pull([0] * 100, None, True))
    assert "worker-2 has 100 MiB of answers outstanding" in there.service.ends.get(timeout=SECONDS)
    assert call.arrives(SECONDS)
    assert there.slots[0].num_copies == 0 and there.pulls.outgoing.num_accounts == 0


def test_a_worker_that_asks_and_does_not_read_is_cut_off(hosting: Callable[..., Hosting]) -> None:
    """And only that one: another goes on as before."""
    there, go = hosting(16 * MIB), threading.Event()
    deaf, other = there.worker("worker-2"), there.worker("worker-1")

    def buffers_for(message: Any) -> list[memoryview]:
        assert go.wait(SECONDS)
        return [memoryview(bytearray(16 * MIB))]

    allowed = (EACH_TIMES * 3 * 16 * MIB + EACH_BYTES) // (16 * MIB)
    calls = [deaf.call(Pull([0], None, True), into=buffers_for) for _ in range(allowed)]
    assert there.service.ends.empty() and there.pulls.outgoing.num_cut_off == 0
    calls.append(deaf.call(Pull([0], None, True), into=buffers_for))
    assert "worker-2 has 272 MiB of answers outstanding" in there.service.ends.get(timeout=SECONDS)
    target = bytearray(16 * MIB)
    assert other.call(Pull([1], None, True), into=[memoryview(target)]).wait(SECONDS) == Pulled([11])
    go.set()
    for call in calls:
        assert call.arrives(SECONDS)
    there.senders.shutdown()
    assert there.pulls.outgoing.num_bytes == there.pulls.outgoing.num_waiting == 0
    # Each of those that were being sent may have begun the next one before it heard of the end.
    assert there.slots[0].num_copies <= 2 * MOST_PULLS, "what it cannot be sent need not be copied"
