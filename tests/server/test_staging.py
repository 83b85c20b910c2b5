"""Where workers' bytes wait at a server, with threads that come and add up at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from syncline.core.layout import Segment, Slice, to_ranges
from syncline.core.wire.traffic import Attach, Committed, Stage
from syncline.errors import ProtocolError
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Call
from syncline.net.transport import Memory
from syncline.server.staging import Staging

from .conftest import WAIT, House

NUM_SLICES = 400


class Arena(Memory):
    """As if a worker had shared it."""

    def __init__(self, value: int) -> None:
        self.array = np.full(8 * NUM_SLICES, value, np.uint8)

    def close(self) -> None:
        pass


def part(number: int) -> Slice:
    return Slice(number, 0, "uint8", 8 * number, 8)


@pytest.fixture
def turns() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_arenas_come_and_workers_go_while_others_bytes_are_added_up(turns: None) -> None:
    """What was an error of a thread once, "dictionary changed size during iteration", and a round that hung."""
    staging, errors, is_over = Staging(), [], threading.Event()
    staging.attach(("worker-0", 1), 0, 0, Arena(7))

    def come_and_go() -> None:
        try:
            while not is_over.is_set():
                staging.attach(("worker-1", 1), 0, 0, Arena(1))
                staging.forget_worker(("worker-2", 1))
                staging.keep_only(range(NUM_SLICES))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(4):
            for number in range(NUM_SLICES):
                assert staging.tensor(("worker-0", 1), 0, part(number)).sum() == 8 * 7
                staging.buffer(("worker-0", 1), 0, part(number))
            staging.forget_worker(("worker-0", 1))
            staging.attach(("worker-0", 1), 0, 0, Arena(7))
    finally:
        is_over.set()
        thread.join()
    assert not errors


def test_an_arena_brought_again_is_read_in_the_place_of_the_one_before() -> None:
    staging = Staging()
    staging.attach(("worker-0", 1), 0, 0, Arena(7))
    assert staging.tensor(("worker-0", 1), 0, part(3)).tolist() == [7] * 8
    staging.attach(("worker-0", 1), 0, 0, Arena(9))
    assert staging.tensor(("worker-0", 1), 0, part(3)).tolist() == [9] * 8


# -- whether all of a push is here --------------------------------------------------------------------------


class Sharing:
    """One worker, whose arenas the server reads in place where they are attached."""

    def __init__(self, house: House) -> None:
        self.house, self.clock = house, 0
        (self.worker,) = house.workers.values()

    def attach(self, segment: Segment) -> HeapMemory:
        arena = HeapMemory(segment.num_bytes)
        arena.array[:] = 0
        message = Attach(segment.index, 0, segment.num_bytes)
        self.worker.ask("server-0", message, attachment=arena).wait(WAIT)
        return arena

    def push(self, *names: str) -> Call:
        """A commit without any bytes."""
        self.clock += 1
        message = Stage(
            clock=self.clock, phase=0, slot=0, pushed=to_ranges(self.house.id_of(name) for name in names), weight=1.0,
            skip=False, clip_norm=None, overrides=[], slices=[], back_at=None, commit=True, pull=[],
        )  # fmt: skip
        return self.worker.ask("server-0", message)


def test_a_push_lacks_bytes_where_its_segment_is_not_shared(make_house: Callable[..., House]) -> None:
    """Also of a segment that came after commits."""
    house = make_house(1, 1)
    sharing = Sharing(house)
    one = house.register({"a": np.zeros(64, np.float32)})
    sharing.attach(one).array.view(np.float32)[:] = 2.0
    assert isinstance(sharing.push("a").wait(WAIT), Committed)
    house.register({"b": np.zeros(64, np.float32)})
    assert isinstance(sharing.push("a").wait(WAIT), Committed), "what is not pushed may be missing"
    with pytest.raises(ProtocolError, match="commits slice 4, whose bytes it has not staged"):
        sharing.push("a", "b").wait(WAIT)
    assert set(house.value("a").tolist()) == {-4.0} and set(house.value("b").tolist()) == {0.0}


def test_slices_of_one_arena_are_not_looked_at_one_by_one(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small push of a large model would take longer for each of its slices."""
    house = make_house(1, 1)
    sharing = Sharing(house)
    segment = house.register({"a": np.zeros(16, np.float32), "rest": np.zeros(64 * 16, np.float32)})
    assert len(segment.slices) > 64
    sharing.attach(segment)
    looks: list[int] = []
    is_shared = Staging.is_shared

    def counted(staging: Staging, *what: Any) -> bool:
        looks.append(1)
        return is_shared(staging, *what)

    monkeypatch.setattr(Staging, "is_shared", counted)
    assert isinstance(sharing.push("a").wait(WAIT), Committed)
    assert len(looks) == 1
