"""An acknowledged update is applied exactly once, under every policy.

Integer gradients with learning rate 1 make every check exact. A one-hot ledger names what was lost or doubled: push
number q of worker w adds 1 to its own cell.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.server.conftest import eventually

from syncline import Rule
from syncline.testing import local_job
from syncline.worker.job import Job

PUSHES = 30


@pytest.mark.parametrize("settings", [{}, {"servers": 2, "slice_bytes": 64}], ids=["one", "two servers"])
@pytest.mark.parametrize("policy", ["sync", "bounded:0", "bounded:2", "async", "async+window"])
def test_the_one_hot_ledger_is_exact(policy: str, settings: dict[str, Any]) -> None:
    """Every push is in, once: under each policy, with one server and with slices over two."""
    if policy == "async+window":
        policy, settings = "async", {**settings, "window": 2}
    with local_job(workers=3, policy=policy, **settings) as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            job.kv.register({"ledger": np.zeros((3, PUSHES), np.float32)}, Rule("Add"), reduce="sum")
            tickets = []
            for number in range(PUSHES):
                cell = np.zeros((3, PUSHES), np.float32)
                cell[job.rank, number] = 1.0
                tickets.append(job.kv.push({"ledger": cell}))
            for ticket in tickets:
                ticket.wait()
            job.barrier("all in")
            pulled: np.ndarray[Any, Any] = job.kv.pull()["ledger"]
            return pulled

        for ledger in jobs.run(work):
            assert (ledger == 1.0).all()


@pytest.mark.parametrize("policy", ["sync", "bounded:1", "async"])
def test_parameters_are_the_start_minus_the_sum_of_all_gradients(policy: str) -> None:
    with local_job(workers=4, policy=policy, servers=2, slice_bytes=256) as jobs:

        def work(job: Job) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
            job.kv.register({"x": np.full(500, 1000.0, np.float32)}, Rule("SGD", lr=1.0), reduce="sum")
            random = np.random.default_rng(job.rank)
            total = np.zeros(500, np.float32)
            for _ in range(PUSHES):
                gradient = random.integers(-50, 50, 500).astype(np.float32)
                total += gradient
                job.kv.push_pull({"x": gradient}).wait()
            job.barrier("all in")
            return total, job.kv.pull()["x"]

        results = jobs.run(work)
    expected = 1000.0 - sum(total for total, _ in results)
    for _, final in results:
        assert (final == expected).all()


@pytest.mark.parametrize("policy", ["sync", "bounded:1", "async", "async:gather=2"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_pushes_of_some_parameters_advance_the_clocks_of_all_slices(policy: str, replicas: int) -> None:
    """Each push has one parameter of five: the other slices only count it, in order, and every push counts once."""
    names = [f"p{k}" for k in range(5)]
    with local_job(workers=2, policy=policy, servers=2, replicas=replicas, slice_bytes=256) as jobs:

        def work(job: Job) -> dict[str, np.ndarray[Any, Any]]:
            job.kv.register({name: np.zeros(64, np.float32) for name in names}, Rule("Add"), reduce="sum")
            for number in range(20):
                name = names[(number * 2 + job.rank) % 5]
                job.kv.push({name: np.ones(64, np.float32)}).wait()
            job.barrier("all in")
            return dict(job.kv.pull())

        for found in jobs.run(work):
            assert {name: set(np.asarray(value).tolist()) for name, value in found.items()} == {
                n: {8.0} for n in names
            }
        clocks = [
            sorted(slot.state.clocks.values()) for server in jobs.servers.values() for slot in server.slices.values()
        ]
    assert len(clocks) >= 5 and all(each == [20, 20] for each in clocks), "on every slice"


def test_lag_never_passes_the_bound_with_a_slow_worker() -> None:
    """`bounded:2`: when a worker's push is answered, the slowest is at most two commits behind it."""
    clocks = [0, 0, 0]
    worst = []
    lock = threading.Lock()
    with local_job(workers=3, policy="bounded:2") as jobs:

        def work(job: Job) -> None:
            job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
            job.barrier("begin")
            if job.rank == 2:
                eventually(lambda: clocks[0] >= 3)  # two are answered, and the third waits for it
            for _ in range(12):
                if job.rank == 2:
                    time.sleep(0.02)
                with lock:
                    clocks[job.rank] += 1
                job.kv.push({"x": np.ones(4)}).wait()
                with lock:
                    worst.append(clocks[job.rank] - min(clocks))
            job.rest()

        jobs.run(work)
        stats = jobs[0].stats()
    assert max(worst) <= 2 and stats.lag_max == 2
    assert stats.servers[0].num_commits == 36


def test_without_a_bound_the_fast_run_ahead() -> None:
    """The same with `async`: otherwise the test above would prove nothing."""
    far_ahead = threading.Event()
    with local_job(workers=2, policy="async") as jobs:

        def work(job: Job) -> bool:
            job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
            job.barrier("begin")
            if job.rank == 1:
                return far_ahead.wait(PATIENCE)
            for _ in range(10):
                job.kv.push({"x": np.ones(4)}).wait()
            far_ahead.set()
            return True

        assert jobs.run(work) == [True, True]


def test_staleness_is_zero_in_sync_and_measured_in_async() -> None:
    def work(job: Job) -> None:
        job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
        job.barrier("begin")
        for number in range(6):
            job.kv.push_pull({"x": np.ones(4)}).wait()
            if job.rank == number % 2:
                time.sleep(0.01)

    for policy, stale in (("sync", False), ("async", True)):
        with local_job(workers=2, policy=policy) as jobs:
            jobs.run(work)
            stats = jobs[0].stats()
            assert (stats.staleness_max > 0) == stale
            assert stats.servers[0].staleness_count == 12


def test_the_mean_weighs_workers_and_divides_by_the_whole_round() -> None:
    with local_job(workers=2) as jobs:

        def work(job: Job) -> list[float]:
            job.kv.register({"x": np.zeros(1), "y": np.zeros(1)}, Rule("SGD", lr=1.0))
            grads = {"x": np.full(1, 1.0 + 3.0 * job.rank)}
            if job.rank:
                grads["y"] = np.full(1, 8.0)
            job.kv.push(grads, weight=1.0 + 2.0 * job.rank).wait()
            pulled = job.kv.pull()
            return [float(pulled["x"][0]), float(pulled["y"][0])]

        assert jobs.run(work) == [[-(1 * 1 + 3 * 4) / 4, -(3 * 8) / 4]] * 2


def test_who_rests_takes_part_in_no_round_until_it_pushes_again() -> None:
    """Uneven parts: three rounds of two, two of one alone; then both again, whoever is first."""
    with local_job(workers=2) as jobs:

        def work(job: Job) -> list[float]:
            job.kv.register({"x": np.zeros(1)}, Rule("SGD", lr=1.0))
            seen = []
            for phase in range(2):
                for _ in range(3 if job.rank else 5):
                    job.kv.push({"x": np.full(1, 1.0 + job.rank)}).wait()
                job.rest()
                job.barrier(f"end of {phase}")
                seen.append(float(job.kv.pull()["x"][0]))
            return seen

        assert jobs.run(work) == [[-(3 * 1.5 + 2), -2 * (3 * 1.5 + 2)]] * 2


def test_a_worker_that_finishes_early_leaves_the_others_to_go_on() -> None:
    with local_job(workers=2) as jobs:

        def work(job: Job) -> float:
            job.kv.register({"x": np.zeros(1)}, Rule("SGD", lr=1.0))
            for _ in range(2 if job.rank else 4):
                job.kv.push({"x": np.ones(1)}).wait()
            final = float(job.kv.pull()["x"][0])
            job.close()
            return final

        assert jobs.run(work) == [-4.0, -2.0]


@pytest.mark.parametrize("policy", ["sync", "bounded:1"])
def test_nobody_waits_for_who_is_at_a_barrier_and_behind_it_all_are_level(policy: str) -> None:
    """Uneven loops without a rest: in DDP this hangs. Behind the barrier the rounds are everybody's again."""
    with local_job(workers=2, servers=2, policy=policy, slice_bytes=64) as jobs:

        def work(job: Job) -> list[float]:
            job.kv.register({"x": np.zeros(32)}, Rule("SGD", lr=1.0), reduce="sum")
            seen = []
            for turn in range(3):
                for _ in range(2 if job.rank else 7):
                    job.kv.push({"x": np.ones(32)}).wait()
                if job.rank == turn % 2:
                    time.sleep(0.02)  # whoever comes first
                job.barrier("here")
                seen.append(float(job.kv.pull()["x"][0]))
                job.barrier("seen")
            return seen

        assert jobs.run(work) == [[-9.0, -18.0, -27.0]] * 2
        updates = [server.num_updates for server in jobs[0].stats().servers]
    slices = 4
    assert sum(updates) == slices * (3 * 7 if policy == "sync" else 3 * 9)


@pytest.mark.parametrize("policy", ["sync", "bounded:1", "async"])
def test_who_comes_to_barriers_that_all_have_passed_is_in_the_rounds_again_with_its_next_push(policy: str) -> None:
    """A script that began again comes to old barriers: it must neither stop the others nor wait for their next
    one."""
    back, most = threading.Event(), 1_000_000
    with local_job(workers=2, servers=2, policy=policy, slice_bytes=64, wait_seconds=PATIENCE) as jobs:

        def work(job: Job) -> int:
            job.kv.register({"x": np.zeros(32)}, Rule("SGD", lr=1.0), reduce="sum")
            num_pushes = 0

            def push() -> None:
                nonlocal num_pushes
                job.kv.push({"x": np.ones(32)}).wait()
                num_pushes += 1

            push()
            job.barrier("one")
            job.barrier("two")
            if job.rank == 0:
                while not back.is_set() and num_pushes < most:
                    push()
            else:
                push()
                job.barrier_turns.clear()
                job.barrier("one")
                for _ in range(3):
                    push()
                job.barrier("two")
                push()
                back.set()
            job.barrier("end")
            assert job.kv.pull()["x"][0] == job.kv.pull()["x"][-1]
            return num_pushes

        pushes = jobs.run(work)
        assert pushes[1] == 6 and pushes[0] < most
        found = jobs[0].kv.pull()["x"]
    assert set(found) == {-float(sum(pushes))}
