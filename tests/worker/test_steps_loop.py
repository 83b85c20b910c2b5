"""`job.steps` with workers that join, die and come back: never a step more than was asked for."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.core.rule import Rule
from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.worker.job import Job

NUM_STEPS = 40


def register(job: Job) -> None:
    job.kv.register({"w": np.zeros(1)}, Rule("SGD", lr=1.0))


def work(job: Job, pause: float = 0.0) -> list[int]:
    made = []
    for step in job.steps(NUM_STEPS):
        time.sleep(pause)
        job.kv.push_pull({"w": np.ones(1)}).wait()
        made.append(step)
    return made


def in_thread(job: Job, found: dict[str, Any], pause: float = 0.0) -> threading.Thread:
    def run() -> None:
        try:
            found[job.name] = work(job, pause)
        except Exception as error:  # of one that is killed
            found[f"{job.name} failed"] = error

    thread = threading.Thread(target=run, name=job.name, daemon=True)
    thread.start()
    return thread


def eventually(condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("policy", ["sync", "async", "bounded:2"])
def test_a_worker_that_joins_later_adds_no_step(policy: str) -> None:
    """It is slow with its first step, and the others go on meanwhile: in rounds they wait for it from its loop on."""
    with local_job(workers=2, policy=policy, most_workers=3) as jobs:
        for job in jobs:
            register(job)
        found: dict[str, Any] = {}
        threads = [in_thread(job, found, 0.01) for job in jobs]
        eventually(lambda: jobs[0].step > 5)
        late = jobs.add_worker("worker-2")
        register(late)
        threads.append(in_thread(late, found, 0.1))
        for thread in threads:
            thread.join(PATIENCE)
        assert late.kv.pull()["w"].tolist() == [-NUM_STEPS]
        assert late.step == NUM_STEPS
        if policy == "sync":
            assert found["worker-0"] == list(range(NUM_STEPS))


@pytest.mark.parametrize("at", [0, 7])
def test_of_three_workers_one_dies_and_comes_back(at: int) -> None:
    with local_job(workers=3) as jobs:
        for job in jobs:
            register(job)
        found: dict[str, Any] = {}
        others = [in_thread(job, found, 0.01) for job in (jobs[0], jobs[2])]
        victim = iter(jobs[1].steps(NUM_STEPS))
        for _ in range(at):
            next(victim)
            jobs[1].kv.push_pull({"w": np.ones(1)}).wait()
        next(victim)
        jobs.kill("worker-1")
        back = jobs.add_worker("worker-1")
        assert back.life.number == 2 and back.own_step == at
        register(back)
        others.append(in_thread(back, found))
        for thread in others:
            thread.join(PATIENCE)
        assert jobs[0].kv.pull()["w"].tolist() == [-NUM_STEPS]
        assert found["worker-0"] == found["worker-2"] == list(range(NUM_STEPS))
        assert not set(found["worker-1"]) & set(range(at))


def test_steps_and_progress_alone() -> None:
    with local_job(workers=1) as jobs:
        register(jobs[0])
        assert list(jobs[0].steps(0)) == []
        seen = []
        for _ in jobs[0].steps(4):
            seen.append(jobs[0].progress)
            jobs[0].kv.push({"w": np.ones(1)}).wait()
        assert seen == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("count", [-1, 2.5, True, "9"])
def test_a_number_of_steps_that_cannot_be(count: Any) -> None:
    with local_job(workers=1) as jobs, pytest.raises(ConfigError, match="give the number of steps"):
        jobs[0].steps(count)


def test_a_barrier_without_a_name_says_so() -> None:
    """It was refused by the coordinator, and the worker waited for ten minutes."""
    with local_job(workers=1) as jobs, pytest.raises(ConfigError, match="give a name, a str"):
        jobs[0].barrier(3)  # type: ignore[arg-type]
