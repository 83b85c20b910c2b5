"""Moves at a server: primaries change, and everybody makes again what is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.test_generations import by_slice, two_of, x, zeros

from syncline.core.replica_sets import ReplicaSet
from syncline.core.wire.traffic import CommitStaged, GiveClip, Pull, Pulled, Rest
from syncline.errors import Refresh

from .conftest import WAIT, House

MakeHouse = Callable[..., House]


# -- promotion --------------------------------------------------------------------------------------------


def replicated(house: House) -> None:
    house.register(zeros())
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")


@pytest.mark.parametrize("whole_on", ["both", "server-0", "server-1", "none"])
def test_a_promotion_in_the_middle_of_a_round_applies_it_on_exactly_the_slices_that_lack_it(
    make_house: MakeHouse, whole_on: str
) -> None:
    house = make_house(2, 2, replicas=2)
    replicated(house)
    one, two = two_of(house)
    for call in [*one.commit_all(1, x(1)), *two.commit_all(1, x(10))]:
        call.wait(WAIT)
    waiting = [(one, call) for call in one.commit_all(2, x(100))]
    for server in house.servers:
        if whole_on in (server, "both"):
            two.commit(server, 2, x(1000)).wait(WAIT)
        else:
            two.stage(server, 2, x(1000)).wait(WAIT)
    house.kill("server-0")
    house.promote()
    for _, call in waiting:
        with contextlib.suppress(Refresh, ConnectionError):
            call.wait(WAIT)
    assert set(house.replica_sets.values()) == {ReplicaSet(n, "server-1") for n in house.replica_sets}
    for clock, (first, second) in ((2, (100, 1000)), (3, (5, 7))):
        for call in [*one.commit_all(clock, x(first)), *two.commit_all(clock, x(second))]:
            call.wait(WAIT)
    assert set(by_slice(house).values()) == {-(11.0 + 1100.0 + 12.0)}


def test_with_a_move_whoever_is_behind_is_told_to_look_and_its_connection_lives_on(make_house: MakeHouse) -> None:
    house = make_house(2, 2, replicas=2)
    replicated(house)
    one, two = two_of(house)
    parked = one.commit("server-1", 1, x(1))
    staged = two.stage("server-1", 1, x(1))
    staged.wait(WAIT)
    numbers = [part.id for part in house.parts("server-0")]
    house.carry_out(replica_sets=[ReplicaSet(number, "server-1", ("server-0",)) for number in numbers], moves=True)
    with pytest.raises(Refresh, match="generation 4"):
        parked.wait(WAIT)
    one.stamp.generation = two.stamp.generation = 3
    for message in (Pull([0], None, False), Rest(0, False), CommitStaged(1, []), GiveClip(1, 1.0, [])):
        with pytest.raises(Refresh, match="generation 4"):
            one.ask("server-1", message).wait(WAIT)
    with pytest.raises(Refresh, match="generation 4"):
        one.commit("server-0", 1, x(1)).wait(WAIT)  # of whose slices none is here any more
    with pytest.raises(Refresh, match="generation 4"):
        two.commit("server-1", 1, x(1)).wait(WAIT)
    assert one.endpoints["server-0"].is_open and two.endpoints["server-1"].is_open
    one.stamp.generation = two.stamp.generation = 4
    for call in [one.commit("server-1", 1, x(1)), two.commit("server-1", 1, x(10))]:
        call.wait(WAIT)
    assert set(by_slice(house).values()) == {-11.0}


def test_bytes_for_slices_that_have_gone_are_read_and_refused(make_house: MakeHouse) -> None:
    """The worker does not know of the move yet: what it stages is of the size that the layout says."""
    house = make_house(2, 1, replicas=2)
    replicated(house)
    (worker,) = house.workers.values()
    before = dict(house.replica_sets)
    numbers = [part.id for part in house.parts("server-0")]
    house.carry_out(replica_sets=[ReplicaSet(number, "server-1", ("server-0",)) for number in numbers], moves=True)
    now = dict(house.replica_sets)
    house.replica_sets.update(before)
    worker.stamp.generation = 3
    with pytest.raises(Refresh):
        worker.stage("server-0", 1, x(1)).wait(WAIT)
    house.replica_sets.update(now)
    worker.stamp.generation = 4
    assert worker.endpoints["server-0"].is_open
    worker.commit("server-1", 1, x(1)).wait(WAIT)
    assert set(by_slice(house).values()) == {-1.0}


def test_a_pull_that_waits_for_a_version_is_told_to_look(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2)
    replicated(house)
    (worker,) = house.workers.values()
    number = house.parts("server-0")[0].id
    call = worker.ask("server-0", Pull([number], 1, False))
    house.carry_out(replica_sets=[ReplicaSet(number, "server-1", ("server-0",))], moves=True)
    with pytest.raises(Refresh):
        call.wait(WAIT)
    assert worker.ask("server-1", Pull([number], None, False)).wait(WAIT) == Pulled([0])


def test_a_server_that_comes_late_gets_slices_and_takes_part(make_house: MakeHouse) -> None:
    house = make_house(1, 2, replicas=2)
    segment = house.register(zeros())
    one, two = two_of(house)
    for clock in (1, 2, 3):
        for call in [*one.commit_all(clock, x(1)), *two.commit_all(clock, x(10))]:
            call.wait(WAIT)
    member = house.member("server", 1)
    house.members.append(member)
    house.start(member, late=True)
    house.sync_replica_sets(segment)
    house.seed("server-0", "server-1")
    house.carry_out(replica_sets=[ReplicaSet(0, "server-1", ("server-0",))], moves=True)
    for clock in (4, 5):
        for call in [*one.commit_all(clock, x(1)), *two.commit_all(clock, x(10))]:
            call.wait(WAIT)
    assert by_slice(house) == {0: -55.0, 1: -55.0, 2: -55.0}


@pytest.mark.parametrize("bytes_wanted", [True, False])
def test_a_pull_in_the_moment_in_which_its_slice_goes_is_to_look_again(
    make_house: MakeHouse, bytes_wanted: bool
) -> None:
    """At the first move of a server it was told that there is no such slice: its script ended by that."""
    house = make_house(2, 2)
    house.register(zeros())
    mine = [part.id for part in house.parts("server-0")]
    house.seed("server-0", "server-1")
    hosting, (worker, _) = house.servers["server-0"].hosting, two_of(house)
    calls, take_replica_sets = [], hosting.take_replica_sets

    def take_and_be_asked(*arguments: Any) -> Any:
        taken = take_replica_sets(*arguments)
        calls.append(worker.ask("server-0", Pull(mine, None, bytes_wanted)))
        return taken

    hosting.take_replica_sets = take_and_be_asked
    house.carry_out(replica_sets=[ReplicaSet(number, "server-1") for number in mine], moves=True)
    with pytest.raises(Refresh):
        calls[0].wait(WAIT)
