"""Who a worker is in each generation, how it enters a running job, and how it leaves when it is asked to."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline import FencedError, Rule
from syncline.core.members import Member
from syncline.core.rounds import LOOP
from syncline.core.wire.control import Barrier, Enter, Leave, Register, Retire, Roster, Uploaded
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import Rest, Stage
from syncline.testing import local_job

SGD = Rule("SGD", lr=1.0)


def register(house: Any) -> None:
    house.job.kv.register({"a": np.zeros(8), "b": np.zeros(8)}, SGD)


def push(house: Any) -> Any:
    return house.job.kv.push({"a": np.ones(8)})


def stages(house: Any, server: str = "server-0") -> list[Stage]:
    return [m for m in house.servers[server].heard if isinstance(m, Stage)]


def test_ranks_are_places_in_the_roster(house: Callable[..., Any]) -> None:
    twin = house(1)
    job = twin.job
    assert (job.rank, job.world_size, job.local_rank, job.is_chief) == (0, 1, 0, True)
    workers = [
        Member("worker-2", "worker", 1, "b", since=1),
        Member("worker-1", "worker", 2, "local", since=2),
        Member("worker-0", "worker", 3, "local", since=3),
    ]
    twin.handlers.rosters.hear(Roster(9, [*reversed(workers), twin.members["server-0"]], []))
    assert (job.rank, job.world_size, job.local_rank, job.is_chief, job.generation) == (2, 3, 1, False, 9)
    twin.handlers.rosters.hear(Roster(8, workers[2:], []))  # late news
    assert job.generation == 9 and job.rank == 2
    twin.handlers.rosters.hear(Roster(10, workers[2:], []))
    assert job.is_chief and job.world_size == 1


@pytest.mark.parametrize("policy", ["sync", "bounded:3"])
def test_one_who_comes_late_enters_with_its_first_push(house: Callable[..., Any], policy: str) -> None:
    twin = house(1, late=True, policy=policy, shares_memory=False)
    register(twin)
    twin.job.kv.pull()
    twin.job.rest()
    twin.job.exchange.stage(twin.layout_slices())
    assert not any(isinstance(m, Enter) for m in twin.coordinator.heard)
    assert not any(isinstance(m, Rest | Stage) for m in twin.servers["server-0"].heard)
    push(twin).wait()
    push(twin).wait()
    assert sum(isinstance(m, Enter) for m in twin.coordinator.heard) == 1
    first, second = stages(twin)
    assert [(one.clock, one.phase) for one in (first, second)] == [(1, 5 * LOOP), (2, 5 * LOOP)]
    assert (first.back_at, second.back_at) == ((17, None) if policy != "sync" else (None, None))


def test_one_who_has_not_entered_leaves_without_a_word_to_the_servers(house: Callable[..., Any]) -> None:
    twin = house(1, late=True)
    register(twin)
    twin.job.close()
    assert not any(isinstance(m, Leave) for m in twin.servers["server-0"].heard)
    assert any(isinstance(m, Leave) for m in twin.coordinator.heard)


def test_a_barrier_before_the_entry_counts_for_its_era(house: Callable[..., Any]) -> None:
    twin = house(1, late=True)
    register(twin)
    twin.job.barrier("begin")
    push(twin).wait()
    assert stages(twin)[0].phase == 1 << 32


@pytest.mark.parametrize("how", ["retire", "coordinator"])
def test_asked_to_leave_it_finishes_its_step(house: Callable[..., Any], how: str) -> None:
    twin = house(2, slice_bytes=64)
    register(twin)
    ticket = push(twin)
    if how == "retire":
        twin.job.retire()
    else:
        twin.coordinator.endpoints[0].call(Retire()).wait(PATIENCE)
    with pytest.raises(SystemExit) as caught:
        ticket.wait()
    assert caught.value.code == 0
    assert {replica_set.slice for replica_set in twin.replica_sets.values()} == {
        number for _, number, clock in twin.ledger if clock == 1
    }
    for server in twin.servers.values():
        assert any(isinstance(m, Leave) for m in server.heard)
    assert any(isinstance(m, Leave) for m in twin.coordinator.heard)


@pytest.mark.parametrize("verb", ["push", "pull", "register", "barrier", "rest"])
def test_asked_to_leave_between_steps_it_goes_at_the_next_call(house: Callable[..., Any], verb: str) -> None:
    twin = house(1)
    register(twin)
    twin.job.retire()
    actions: dict[str, Callable[[], Any]] = {
        "push": lambda: push(twin),
        "pull": twin.job.kv.pull,
        "register": lambda: twin.job.kv.register({"c": np.zeros(1)}, SGD),
        "barrier": lambda: twin.job.barrier("x"),
        "rest": twin.job.rest,
    }
    with pytest.raises(SystemExit):
        actions[verb]()
    assert any(isinstance(m, Leave) for m in twin.coordinator.heard) and not twin.ledger


@pytest.mark.parametrize("kind", [Barrier, Register, Uploaded])
def test_asked_to_leave_where_it_waits_for_others_it_waits_no_longer(
    house: Callable[..., Any], kind: type[Message]
) -> None:
    """They may come in ten minutes, or wait for this one to go."""
    twin = house(1, wait_seconds=PATIENCE)
    register(twin)
    twin.coordinator.answers[kind] = lambda message: threading.Timer(0.05, twin.job.retire).start()
    began = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        if kind is Barrier:
            twin.job.barrier("x")
        else:
            twin.job.kv.register({"c": np.zeros(1)}, SGD)
    assert caught.value.code == 0 and time.monotonic() - began < PATIENCE / 2
    assert [m for m in twin.coordinator.heard if isinstance(m, Leave)] == [Leave(True)]


def test_the_others_at_a_barrier_do_not_wait_for_one_that_was_asked_to_leave() -> None:
    with local_job(workers=3, servers=2) as local:
        local.run(lambda job: job.kv.register({"a": np.zeros(8)}, SGD))
        passed: list[str] = []

        def meet(job: Any) -> None:
            with contextlib.suppress(SystemExit):
                job.barrier("x")
                passed.append(job.name)

        threads = [threading.Thread(target=meet, args=(local[k],)) for k in range(2)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + PATIENCE
        while len(local.coordinator.barriers.waits(0.0)) < 1 and time.monotonic() < until:
            time.sleep(0.01)
        local[0].retire()
        threads[0].join(PATIENCE)
        assert not threads[0].is_alive()
        meet(local[2])
        threads[1].join(PATIENCE)
        assert sorted(passed) == ["worker-1", "worker-2"]
        local.jobs.pop(0)


def test_what_is_still_to_be_sent_is_sent_before_it_leaves(house: Callable[..., Any]) -> None:
    twin = house(1)
    register(twin)
    twin.job.before_rest(lambda: push(twin).wait())
    twin.job.retire()
    with pytest.raises(SystemExit):
        twin.job.kv.pull()
    assert twin.clocks[0] == 1 and any(isinstance(m, Leave) for m in twin.coordinator.heard)


def test_a_leave_that_was_taken_already_is_fine(house: Callable[..., Any]) -> None:
    twin = house(1)
    register(twin)

    def refuse(message: Any) -> Any:
        if isinstance(message, Leave):
            raise FencedError("has left")

    twin.servers["server-0"].fail = refuse
    twin.coordinator.answers[Leave] = refuse
    twin.job.close()
    assert twin.job.evicted is None


def test_a_coordinator_that_comes_back_is_asked_again(house: Callable[..., Any]) -> None:
    twin = house(1)
    register(twin)
    held = threading.Event()

    def breaks(message: Any) -> None:
        if not held.is_set():
            held.set()
            twin.coordinator.endpoints[0].close("killed")

    twin.coordinator.answers[Barrier] = lambda m: breaks(m) or twin.coordinator.answer(m)
    twin.job.barrier("x")
    push(twin).wait()
    assert held.is_set() and stages(twin)[-1].phase == 1 << 32


def test_pushes_go_on_without_a_coordinator(house: Callable[..., Any]) -> None:
    twin = house(1)
    register(twin)
    twin.dial_coordinator = lambda: (_ for _ in ()).throw(OSError("nobody listens"))
    twin.coordinator.endpoints[0].close("killed")
    for _ in range(3):
        push(twin).wait()
    twin.job.kv.pull()
    assert twin.clocks[0] == 3


def test_a_beat_says_what_has_landed(house: Callable[..., Any]) -> None:
    twin = house(1, policy="async", window=2)
    register(twin)
    tickets = [push(twin) for _ in range(2)]
    assert twin.handlers.heartbeat().step == 0
    for ticket in tickets:
        ticket.wait()
    assert twin.handlers.heartbeat().step == 2
