"""Slices that a follower reads, as they were at the cut, at their primaries and at backups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.server.conftest import WAIT, House, eventually
from tests.server.snapshots import close_gates, mark

from syncline.core.wire.checkpoints import CloseSnapshotBarrier, OpenSnapshotBarrier
from syncline.core.wire.following import EndCut, GivenSlices, MarkCut, MarkedCut, ReadCut
from syncline.errors import ProtocolError, StoreError
from syncline.net.rpc import Stamp
from syncline.net.transport import Peer, buffer_of

MakeHouse = Callable[..., House]


def x(value: float = 1.0) -> dict[str, Any]:
    return {"x": np.full(48, value, np.float32)}


def made(make_house: MakeHouse, **settings: Any) -> House:
    house = make_house(2, 1, policy="async", **settings)
    house.register(x(0.0))
    return house


def push(house: House, clock: int) -> None:
    for call in house.workers["worker-0"].commit_all(clock, x()):
        call.wait(WAIT)


def close(house: House, number: int) -> None:
    message = CloseSnapshotBarrier(number, is_save=False)
    for call in [house.tell(name, message) for name in house.servers]:
        call.wait(WAIT)


def cut(house: House, number: int, server: str, slices: list[int], *, has_barrier: bool = True) -> MarkedCut:
    answer = house.tell(server, MarkCut(number, slices, has_barrier)).wait(WAIT)
    assert isinstance(answer, MarkedCut)
    return answer


def open_again(house: House, number: int) -> None:
    for name in house.servers:
        house.tell(name, OpenSnapshotBarrier(number))


def read(house: House, server: str, number: int, slices: list[int]) -> dict[int, set[float]]:
    """The values of each slice."""
    found: dict[int, np.ndarray[Any, Any]] = {}
    sizes = {part.id: part.num_bytes for part in house.registry.layout.slices()}

    def room(message: Any) -> list[Any]:
        assert isinstance(message, GivenSlices)
        found.update({one: np.zeros(sizes[one], np.uint8) for one in message.slices})
        return [buffer_of(found[one]) for one in message.slices]

    endpoint = house.connect(Peer("follower", "f", 0), Peer("server", server, 0), Stamp("job"), server)
    try:
        endpoint.call(ReadCut(number, slices), into=room, on_part=lambda part: None).wait(WAIT)
    finally:
        endpoint.close()
    return {one: set(data.view(np.float32).tolist()) for one, data in found.items()}


def mine(house: House, server: str) -> list[int]:
    return [part.id for part in house.parts(server)]


def test_updates_after_the_cut_do_not_show(make_house: MakeHouse) -> None:
    house = made(make_house)
    push(house, 1)
    close(house, 1)
    answers = {name: cut(house, 1, name, mine(house, name)) for name in house.servers}
    assert all(answer.versions == [1] * len(answer.versions) for answer in answers.values())
    assert {number for answer in answers.values() for number, _ in answer.primaries} == set(house.replica_sets)
    open_again(house, 1)
    push(house, 2)
    push(house, 3)
    for name in house.servers:
        assert read(house, name, 1, mine(house, name)) == {number: {-1.0} for number in mine(house, name)}
    assert np.unique(house.value("x")).tolist() == [-3.0]
    house.tell("server-0", EndCut(1))
    with pytest.raises(StoreError, match="of this cut is gone"):
        read(house, "server-1", 1, mine(house, "server-1"))


def test_what_does_not_change_is_not_copied_until_it_is_read(make_house: MakeHouse) -> None:
    house = made(make_house)
    close(house, 1)
    numbers = mine(house, "server-0")
    cut(house, 1, "server-0", numbers)
    open_again(house, 1)
    assert [n for n in numbers if house.slot("server-0", n).rules.is_marked] == numbers
    assert read(house, "server-0", 1, numbers) == {number: {0.0} for number in numbers}
    assert not any(house.slot("server-0", n).rules.is_marked for n in numbers)


def test_backups_are_read_without_a_barrier_of_their_own(make_house: MakeHouse) -> None:
    house = made(make_house, replicas=2)
    house.seed("server-0", "server-1")
    push(house, 1)
    close(house, 1)
    numbers = mine(house, "server-0")
    assert cut(house, 1, "server-1", numbers, has_barrier=False) == MarkedCut([1] * len(numbers))
    open_again(house, 1)
    push(house, 2)
    assert read(house, "server-1", 1, numbers) == {number: {-1.0} for number in numbers}


def test_a_save_and_two_cuts_at_once(make_house: MakeHouse) -> None:
    """Each keeps what it marked. What commits were held for the cuts is counted; a save is none."""
    house = made(make_house)
    numbers = mine(house, "server-0")
    close_gates(house.tell, list(house.servers), 1)
    mark(house.tell, list(house.servers), 1)
    saved = house.servers["server-0"].saving.snapshot
    assert saved is not None
    for number, clock in ((2, 1), (3, 2)):
        close(house, number)
        cut(house, number, "server-0", numbers)
        open_again(house, number)
        push(house, clock)
    assert read(house, "server-0", 2, numbers) == {number: {0.0} for number in numbers}
    assert read(house, "server-0", 3, numbers) == {number: {-1.0} for number in numbers}
    assert all(one.kept is not None and not one.kept.any() for one in saved.slices)
    eventually(lambda: house.servers["server-0"].stats().num_cuts == 2)
    stats = house.servers["server-0"].stats()
    assert 0 < stats.cut_seconds_max <= stats.cut_seconds <= 2 * stats.cut_seconds_max


def test_what_is_not_read_is_dropped(make_house: MakeHouse) -> None:
    """When the follower or the coordinator says so; else after a while, or when there are too many cuts."""
    house = made(make_house)
    numbers = mine(house, "server-0")
    for number in range(1, 7):
        close(house, number)
        cut(house, number, "server-0", numbers)
        open_again(house, number)
    with pytest.raises(ProtocolError, match="cut 2 is not here"):
        read(house, "server-0", 2, numbers)
    for number in range(3, 7):
        house.tell("server-0", EndCut(number))
    eventually(lambda: not any(house.slot("server-0", n).rules.is_marked for n in numbers))


def test_a_barrier_that_has_opened_marks_nothing(make_house: MakeHouse) -> None:
    house = made(make_house)
    close(house, 1)
    open_again(house, 1)
    with pytest.raises(ProtocolError, match="the snapshot barrier of cut 1 is no longer closed"):
        cut(house, 1, "server-0", mine(house, "server-0"))
    # The word that it is over may be handled before the thread that closes it.
    with pytest.raises(ProtocolError, match="save 1 is over"):
        house.tell("server-0", CloseSnapshotBarrier(1)).wait(WAIT)
    push(house, 1)


def test_a_barrier_opens_by_itself(make_house: MakeHouse) -> None:
    """The coordinator dies after it has closed the barrier for a cut: commits go on, and nothing is marked later."""
    house = made(make_house)
    for name in house.servers:
        house.servers[name].snapshot_barrier().barrier_seconds = 10 * WAIT  # that of saves
        house.tell(name, CloseSnapshotBarrier(1, is_save=False, seconds=0.01)).wait(WAIT)
    push(house, 1)
    with pytest.raises(ProtocolError, match="the snapshot barrier of cut 1 is no longer closed"):
        cut(house, 1, "server-0", mine(house, "server-0"))


def test_slices_that_are_not_marked_in_time_hold_no_commit(make_house: MakeHouse) -> None:
    """The cut is given up, and no mark is left of it."""
    house = made(make_house)
    close(house, 1)
    numbers = mine(house, "server-0")
    slot = house.slot("server-0", numbers[-1])
    with slot.lock, pytest.raises(StoreError, match="is being updated"):
        cut(house, 1, "server-0", numbers)
    assert not any(house.slot("server-0", n).rules.is_marked for n in numbers)
    open_again(house, 1)
    push(house, 1)


def test_a_cut_leaves_gathered_pushes_alone(make_house: MakeHouse) -> None:
    """A save applies them first. A cut every two seconds must not change the training."""
    house = make_house(1, 2, policy="async:gather=2")
    house.register(x(0.0))
    push(house, 1)
    close(house, 1)
    cut(house, 1, "server-0", mine(house, "server-0"))
    open_again(house, 1)
    assert np.unique(house.value("x")).tolist() == [0.0]
