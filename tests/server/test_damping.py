"""Damped policies: a gradient that is τ versions stale counts 1/(1+τ), on the primary and on its backup alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from syncline import Rule
from syncline.core.wire.traffic import Committed
from syncline.testing import local_job
from syncline.worker.job import Job

from .conftest import WAIT, House, Waiting, eventually

MakeHouse = Callable[..., House]


def ones(size: int = 16) -> dict[str, np.ndarray]:
    return {"x": np.ones(size, np.float32)}


def test_who_has_missed_updates_counts_less(make_house: MakeHouse) -> None:
    """worker-1 pulled before three updates of worker-0: its own counts a quarter; then it is up to date again."""
    house = make_house(1, 2, policy="async,damped")
    house.register({"x": np.zeros(16, np.float32)})
    fast, slow = house.workers["worker-0"], house.workers["worker-1"]
    for worker in (fast, slow):
        worker.commit("server-0", 1, {}).wait(WAIT)  # nothing in it: its answer is a pull
    for clock in (2, 3, 4):
        fast.commit("server-0", clock, ones()).wait(WAIT)
    assert (house.value("x") == -3.0).all(), "its own pushes are answered with what they made: nothing is stale"
    slow.commit("server-0", 2, ones()).wait(WAIT)
    assert (house.value("x") == -3.25).all()
    slow.commit("server-0", 3, ones()).wait(WAIT)
    assert (house.value("x") == -4.25).all()
    fast.commit("server-0", 5, ones()).wait(WAIT)
    assert (house.value("x") == np.float32(-4.25) - np.float32(1) / np.float32(3)).all()
    stats = house.servers["server-0"].stats()
    assert abs(stats.damping_sum - (3 + 0.25 + 1 + 1 / 3)) < 1e-9 and stats.staleness_max == 3


def test_without_damping_it_counts_in_full(make_house: MakeHouse) -> None:
    """The same with `async`: otherwise the test above would prove nothing."""
    house = make_house(1, 2, policy="async")
    house.register({"x": np.zeros(16, np.float32)})
    fast, slow = house.workers["worker-0"], house.workers["worker-1"]
    slow.commit("server-0", 1, {}).wait(WAIT)
    for clock in (1, 2, 3):
        fast.commit("server-0", clock, ones()).wait(WAIT)
    slow.commit("server-0", 2, ones()).wait(WAIT)
    assert (house.value("x") == -4.0).all()
    stats = house.servers["server-0"].stats()
    assert stats.damping_sum == stats.staleness_count == 4


def test_deltas_and_assigned_values_are_not_gradients(make_house: MakeHouse) -> None:
    for rule, wanted in (("Add", 4.0), ("Assign", 1.0)):
        house = make_house(1, 2, policy="async,damped")
        house.register({"x": np.zeros(16, np.float32)}, rule)
        fast, slow = house.workers["worker-0"], house.workers["worker-1"]
        slow.commit("server-0", 1, {}).wait(WAIT)
        for clock in (1, 2, 3):
            fast.commit("server-0", clock, ones()).wait(WAIT)
        slow.commit("server-0", 2, ones()).wait(WAIT)
        assert (house.value("x") == wanted).all(), rule


def test_a_pull_while_the_backup_applies_changes_nothing(make_house: MakeHouse) -> None:
    """What it counts is found out once: were it found out again after the acknowledgement, when its worker may have
    pulled meanwhile, primary and backup would differ."""
    house = make_house(2, 2, replicas=2, policy="async,damped", threads=2)
    house.register({"x": np.zeros(16, np.float32)})
    (replica_set,) = house.replica_sets.values()
    other = "server-1" if replica_set.primary == "server-0" else "server-0"
    house.seed(replica_set.primary, other)
    fast, slow = house.workers["worker-0"], house.workers["worker-1"]
    slow.commit(replica_set.primary, 1, {}).wait(WAIT)
    for clock in (1, 2, 3):
        fast.commit(replica_set.primary, clock, ones()).wait(WAIT)
    slot, backup = house.slot(replica_set.primary, 0), house.slot(other, 0)
    with backup.lock:  # its backup takes its time
        waiting = Waiting(lambda: slow.commit(replica_set.primary, 2, ones()).wait(WAIT))
        eventually(lambda: slot.in_flight is not None)
        with slot.lock:
            slot.state.seen["worker-1"] = slot.state.version
    assert isinstance(waiting.result(), Committed)
    assert (slot.memory == backup.memory).all()
    assert (house.value("x") == -3.25).all()


def test_a_whole_job_says_what_its_gradients_counted() -> None:
    with local_job(workers=2, policy="async,damped") as jobs:

        def work(job: Job) -> float:
            job.kv.register({"x": np.zeros(4, np.float32)}, Rule("SGD", lr=1.0))
            job.barrier("begin")
            for _ in range(4):
                if job.rank == 0:
                    job.kv.push_pull({"x": np.ones(4, np.float32)}).wait()
            job.barrier("four updates")
            if job.rank == 1:
                job.kv.push_pull({"x": np.ones(4, np.float32)}).wait()
            job.barrier("five updates")
            return float(job.kv.pull()["x"][0])

        assert jobs.run(work) == [np.float32(-4.2)] * 2, "the last one is four versions stale: it counts a fifth"
        stats = jobs[0].stats()
    assert abs(stats.damping_mean - (4 + 0.2) / 5) < 1e-9
