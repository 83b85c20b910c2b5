"""Servers die, move and come back under a worker: every update counts once, and every verb is said again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline import Rule, WaitTimeout
from syncline.core.rounds import LOOP
from syncline.core.wire.control import Registered, Uploaded
from syncline.core.wire.message import Done, Message
from syncline.core.wire.traffic import (
    AskPlace,
    Attach,
    CommitStaged,
    Committed,
    Pull,
    Rest,
    Stage,
)  # fmt: skip
from syncline.errors import Refresh

SGD = Rule("SGD", lr=1.0)
NUM = 64


def register(house: Any, names: str = "ab") -> None:
    house.job.kv.register({name: np.zeros(NUM) for name in names}, SGD)


def push(house: Any, k: int) -> Any:
    return house.job.kv.push_pull({name: np.full(NUM, float(10**k)) for name in "ab"})


def assert_exact(house: Any, num_steps: int) -> None:
    """Every commit was applied once on every slice."""
    expected = -float(sum(10**k for k in range(num_steps)))
    for name, value in house.everything().items():
        assert (value == expected).all(), (name, value[0], expected)
    applied = [(number, clock) for _, number, clock in house.ledger]
    assert len(applied) == len(set(applied)) == num_steps * len(house.values)


SHARED = [pytest.param(True, id="shared memory"), pytest.param(False, id="socket")]


@pytest.mark.parametrize("shares_memory", SHARED)
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("policy", ["sync", "async"])
@pytest.mark.parametrize("when", [Stage, CommitStaged])
def test_a_server_dies_within_a_commit(
    house: Callable[..., Any], shares_memory: bool, window: int, policy: str, when: type
) -> None:
    if policy == "sync" and window:
        pytest.skip("no window in rounds")
    twin = house(2, shares_memory=shares_memory, policy=policy, window=window, slice_bytes=256)
    register(twin)
    victim = twin.servers["server-1"]
    count = 0

    def die(message: Any) -> None:
        nonlocal count
        count += isinstance(message, when)
        if count == 3:
            victim.die()
            twin.fail_over("server-1", "server-0")

    victim.fail = die
    tickets = [push(twin, k) for k in range(6)]
    results = [ticket.wait() for ticket in tickets]
    twin.job.exchange.settle()
    assert_exact(twin, 6)
    assert (results[-1]["a"] == twin.everything()["a"]).all()
    assert {replica_set.primary for replica_set in twin.replica_sets.values()} == {"server-0"}
    assert twin.stamp.generation == twin.generation == twin.job.generation
    assert list(twin.job.exchange.routes.endpoints) == ["server-0"]


@pytest.mark.parametrize("shares_memory", SHARED)
def test_the_only_server_is_replaced_by_a_new_one(house: Callable[..., Any], shares_memory: bool) -> None:
    twin = house(1, shares_memory=shares_memory, slice_bytes=256)
    register(twin)
    push(twin, 0).wait()
    twin.servers["server-0"].die()
    ticket = push(twin, 1)
    twin.add_server("server-1")
    twin.fail_over("server-0", "server-1")
    ticket.wait()
    push(twin, 2).wait()
    assert_exact(twin, 3)
    if shares_memory:
        assert any(isinstance(m, Attach) for m in twin.servers["server-1"].heard)
        assert not any(m.slices for m in twin.servers["server-1"].heard if isinstance(m, Stage))


def test_the_roster_is_asked_for_when_it_is_not_told(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=256)
    register(twin)
    twin.servers["server-1"].die()
    twin.fail_over("server-1", "server-0", tell=False)
    push(twin, 0).wait()
    assert_exact(twin, 1)


def test_a_connection_that_breaks_is_made_again(house: Callable[..., Any]) -> None:
    """The server lives, nothing has moved: no roster comes, the same one is dialled."""
    twin = house(2, slice_bytes=256)
    register(twin)
    for k in range(3):
        ticket = push(twin, k)
        for endpoint in list(twin.servers["server-1"].endpoints):
            endpoint.close("hiccup")
        ticket.wait()
    push(twin, 3).wait()
    assert_exact(twin, 4)


def test_a_frozen_server_that_is_evicted_holds_nobody(house: Callable[..., Any]) -> None:
    """Its socket stays open, its answer never comes: the roster ends the wait."""
    twin = house(2, slice_bytes=256)
    register(twin)
    frozen = twin.servers["server-1"]
    frozen.answer = lambda request, message: None  # type: ignore[method-assign]

    def evict() -> None:
        twin.servers.pop("server-1")
        twin.fail_over("server-1", "server-0")

    timer = threading.Timer(0.3, evict)
    timer.name = "Thread-evict"
    timer.start()
    push(twin, 0).wait()
    timer.join()
    assert_exact(twin, 1)


def test_refresh_before_the_roster_is_told(house: Callable[..., Any]) -> None:
    """Servers know of a move first: what was said meanwhile is said again when the roster is there."""
    twin = house(3, slice_bytes=256)
    register(twin)
    push(twin, 0).wait()
    moved = {
        number: "server-2" for number, replica_set in twin.replica_sets.items() if replica_set.primary == "server-0"
    }
    before = dict(twin.replica_sets)
    twin.change(moved, tell=False)
    after = twin.roster()
    old = twin.roster
    twin.roster = lambda: type(after)(1, after.members, list(before.values()))  # the coordinator's is not ready yet

    def tell() -> None:
        twin.roster = old
        twin.coordinator.say(after)

    timer = threading.Timer(0.2, tell)
    timer.name = "Thread-tell"
    timer.start()
    push(twin, 1).wait()
    timer.join()
    assert_exact(twin, 2)
    assert "server-0" not in twin.job.exchange.routes.endpoints


def test_who_rests_says_so_to_new_servers_before_anything_else(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=256)
    register(twin)
    push(twin, 0).wait()
    twin.job.rest()
    twin.servers["server-1"].die()
    fresh = twin.add_server("server-2")
    twin.fail_over("server-1", "server-2")
    twin.job.kv.pull()
    words = [m for m in fresh.heard if isinstance(m, Rest | Pull | Stage)]
    assert isinstance(words[0], Rest) and not words[0].at_barrier and words[0].phase == LOOP - 1
    push(twin, 1).wait()
    stages = [m for m in fresh.heard if isinstance(m, Stage)]
    assert {m.phase for m in stages} == {LOOP}


def test_what_is_made_anew_is_the_same_commit(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=256, policy="bounded:2")
    register(twin)
    push(twin, 0).wait()
    twin.job.rest()
    twin.place = 7
    victim = twin.servers["server-1"]

    def die(message: Any) -> None:
        if isinstance(message, CommitStaged):
            victim.die()
            twin.place = 99  # asked again it would stand elsewhere
            twin.fail_over("server-1", "server-0")

    victim.fail = die
    twin.job.kv.push({name: np.full(NUM, 10.0) for name in "ab"}, weight=3.0).wait()
    stages = [m for m in twin.servers["server-0"].heard if isinstance(m, Stage) and m.clock == 2]
    assert len(stages) == 2
    assert {(m.phase, m.weight, m.back_at, m.pushed) for m in stages} == {(LOOP, 3.0, 7, stages[0].pushed)}
    assert any(isinstance(m, AskPlace) for m in twin.servers["server-0"].heard)
    assert_exact(twin, 2)


def test_a_window_is_made_anew_in_the_order_of_its_clocks(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=256, policy="async", window=3, shares_memory=False)
    register(twin)
    victim, other = twin.servers["server-1"], twin.servers["server-0"]
    kept = victim.answer
    victim.answer = lambda r, m: None if isinstance(m, Stage | CommitStaged) else kept(r, m)  # type: ignore
    tickets = [push(twin, k) for k in range(4)]
    other.heard.clear()
    victim.die()
    twin.fail_over("server-1", "server-0")
    tickets[3].wait()
    clocks = [m.clock for m in other.heard if isinstance(m, Stage)]
    assert clocks == sorted(clocks) and set(clocks) == {1, 2, 3, 4}
    for ticket in tickets:
        ticket.wait()
    assert_exact(twin, 4)


def be_impatient(twin: Any) -> None:
    """From now on: what came before may take its time."""
    twin.job.exchange.wait_seconds = 0.4


def test_a_wait_without_help_ends(house: Callable[..., Any]) -> None:
    twin = house(1)
    register(twin)
    be_impatient(twin)
    twin.servers["server-0"].die()
    with pytest.raises(WaitTimeout, match="the servers have not come back: server-0 cannot be reached"):
        twin.job.kv.gradients()
    with pytest.raises(WaitTimeout, match="a pull has waited"):
        twin.job.kv.pull()


def test_a_commit_without_help_ends(house: Callable[..., Any]) -> None:
    twin = house(1)
    register(twin)
    push(twin, 0).wait()
    be_impatient(twin)
    twin.servers["server-0"].die()
    with pytest.raises(WaitTimeout, match=r"step 2 has waited [0-9.]+ s"):
        push(twin, 0).wait()


def test_slices_without_a_server_are_waited_for(house: Callable[..., Any]) -> None:
    twin = house(1)
    register(twin)
    push(twin, 0).wait()
    twin.servers["server-0"].die()
    twin.change(dict.fromkeys(twin.replica_sets, ""))

    def comes() -> None:
        twin.add_server("server-0")
        twin.change(dict.fromkeys(twin.replica_sets, "server-0"))

    timer = threading.Timer(0.3, comes)
    timer.name = "Thread-comes"
    timer.start()
    push(twin, 1).wait()
    timer.join()
    assert_exact(twin, 2)


def test_a_new_generation_without_a_move_disturbs_nothing(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=256)
    register(twin)
    push(twin, 0).wait()
    twin.change()
    assert twin.stamp.generation == 1
    heard = len(twin.servers["server-0"].heard)
    push(twin, 1).wait()
    assert twin.stamp.generation == 2
    kinds = {type(m).__name__ for m in twin.servers["server-0"].heard[heard:]}
    assert kinds == {"Stage", "CommitStaged"}


def test_early_bytes_are_forgotten_by_a_change(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=256, shares_memory=False)
    register(twin)
    grads = twin.job.kv.gradients()
    for array in grads.values():
        array[:] = 1.0
    twin.job.exchange.stage(twin.layout_slices())
    twin.servers["server-1"].die()
    twin.fail_over("server-1", "server-0")
    twin.job.kv.push(grads).wait()
    assert_exact(twin, 1)
    assert list(range(len(twin.values))) == sorted(
        n for m in twin.servers["server-0"].heard[-1:] if isinstance(m, Stage) for n in m.slices
    )


def test_a_move_there_and_back_is_made_anew_as_well(house: Callable[..., Any]) -> None:
    """The replica sets are as they were; what was open was dropped all the same."""
    twin = house(2, slice_bytes=256)
    register(twin)
    push(twin, 0).wait()
    server = twin.servers["server-0"]
    kept, asked = server.answer, []
    server.answer = lambda r, m: asked.append(r) if isinstance(m, CommitStaged) else kept(r, m)
    ticket = push(twin, 1)
    server.answer = kept
    before = dict(twin.replica_sets)
    twin.change(dict.fromkeys(before, "server-1"), tell=False)
    twin.change({number: replica_set.primary for number, replica_set in before.items()})
    for request in asked:
        request.refuse(Refresh("moved, and back"))
    ticket.wait()
    assert_exact(twin, 2)


def test_a_later_ticket_is_waited_for_first(house: Callable[..., Any]) -> None:
    """It was refused for want of the one before, whose trouble a roster mends."""
    twin = house(1, policy="async", window=2, slice_bytes=256)
    register(twin)
    server = twin.servers["server-0"]
    refused = []

    def refuse(message: Any) -> None:
        if isinstance(message, Stage) and message.clock == 1 and not refused:
            refused.append(message)
            raise Refresh("moved")

    server.fail = refuse
    first, second = push(twin, 0), push(twin, 1)
    twin.change()
    second.wait()
    first.wait()
    assert_exact(twin, 2)


def test_late_answers_of_the_old_placement_go_nowhere(house: Callable[..., Any]) -> None:
    """They were on their way when a slice moved: what its new primary has brought is newer."""
    twin = house(2, slice_bytes=256, shares_memory=False)
    register(twin)
    slow, other = twin.servers["server-0"], twin.servers["server-1"]
    kept, late = slow.answer, []
    wanted = [n for n, replica_set in twin.replica_sets.items() if replica_set.primary == "server-0"]

    def withhold(request: Any, message: Any) -> Any:
        if isinstance(message, CommitStaged) and not late:
            late.append((request, message))
            return None
        return kept(request, message)

    def refuse(message: Any) -> None:
        if isinstance(message, CommitStaged) and twin.generation == 1:
            twin.change({wanted[0]: "server-1"})  # it keeps the others
            raise Refresh("moved")

    slow.answer, other.fail = withhold, refuse
    ticket = push(twin, 0)
    result = ticket.wait()
    request, message = late[0]
    sizes = [twin.values[number].nbytes for number in message.pull]
    garbage = [memoryview(np.full(size, 255, np.uint8)) for size in sizes]
    assert wanted[0] in message.pull
    request.reply(Committed(1, [1] * len(sizes), list(message.pull), {"worker-0": 1}), garbage, sum(sizes))
    assert (result["a"] == -1.0).all() and (result["b"] == -1.0).all()
    push(twin, 1).wait()
    assert_exact(twin, 2)


def test_values_that_went_with_a_server_before_they_counted_are_uploaded_again(house: Callable[..., Any]) -> None:
    """The coordinator's answer to the late word: upload once more, to whoever has the slices now."""
    twin = house(2, slice_bytes=64)
    asked: list[int] = []

    def uploaded(message: Uploaded) -> Message:
        asked.append(message.segment)
        if len(asked) > 1:
            return Done()
        twin.servers["server-1"].die()
        for number, replica_set in twin.replica_sets.items():
            if replica_set.primary == "server-1":
                twin.values[number][:] = 0.0
        twin.fail_over("server-1", "server-0")
        segments = twin.registry.layout.segments
        return Registered(segments, list(twin.replica_sets.values()), twin.generation, message.segment)

    twin.coordinator.answers[Uploaded] = uploaded
    found = twin.job.kv.register({"a": np.arange(64.0)}, SGD)
    assert asked == [0, 0]
    np.testing.assert_array_equal(found["a"], np.arange(64.0))
    np.testing.assert_array_equal(twin.everything()["a"], np.arange(64.0))
