"""A ring with several workers on a host, inside one process: sums are made inside hosts, and each crosses once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE
from tests.server.conftest import eventually
from tests.server.rings import check_all_equal, check_ledger, kill, push_cells, start
from tests.server.test_process_group import odd_pushes
from tests.server.test_ring import train
from tests.server.test_ring_hosts import _ends, rank_of

from syncline import Rule
from syncline.net.memory import MemoryConnection
from syncline.reduce.hierarchical import HierarchicalReducer
from syncline.reduce.host_round import HostRound
from syncline.server import pool
from syncline.server.replicate import Replica
from syncline.server.ring import Voting
from syncline.testing import local_job

FLOATS, STEPS = 1 << 16, 2
AABB = ["a", "a", "b", "b"]


def ring(on: list[str], **settings: Any) -> Any:
    return local_job(workers=len(on), exchange="ring", on=on, **{"slice_bytes": 256, **settings})


def host_reducer_of(jobs: Any, name: str) -> HierarchicalReducer:
    reducer = jobs.servers[name].ring.host_reducers.current
    assert reducer is not None
    return reducer


def crossing(jobs: Any, on: list[str]) -> dict[str, list[int]]:
    """By host: bytes sent to other hosts, and received from them."""
    found = {host: [0, 0] for host in on}
    for end, (one, two) in {id(end): (end, names) for names, end in _ends(jobs)}.values():
        if on[one] != on[two]:
            stats = end.stats()
            for sender, receiver, count in ((one, two, stats.bytes_received), (two, one, stats.bytes_sent)):
                found[on[sender]][0] += count
                found[on[receiver]][1] += count
    return found


def crossed(on: list[str], **settings: Any) -> float:
    """The most bytes that a host sends or receives in a step, in models."""
    counts: list[dict[str, list[int]]] = []
    with ring(on, slice_bytes=FLOATS // 2, **settings) as jobs:

        def work(job: Any) -> Any:
            job.kv.register({"w": np.zeros(FLOATS, np.float32)}, Rule("SGD", lr=0.1))
            for stage in range(2):
                job.barrier(f"before {stage}")
                if job.rank == 0:
                    counts.append(crossing(jobs, on))
                job.barrier(f"after {stage}")
                for _ in range(STEPS if stage == 0 else 0):
                    job.kv.push_pull({"w": np.full(FLOATS, job.rank + 1.0, np.float32)})
            return np.asarray(job.kv.pull(["w"])["w"]).copy()

        found = jobs.run(work)
        check_all_equal(jobs)
    mean = sum(range(1, len(on) + 1)) / len(on)
    assert all(np.allclose(one, -0.1 * STEPS * mean) for one in found)
    before, after = counts
    return max(b - a for host in before for a, b in zip(before[host], after[host], strict=True)) / STEPS / 4 / FLOATS


@pytest.mark.parametrize(
    ("on", "most"),
    [(AABB, 1.0), (["a", "b", "a", "b"], 1.0), (["a", "b", "b", "b"], 1.0), (["a", "a", "b", "c"], 1.5)],
)
def test_what_a_host_sends_in_a_step(on: list[str], most: float) -> None:
    """In models, each way: 2 (h-1) / h, whoever has how many workers; a little more where one of three hosts has more
    primaries than others. Each worker by itself would send more."""
    assert crossed(on) <= most * 1.02 < crossed(on, transport="tcp") - 0.2


@pytest.mark.parametrize(("rule", "clip"), [("Adam", None), ("SGD", 0.1)])
def test_a_ring_of_hosts_and_servers_come_to_the_same(rule: str, clip: float | None) -> None:
    """Also where the round's mean is clipped, weights differ, and a worker has fewer steps."""
    found = {}
    for name, settings in {"servers": {}, "ring": {"exchange": "ring", "on": ["a", "b", "b"]}}.items():
        with local_job(workers=3, slice_bytes=256, **settings) as jobs:
            found[name] = jobs.run(lambda job: train(job, rule, clip))
            if name == "ring":
                check_all_equal(jobs)
                assert host_reducer_of(jobs, "server-2").next_round.number, "sums went by host leaders"
    for one, two in zip(found["servers"], found["ring"], strict=True):
        torch.testing.assert_close(one, two)
        assert torch.equal(two, found["ring"][0]), "all ranks have the same, bit by bit"


@pytest.mark.parametrize("on", [["a", "b", "b"], ["a", "b", "a"]])
def test_whatever_is_pushed_means_the_same(on: list[str]) -> None:
    """Halves, integers, assigned values, what one host alone pushes, weights that differ, one that weighs nothing."""
    found = {}
    for name, settings in {"servers": {}, "ring": {"exchange": "ring", "on": on}}.items():
        with local_job(workers=3, slice_bytes=64, **settings) as jobs:
            found[name] = jobs.run(odd_pushes)[0]
    for name, value in found["servers"].items():
        torch.testing.assert_close(found["ring"][name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert (found["ring"]["nobody"] == 7.0).all() and found["ring"]["alone"].all()


def test_where_memory_cannot_be_lent_sums_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryConnection, "can_carry", lambda self, memory: False)
    with ring(["a", "a", "b"]) as jobs:
        acknowledged: dict[str, int] = {}
        jobs.run(lambda job: (push_cells(job, 3, acknowledged), job.barrier("all")))
        assert not any(host_reducer_of(jobs, f"server-{rank}").host_round.setup.readers for rank in range(3))
        check_all_equal(jobs)
        assert check_ledger(jobs[0], acknowledged) == [3, 3, 3, 0]


def test_no_sum_goes_from_a_primary_to_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Replica.prepare

    def prepare(self: Any, slot: Any, update: Any) -> Any:
        assert not update.has, "a sum was sent to a backup"
        return original(self, slot, update)

    monkeypatch.setattr(Replica, "prepare", prepare)
    with ring(AABB) as jobs:
        jobs.run(lambda job: push_cells(job, 2, {}))


# -- deaths, and who comes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", range(4))
def test_a_process_that_dies_costs_nobody_a_step(monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    """Each is a primary of some slices, a host leader of others, and a neighbour. Servers have threads of their
    own."""
    broken: list[Exception] = []
    monkeypatch.setattr(pool, "InlinePool", lambda: pool.ThreadPool(broken.append, 2))
    with ring(AABB, slice_bytes=512) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 20, acknowledged), gone)
        eventually(lambda: acknowledged.get(f"worker-{victim}", 0) >= 3)
        kill(jobs, victim, gone)
        left = [rank for rank in range(4) if rank != victim]
        for rank in left:
            threads[rank].join(PATIENCE)
        counts = check_ledger(jobs[left[0]], acknowledged)
        assert [counts[rank] for rank in left] == [20] * 3 and not broken
        check_all_equal(jobs)


#: Where a round stops: which part of which server's work is not done.
MOMENTS: dict[str, tuple[type, str, Callable[[Any], bool]]] = {
    "host b has added up nothing": (HostRound, "add_local", lambda adding: adding.host == "b"),
    "sums of hosts are there, and nothing is finished": (HostRound, "_finish", lambda adding: True),
    "a host leader has it, and its neighbour does not": (
        HostRound,
        "_received",
        lambda adding: adding.name == "server-3",
    ),
    "one host has it, and the other does not": (HostRound, "_received", lambda adding: adding.host == "b"),
    "all hold it": (Voting, "held", lambda voting: True),
}


def generation_of(part: Any) -> int:
    found: int = part.generation if isinstance(part, HostRound) else part.votes.generation
    return found


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("at", MOMENTS)
def test_a_death_in_the_middle_of_a_round(monkeypatch: pytest.MonkeyPatch, at: str, victim: int) -> None:
    """The round is made again by those who are there, and what was on its way goes nowhere; where all hold it, it
    counts, with what the dead one brought."""
    stops, kept = threading.Event(), list[Callable[[], None]]()
    owner, method, is_the_one = MOMENTS[at]
    original, number = getattr(owner, method), 4 if at == "all hold it" else 1
    before: list[int] = []  # what those who are left make again goes on

    def stop(self: Any, *given: Any) -> None:
        if stops.is_set() and is_the_one(self) and generation_of(self) == before[0]:
            kept.append(lambda: original(self, *given))
        else:
            original(self, *given)

    monkeypatch.setattr(owner, method, stop)
    with ring(AABB, slice_bytes=512) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        passed, go = threading.Barrier(5), threading.Event()

        def work(job: Any) -> None:
            push_cells(job, 2, acknowledged)
            passed.wait(PATIENCE)
            go.wait(PATIENCE)
            cell = np.zeros((4, 64), np.float32)
            cell[rank_of(job.name), 2] = 1.0
            job.kv.push({"here": cell, "there": cell}).wait()
            acknowledged[job.name] = 3

        threads = start(jobs, work, gone)
        passed.wait(PATIENCE)
        before.append(host_reducer_of(jobs, "server-0").generation)
        stops.set()
        go.set()
        eventually(lambda: len(kept) >= number)
        kill(jobs, victim, gone)
        stops.clear()
        left = [rank for rank in range(4) if rank != victim]
        for rank in left:
            threads[rank].join(PATIENCE)
        for late in kept:
            with contextlib.suppress(KeyError):  # what a dead worker had staged is gone
                late()  # its generation is over
        counts = check_ledger(jobs[left[0]], acknowledged)
        assert counts == [3 if rank in left or at == "all hold it" else 2 for rank in range(4)]
        check_all_equal(jobs)


@pytest.mark.parametrize("host", ["a", "b", "c"])
def test_one_that_comes_to_a_host_takes_part(host: str) -> None:
    """Of one worker on each of two hosts all give each other all pushes; with a third one, wherever it is, sums go by
    host leaders. Nobody goes by what was before."""
    with ring(["a", "b"], most_workers=3) as jobs:
        acknowledged: dict[str, int] = {}

        def work(job: Any) -> None:
            push_cells(job, 30 if job.name != "worker-2" else 5, acknowledged)
            job.barrier("all")

        first = start(jobs, work, set())
        eventually(lambda: acknowledged.get("worker-0", 0) >= 2)
        servers = jobs.servers
        assert all(server.ring.host_reducers.current is None for server in servers.values())
        late = jobs.add_worker("worker-2", on=host)
        for thread in [*first, *start([late], work, set())]:
            thread.join(PATIENCE)
        assert check_ledger(late, acknowledged)[:3] == [30, 30, 5]
        eventually(lambda: "server-2" in servers["server-0"].ring.voting.votes.voters)
        assert all(server.ring.host_reducers.current is not None for server in servers.values())
        check_all_equal(jobs)


def test_two_that_are_left_on_two_hosts_go_straight() -> None:
    with ring(["a", "a", "b"]) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 20, acknowledged), gone)
        eventually(lambda: acknowledged.get("worker-2", 0) >= 3)
        kill(jobs, 1, gone)
        for thread in threads[::2]:
            thread.join(PATIENCE)
        assert check_ledger(jobs[0], acknowledged)[:3:2] == [20, 20]
        assert all(server.ring.host_reducers.current is None for server in jobs.servers.values())
        check_all_equal(jobs)
