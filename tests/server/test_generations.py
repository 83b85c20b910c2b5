"""Generations at servers: prepared, held, installed; what of a dead worker counts, and what a promotion applies.

Integer gradients with learning rate 1: every sum is exact, on every slice.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline.core.slice_state import life_of
from syncline.core.wire.control import Install, Leave, Prepare
from syncline.core.wire.traffic import Attach, Committed, Pull, Rest
from syncline.errors import FencedError, ProtocolError
from syncline.net.memory import HeapMemory

from .conftest import WAIT, House, Worker, eventually

MakeHouse = Callable[..., House]


def x(value: float = 1.0) -> dict[str, Any]:
    return {"x": np.full(48, value, np.float32)}


def zeros() -> dict[str, Any]:
    return x(0.0)


def two_of(house: House) -> tuple[Worker, Worker]:
    return house.workers["worker-0"], house.workers["worker-1"]


def by_slice(house: House) -> dict[int, float]:
    """What each slice has come to; it is the same everywhere within one."""
    found = {}
    for number, replica_set in house.replica_sets.items():
        values = house.slot(replica_set.primary, number).memory.view(np.float32)
        assert (values == values[0]).all()
        found[number] = float(values[0])
    return found


# -- the hold ---------------------------------------------------------------------------------------------


def test_a_prepared_server_holds_every_commit_until_the_install(make_house: MakeHouse) -> None:
    house = make_house(1, 1)
    house.register(zeros())
    (worker,) = house.workers.values()
    change = house.change()
    house.prepare(change)
    call, rest = worker.commit("server-0", 1, x()), worker.ask("server-0", Rest(0, False))
    assert not call.arrives(0.05) and not rest.arrives(0.0)
    assert by_slice(house) == {0: 0.0, 1: 0.0, 2: 0.0}
    house.install(change)
    assert isinstance(call.wait(WAIT), Committed)
    rest.wait(WAIT)
    assert by_slice(house) == {0: -1.0, 1: -1.0, 2: -1.0}


def test_a_hold_ends_by_itself_and_its_install_is_refused(make_house: MakeHouse) -> None:
    house = make_house(1, 2, hold_seconds=0.15)
    house.register(zeros())
    one, two = two_of(house)
    change = house.change(fenced={"worker-1": two.incarnation})
    house.prepare(change)
    call = one.commit("server-0", 1, x())
    two_call = two.commit("server-0", 1, x())
    with pytest.raises(FencedError):
        two_call.wait(WAIT)
    eventually(lambda: not house.servers["server-0"].commits.admission_queue.is_on)
    assert not call.arrives(0.1), "the round waits for who is not settled"
    house.holds("server-0")
    with pytest.raises(ProtocolError, match="generation 2 was superseded"):
        house.install(change)
    with pytest.raises(FencedError):
        two.commit("server-0", 1, x()).wait(WAIT)  # the fences stay
    house.carry_out(fenced={"worker-1": two.incarnation})
    call.wait(WAIT)
    assert set(by_slice(house).values()) == {-1.0}


def test_while_it_prepares_whole_rounds_are_finished_first(make_house: MakeHouse) -> None:
    """A pinned slice keeps a round from ending: the answer waits for it."""
    house = make_house(1, 1)
    house.register(zeros())
    (worker,) = house.workers.values()
    slot = house.slot("server-0", 1)
    slot.pin()
    call = worker.commit("server-0", 1, x())
    change = house.change()
    prepared = house.tell("server-0", change.prepare())
    assert not prepared.arrives(0.1) and not call.arrives(0.0)
    slot.unpin()
    slot.drain()
    answer = prepared.wait(WAIT)
    assert [(s.name, s.clock) for s in answer.standings] == [("worker-0", 1)]
    call.wait(WAIT)


def test_prepare_and_install_may_be_said_again_and_a_higher_one_takes_the_place(make_house: MakeHouse) -> None:
    house = make_house(1, 2)
    house.register(zeros())
    one, two = two_of(house)
    call = one.commit("server-0", 1, x())
    first = house.change(fenced={"worker-1": two.incarnation})
    house.prepare(first)
    house.prepare(first)
    second = house.change(fenced={"worker-1": two.incarnation})
    house.prepare(second)
    with pytest.raises(ProtocolError, match="generation 2 was superseded"):
        house.install(first)
    with pytest.raises(ProtocolError, match="is asked to prepare generation 2"):
        house.tell("server-0", Prepare(2, [], [], False)).wait(WAIT)
    house.install(second)
    house.install(second)
    call.wait(WAIT)
    for generation in (1, 2, 3):
        with pytest.raises(ProtocolError, match=f"prepare generation {generation}"):
            house.tell("server-0", Prepare(generation, [], [], False)).wait(WAIT)
    with pytest.raises(ProtocolError, match="generation 9 was superseded"):
        house.tell("server-0", Install(9, [], [], [])).wait(WAIT)
    one.commit("server-0", 2, x()).wait(WAIT)
    assert set(by_slice(house).values()) == {-2.0}


# -- what of a dead worker counts -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_step_that_any_server_has_committed_counts_on_all(make_house: MakeHouse, policy: str) -> None:
    house = make_house(2, 2, policy=policy)
    house.register(zeros())
    one, two = two_of(house)
    for server in house.servers:
        two.stage(server, 1, x(10)).wait(WAIT)
    two.commit_staged("server-0", 1)
    calls = one.commit_all(1, x(1)) if policy == "sync" else []
    house.fence("worker-1")
    for call in calls:
        call.wait(WAIT)
    assert set(by_slice(house).values()) == {-11.0 if policy == "sync" else -10.0}
    for state in [house.slot(replica_set.primary, n).state for n, replica_set in house.replica_sets.items()]:
        assert state.fences == {"worker-1": two.incarnation} and state.clocks["worker-1", two.incarnation] == 1


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_step_that_no_server_has_committed_counts_nowhere(make_house: MakeHouse, policy: str) -> None:
    house = make_house(2, 2, policy=policy)
    house.register(zeros())
    one, two = two_of(house)
    for server in house.servers:
        two.stage(server, 1, x(10)).wait(WAIT)
    calls = one.commit_all(1, x(1))
    house.fence("worker-1")
    for call in calls:
        call.wait(WAIT)
    assert set(by_slice(house).values()) == {-1.0}


def test_an_open_round_counts_who_has_died_since_and_even_died_again(make_house: MakeHouse) -> None:
    """worker-0 is slow; worker-1 commits, dies, comes back, commits the next round and dies again."""
    house = make_house(2, 2)
    house.register(zeros())
    one, two = two_of(house)
    two.commit_all(1, x(10))
    house.fence("worker-1")
    again, standing = house.enter("worker-1")
    assert standing.turn() == (0, 1)
    again.commit_all(1, x(100))
    house.fence("worker-1")
    for clock in (1, 2):
        for call in one.commit_all(clock, x(1)):
            call.wait(WAIT)
    assert set(by_slice(house).values()) == {-112.0}


def test_a_worker_enters_with_the_next_round_on_every_server(make_house: MakeHouse) -> None:
    """Round 3 is open on one server only: the newcomer begins with round 4, everywhere."""
    house = make_house(2, 1)
    house.register(zeros())
    one = house.workers["worker-0"]
    for clock in (1, 2):
        for call in one.commit_all(clock, x(1)):
            call.wait(WAIT)
    one.commit("server-0", 3, x(1)).wait(WAIT)
    two, standing = house.enter("worker-1")
    assert standing.turn() == (0, 3)
    one.commit("server-1", 3, x(1)).wait(WAIT)
    waiting = one.commit_all(4, x(1))
    assert not any(call.arrives(0.05) for call in waiting)
    for call in [*two.commit_all(1, x(10)), *waiting]:
        call.wait(WAIT)
    assert set(by_slice(house).values()) == {-14.0}
    waits = house.servers["server-0"].beat()
    assert waits.clocks == {"worker-0": 4, "worker-1": 1} and waits.waits == []


def test_the_beat_says_for_whom_a_round_waits(make_house: MakeHouse) -> None:
    house = make_house(1, 3)
    house.register(zeros())
    house.workers["worker-1"].commit("server-0", 1, x())
    (wait,) = house.servers["server-0"].beat().waits
    assert (wait.what, wait.step, wait.for_whom) == ("round", 1, ["worker-0", "worker-2"]) and wait.seconds >= 0


def test_the_beat_says_for_whom_a_parked_answer_waits(make_house: MakeHouse) -> None:
    house = make_house(1, 2, policy="bounded:0")
    house.register(zeros())
    house.workers["worker-1"].commit("server-0", 1, x())
    (wait,) = house.servers["server-0"].beat().waits
    assert (wait.what, wait.who, wait.for_whom) == ("lag", "worker-1", ["worker-0"])


def test_the_chief_is_who_has_been_there_longest(make_house: MakeHouse) -> None:
    """Its hyperparameters count in sync."""
    house = make_house(1, 2)
    house.register(zeros())
    house.fence("worker-0")
    back, _ = house.enter("worker-0")
    one = house.workers["worker-1"]
    calls = [
        back.commit("server-0", 1, x(1), overrides=[(0, 0, {"lr": 100.0})]),
        one.commit("server-0", 1, x(1), overrides=[(0, 0, {"lr": 3.0})]),
    ]
    for call in calls:
        call.wait(WAIT)
    assert set(by_slice(house).values()) == {-6.0}


# -- said again -------------------------------------------------------------------------------------------


def test_a_commit_said_again_while_its_round_is_open_is_answered_with_the_round(make_house: MakeHouse) -> None:
    house = make_house(1, 2)
    house.register(zeros())
    one, two = two_of(house)
    one.commit("server-0", 1, x(1))
    one.endpoints["server-0"].close("cut")
    again = one.commit("server-0", 1, x(1))
    bare = one.commit_staged("server-0", 1)
    third = one.commit("server-0", 1, x(1))
    assert not again.arrives(0.05) and not bare.arrives(0.0) and not third.arrives(0.0)
    two.commit("server-0", 1, x(10)).wait(WAIT)
    for saying in (again, bare, third):
        assert isinstance(saying.wait(WAIT), Committed), "whichever of them the worker still listens to"
    assert set(by_slice(house).values()) == {-11.0}
    assert isinstance(one.commit("server-0", 1, x(1)).wait(WAIT), Committed)
    assert set(by_slice(house).values()) == {-11.0}, "and once more after it"


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_commit_said_again_while_it_is_being_applied_is_answered_when_it_is(
    make_house: MakeHouse, policy: str
) -> None:
    house = make_house(1, 1, policy=policy)
    house.register(zeros())
    (worker,) = house.workers.values()
    slot = house.slot("server-0", 1)
    slot.pin()
    worker.commit("server-0", 1, x(1))
    worker.endpoints["server-0"].close("cut")
    again = [worker.commit("server-0", 1, x(1)), worker.commit("server-0", 1, x(1))]
    assert not again[0].arrives(0.1) and not again[1].arrives(0.0)
    slot.unpin()
    slot.drain()
    assert all(isinstance(call.wait(WAIT), Committed) for call in again) and set(by_slice(house).values()) == {-1.0}


def test_a_parked_answer_goes_to_whoever_asks_for_it(make_house: MakeHouse) -> None:
    house = make_house(1, 2, policy="bounded:0")
    house.register(zeros())
    one, two = two_of(house)
    one.commit("server-0", 1, x(1))
    one.endpoints["server-0"].close("cut")
    again = one.commit("server-0", 1, x(1))
    assert not again.arrives(0.05), "the bound holds for the second saying too"
    two.commit("server-0", 1, x(1)).wait(WAIT)
    again.wait(WAIT)


def test_leaving_may_be_said_again(make_house: MakeHouse) -> None:
    house = make_house(1, 2)
    house.register(zeros())
    one, two = two_of(house)
    call = one.commit("server-0", 1, x(1))
    for _ in range(2):
        two.ask("server-0", Leave()).wait(WAIT)
    call.wait(WAIT)
    assert set(by_slice(house).values()) == {-1.0}


# -- the clocks that go with an answer ------------------------------------------------------------------------


def test_an_answer_in_sync_says_exactly_which_clocks_are_in_it(make_house: MakeHouse) -> None:
    house = make_house(1, 2)
    house.register(zeros())
    one, two = two_of(house)
    two.ask("server-0", Rest(0, False)).wait(WAIT)
    two.phase = 1
    early = two.commit("server-0", 1, x(10))  # of the next phase: not in the rounds of this one
    lives = [life_of(worker.name, worker.incarnation) for worker in (one, two)]
    assert one.commit("server-0", 1, x(1)).wait(WAIT).clocks == dict(zip(lives, (1, 0), strict=True))
    assert one.ask("server-0", Pull([0], None, False)).wait(WAIT).clocks == dict(zip(lives, (1, 0), strict=True))
    one.phase = 1
    assert one.commit("server-0", 2, x(1)).wait(WAIT).clocks == dict(zip(lives, (2, 1), strict=True))
    assert early.wait(WAIT).clocks == dict(zip(lives, (2, 1), strict=True))


def test_with_backups_no_clocks_go_with_answers(make_house: MakeHouse) -> None:
    house = make_house(1, 1, replicas=2)
    house.register(zeros())
    assert house.workers["worker-0"].commit("server-0", 1, x(1)).wait(WAIT).clocks == {}


# -- memory -----------------------------------------------------------------------------------------------


def sizes(server: Any) -> dict[str, int]:
    """Everything of a server that could grow with its workers."""
    held: dict[str, int] = server.debug_state().held
    assert {"standings", "staged", "under way", "arenas", "endpoints", "workers of slice 0"} <= held.keys()
    return held


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_thousand_joins_and_deaths_leave_nothing_behind(make_house: MakeHouse, policy: str) -> None:
    house = make_house(1, 2, policy=policy, threads=0)
    house.register(zeros())
    segment = house.registry.layout.segments[0]
    server = house.servers["server-0"]
    counted: list[dict[str, int]] = []
    for turn in range(1000):
        _, two = two_of(house)
        if turn % 2:
            arena = HeapMemory(segment.num_bytes)
            arena.array.view(np.float32)[:] = 1
            two.ask("server-0", Attach(0, 0, segment.num_bytes), attachment=arena).wait(WAIT)
        if policy == "async":
            two.commit("server-0", 1, x(1)).wait(WAIT)
        two.stage("server-0", 2 if policy == "async" else 1, x(1)).wait(WAIT)
        house.fence("worker-1")
        house.enter("worker-1")
        if turn in (10, 999):
            counted.append(sizes(server))
    assert counted[0] == counted[1]
    gc.collect()
    assert threading.active_count() < 20
    eventually(lambda: set(by_slice(house).values()) == {-1000.0 if policy == "async" else 0.0})


@pytest.mark.parametrize("has_left", [True, False])
def test_who_has_left_in_order_was_not_evicted(make_house: MakeHouse, has_left: bool) -> None:
    """At a job's end a worker that has left may still be connected when its servers let it out."""
    house = make_house(1, 2)
    house.register(zeros())
    _, worker = two_of(house)
    worker.ask("server-0", Leave() if has_left else Rest(0, False)).wait(WAIT)
    house.carry_out(fenced={"worker-1": worker.incarnation})
    eventually(lambda: not worker.endpoints["server-0"].is_open)
    assert [line for line in house.lines if "evicted" in line] == (
        [] if has_left else ["worker-1: this worker was evicted"]
    )
