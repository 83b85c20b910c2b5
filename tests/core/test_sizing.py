"""As many workers as pay: played against machines of known speed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from syncline.core.sizing import AGAIN_SECONDS, Sizing, SizingDecision


class Machine:
    """So many samples a second with so many workers; a worker that is started needs a while to be at work."""

    def __init__(self, rate: Callable[[int], float], least: int = 1, most: int = 8) -> None:
        self.rate, self.sizing, self.start_seconds = rate, Sizing(least, most), 2.0
        self.wanted = self.at_work = least
        self.now = self.samples = self.changed = 0.0
        self.said: list[SizingDecision] = []

    def run(self, seconds: float) -> Machine:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.05
            if self.now - self.changed >= self.start_seconds or self.wanted < self.at_work:
                self.at_work = self.wanted
            self.samples += 0.05 * self.rate(self.at_work)
            found = self.sizing.look(self.now, self.wanted, self.at_work, int(self.samples), 0.25)
            if found is not None:
                self.said.append(found)
                self.wanted, self.changed = found.count, self.now
        return self


def cores(count: int) -> Callable[[int], float]:
    """Each worker keeps one core busy; more of them only get in each other's way."""
    return lambda workers: 1000.0 * min(workers, count) * (1.0 if workers <= count else 0.97)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_it_settles_at_the_number_of_cores_and_says_why(count: int) -> None:
    machine = Machine(cores(count)).run(120)
    assert machine.wanted == count
    assert [one.count for one in machine.said] == [*range(2, count + 2), count]
    assert "one more adds" in machine.said[-1].reason and "would pay" in machine.said[-1].reason
    assert "wait 25% of their time" in machine.said[-1].reason


def test_never_more_than_the_most_nor_fewer_than_the_least() -> None:
    assert Machine(cores(16), 2, 4).run(300).wanted == 4
    assert Machine(cores(1), 3, 8).run(300).wanted == 3


def test_it_stays_where_it_is_for_long_and_then_tries_again() -> None:
    machine = Machine(cores(2)).run(100)
    decisions = len(machine.said)
    machine.run(AGAIN_SECONDS / 2)
    assert len(machine.said) == decisions
    machine.rate = cores(4)  # somebody else's job has ended
    machine.run(AGAIN_SECONDS)
    assert machine.wanted == 4


def test_what_is_said_by_hand_begins_a_new_count() -> None:
    machine = Machine(cores(8)).run(8)
    machine.wanted, machine.changed = 5, machine.now
    machine.run(60)
    assert machine.wanted == 8


def test_nothing_is_decided_while_nobody_works() -> None:
    assert not Machine(lambda workers: 0.0).run(100).said
