"""Real servers in one process, killed under their workers: every acknowledged push counts once, on every slice."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core.replica_sets import ReplicaSet
from syncline.testing import local_job
from syncline.testing.local import LocalJob
from syncline.worker.job import Job

#: Push number q of worker w adds 1 to its own cell: the cell that is not 1 names what was lost or doubled.
STEPS, WORKERS = 12, 2


def cell(rank: int, number: int) -> int:
    return (rank * STEPS + number) * 8  # far apart, so that cells lie on all slices


def one_hot(rank: int, number: int) -> Any:
    grad = np.zeros(WORKERS * STEPS * 8)
    grad[cell(rank, number)] = -1.0
    return grad


def work(job: Job, kill: Any, window: int) -> Any:
    rank = int(job.name.rpartition("-")[2])
    out = job.kv.register({"x": np.zeros(WORKERS * STEPS * 8)}, Rule("SGD", lr=1.0), reduce="sum")
    open_: list[Any] = []
    for number in range(STEPS):
        if rank == 0:
            kill(number)
        open_.append(job.kv.push_pull({"x": one_hot(rank, number)}, out=out))
        while len(open_) > window:
            open_.pop(0).wait()
    for ticket in open_:
        ticket.wait()
    job.barrier("end")
    return job.kv.pull()["x"].copy()


def assert_once(values: Any) -> None:
    for rank in range(WORKERS):
        for number in range(STEPS):
            assert values[cell(rank, number)] == 1.0, (rank, number, values[cell(rank, number)])
    assert values.sum() == WORKERS * STEPS


POLICIES = [("sync", 0), ("bounded:2", 0), ("bounded:2", 2), ("async", 0), ("async", 2)]


@pytest.mark.parametrize(("policy", "window"), POLICIES)
@pytest.mark.parametrize("late_seconds", [None, pytest.param(0.0, marks=pytest.mark.proof), 0.002])
def test_a_server_is_killed_and_its_backup_takes_over(policy: str, window: int, late_seconds: float | None) -> None:
    """Between two steps, or within one."""
    with local_job(
        workers=WORKERS, servers=3, policy=policy, window=window, replicas=2, slice_bytes=128, wait_seconds=PATIENCE
    ) as jobs:
        timers = []

        def kill(number: int) -> None:
            if number != STEPS // 2:
                return
            if late_seconds is None:
                jobs.kill("server-1")
                return
            timers.append(threading.Timer(late_seconds, lambda: jobs.kill("server-1")))
            timers[0].name = "Thread-kill"
            timers[0].start()

        found = jobs.run(lambda job: work(job, kill, window))
        for timer in timers:
            timer.join()
        again = jobs.run(lambda job: job.kv.pull()["x"].copy())  # also where it came after the last step
        for values in [*found, *again]:
            assert_once(values)
        assert all("server-1" not in job.exchange.routes.endpoints for job in jobs)


def wait_for_backups(jobs: LocalJob) -> None:
    """Until every slice has one again, on a server that lives."""
    coordinator, deadline = jobs.coordinator, time.monotonic() + PATIENCE
    while True:
        with coordinator.job.lock:
            live = set(coordinator.membership.servers())
            state = coordinator.membership.state
            replica_sets = (
                list(state.replica_sets.values()) if not state.is_changing else [ReplicaSet(0, "")]
            )  # else they are not so yet
            if all(set(replica_set.names) <= live and len(replica_set.names) == 2 for replica_set in replica_sets):
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("policy", "window"), POLICIES)
def test_two_deaths_one_after_the_other(policy: str, window: int) -> None:
    with local_job(
        workers=WORKERS, servers=3, policy=policy, window=window, replicas=2, slice_bytes=128, wait_seconds=PATIENCE
    ) as jobs:

        def kill(number: int) -> None:
            if number == 3:
                jobs.kill("server-0")
            elif number == 9:
                wait_for_backups(jobs)
                jobs.kill("server-2")

        for values in jobs.run(lambda job: work(job, kill, window)):
            assert_once(values)


@pytest.mark.parametrize(("policy", "window"), POLICIES)
def test_connections_break_and_nobody_dies(policy: str, window: int) -> None:
    with local_job(
        workers=WORKERS, servers=2, policy=policy, window=window, slice_bytes=128, wait_seconds=PATIENCE
    ) as jobs:

        def breaks(number: int) -> None:
            for job in jobs:
                endpoints = list(job.exchange.routes.endpoints.values())
                if endpoints and number % 3 == 1:
                    endpoints[number % len(endpoints)].close("hiccup")

        for values in jobs.run(lambda job: work(job, breaks, window)):
            assert_once(values)


def test_the_only_copy_of_a_slice_comes_back_from_a_worker() -> None:
    """One replica, in rounds: what everyone has landed is what the slice was."""
    with local_job(workers=WORKERS, servers=2, slice_bytes=128, wait_seconds=PATIENCE) as jobs:

        def kill(number: int) -> None:
            if number == STEPS // 2:
                jobs.kill("server-1")

        for values in jobs.run(lambda job: work(job, kill, 0)):
            assert_once(values)
