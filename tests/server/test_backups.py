"""Backups under way: a connection that breaks with an update in it, a tail behind a seed, fences."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.test_replication import X, check_equal, ones, step

from syncline.core.ring import Ballot
from syncline.core.wire.traffic import Committed, Replicate, Seed
from syncline.server import backups

from .conftest import WAIT, House, Waiting, eventually

MakeHouse = Callable[..., House]


def both_ways(house: House, **rule: Any) -> None:
    house.register(X, "SGD", lr=1.0, **rule)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")


def test_an_update_that_was_under_way_when_the_connection_broke_is_not_acknowledged_by_that(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether the backup has it: it is said again as soon as there is a way to say it."""
    house = make_house(2, 1, replicas=2)
    both_ways(house, momentum=0.5)
    step(house, 1)
    backups = house.servers["server-1"].hosting.backups
    go, take = threading.Event(), backups.take_update
    monkeypatch.setattr(backups, "take_update", lambda *given: go.wait(WAIT) and take(*given))
    numbers = [part.id for part in house.parts("server-0")]
    # Beside the test: here whoever sends an update takes it in, too.
    step_2 = Waiting(lambda: house.workers["worker-0"].commit("server-0", 2, ones()).wait(WAIT))
    eventually(lambda: house.slot("server-0", numbers[0]).in_flight is not None)
    house.refuses_dials = True
    for endpoint in house.between:
        endpoint.close("cut")
    time.sleep(0.2)
    assert step_2.is_alive()
    assert all(house.slot("server-0", number).state.version == 1 for number in numbers)
    house.refuses_dials = False
    time.sleep(0.1)
    assert step_2.is_alive()
    go.set()
    assert isinstance(step_2.result(), Committed)
    house.workers["worker-0"].commit("server-1", 2, ones()).wait(WAIT)
    check_equal(house)
    assert (house.value("x") == -2.5).all()


def test_what_was_applied_while_a_slice_was_seeded_is_not_seeded_once_more(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the seed, update by update: nobody has to find out by versions that it is missing."""
    house = make_house(2, 1, replicas=2)
    house.register(X, "SGD", lr=1.0, momentum=0.5)
    backups = house.servers["server-1"].hosting.backups
    go, take, seeds = threading.Event(), backups.take_seed, []
    monkeypatch.setattr(backups, "take_seed", lambda *given: seeds.append(go.wait(WAIT)) or take(*given))
    numbers = [part.id for part in house.parts("server-0")]
    seeding = Waiting(lambda: house.seed("server-0", "server-1", numbers))
    eventually(lambda: house.slot("server-0", numbers[0]).replicas)
    for clock in (1, 2, 3):
        step(house, clock)
    go.set()
    seeding.result()
    step(house, 4)
    assert len(seeds) == len(numbers) and not [line for line in house.lines if "refused an update" in line]


def test_a_fence_is_on_the_backup_when_the_generation_is_installed(make_house: MakeHouse) -> None:
    house = make_house(2, 2, replicas=2)
    both_ways(house)
    step(house, 1)
    house.fence("worker-1")
    check_equal(house)
    fenced = [
        house.slot(replica_set.backups[0], number).state.fences for number, replica_set in house.replica_sets.items()
    ]
    assert all(set(fences) == {"worker-1"} for fences in fenced)


HELD = Replicate(0, 7, [("worker-0", 1, 5), ("worker-1", 1, 5)], [], [0], [], 1.0, ballot=Ballot(1, "worker-0", 1, 5))


@pytest.mark.parametrize(
    ("message", "goes"),
    [
        (Replicate(0, 7, [], [("worker-2", 1)], [], [], 1.0), True),  # a fence; the round is applied nowhere yet
        (Replicate(0, 8, [], [("worker-2", 1)], [], [], 1.0), False),  # the primary has applied the round
        (Replicate(0, 7, [("worker-0", 1, 6)], [], [0], [], 1.0), False),  # an update
        (Replicate(0, 7, [("worker-0", 1, 6)], [], [], [], 1.0), False),  # one that only advances clocks
        (Replicate(0, 7, [], [], [], [], 1.0, ballot=Ballot(1, "worker-0", 1, 6)), False),  # the next round
        (Seed(0, 7, [("worker-0", 1, 4), ("worker-1", 1, 4)], [], [], None), False),  # it may be an old one
    ],
)
def test_what_goes_before_a_round_that_is_held(message: Replicate | Seed, goes: bool) -> None:
    """In a ring: what the primary has sent before it came to that round."""
    assert backups.goes_before(HELD, message) is goes
