"""Where workers' bytes wait at a server, with threads that come and add up at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from syncline.core.layout import Slice
from syncline.net.transport import Memory
from syncline.server.staging import Staging

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
