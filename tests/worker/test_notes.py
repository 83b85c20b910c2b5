"""What a script remembers comes back to a worker that is started again, without a checkpoint."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.core.leasing.loader import Loader
from syncline.core.rule import Rule
from syncline.testing import local_job
from syncline.worker.checkpoint import resume
from syncline.worker.checkpoint.resume import MOST_BYTES
from syncline.worker.data.loop import Loop
from syncline.worker.job import Job


class Counter:
    """A scheduler, as far as `job.state` is concerned."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def push(job: Job, counter: Counter, times: int) -> None:
    for _ in range(times):
        job.kv.push({"x": np.ones(4)}).wait()
        counter.count += 1


def begin(job: Job) -> Counter:
    job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
    counter = Counter()
    job.state["counter"] = counter
    return counter


def is_noted(jobs: Any, name: str, count: int) -> bool:
    """Whether the coordinator has a note of this worker with this count."""
    return f'"count",{count}'.encode() in jobs.coordinator.debug_state().script_notes.get(name, b"")


def wait_for_note(jobs: Any, name: str, counter: Counter, job: Job) -> None:
    """Until the coordinator has the newest state: a note is taken at a boundary, so there is one after it."""
    until = time.monotonic() + PATIENCE
    while not is_noted(jobs, name, counter.count - 1):
        assert time.monotonic() < until
        time.sleep(0.01)
        push(job, counter, 1)


def test_outside_of_rounds_a_worker_gets_its_own_state_back() -> None:
    """The other one is somewhere else: each has a schedule of its own."""
    with local_job(workers=2, policy="async") as jobs:
        counters = [begin(job) for job in jobs]
        push(jobs[0], counters[0], 50)
        wait_for_note(jobs, "worker-0", counters[0], jobs[0])
        wait_for_note(jobs, "worker-1", counters[1], jobs[1])
        made = counters[1].count
        jobs.kill("worker-1")
        back = jobs.add_worker("worker-1")
        assert back.life.number == 2 and back.own_step == made
        assert abs(begin(back).count - made) <= 1


def test_in_rounds_a_worker_gets_the_state_of_one_that_lives() -> None:
    """It has gone on meanwhile, and its schedule with it."""
    with local_job(workers=2) as jobs:
        counters = jobs.run(begin)
        jobs.run(lambda job: push(job, counters[int(job.name[-1])], 5))
        jobs.kill("worker-1")
        push(jobs[0], counters[0], 30)
        wait_for_note(jobs, "worker-0", counters[0], jobs[0])
        back = jobs.add_worker("worker-1")
        assert back.step == jobs[0].step == counters[0].count
        assert abs(begin(back).count - counters[0].count) <= 1


def test_a_worker_that_comes_for_the_first_time_gets_the_chiefs_state() -> None:
    with local_job(workers=1, policy="async", most_workers=2) as jobs:
        counter = begin(jobs[0])
        wait_for_note(jobs, "worker-0", counter, jobs[0])
        late = jobs.add_worker("worker-1")
        assert late.life.number == 1 and late.own_step == 0
        assert abs(begin(late).count - counter.count) <= 1


def test_what_is_large_is_left_out_and_said_and_the_rest_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    with local_job(workers=2, policy="async") as jobs:
        counter = begin(jobs[0])
        jobs[0].state["average"] = np.zeros(MOST_BYTES + 8, np.uint8)
        wait_for_note(jobs, "worker-0", counter, jobs[0])
        jobs.kill("worker-0")
        back = jobs.add_worker("worker-0")
        assert abs(begin(back).count - counter.count) <= 1
        back.state["average"] = np.ones(1, np.uint8)
        assert back.state["average"].tolist() == [1]
    assert "job.state['average'] has more than 8 MiB" in capfd.readouterr().err


def test_an_epoch_begins_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler steps between two epochs, and the optimizer does not: a note of the same step may lack it. Here no
    other note is ever due."""
    monkeypatch.setattr(resume, "NOTE_SECONDS", 1e6)
    with local_job(workers=1, policy="async") as jobs:
        counter, until = begin(jobs[0]), time.monotonic() + PATIENCE
        for epoch in range(3):
            with Loop(jobs[0], "numbers", epoch, Loader(4, 2)) as loop:
                while not is_noted(jobs, "worker-0", epoch):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                while loop.next() is not None:
                    loop.hand_out()
                    jobs[0].kv.push({"x": np.ones(4)}).wait()
                    loop.comes_back()
            counter.count += 1


def test_a_first_life_of_a_job_asks_for_nothing() -> None:
    with local_job(workers=1) as jobs:
        counter = begin(jobs[0])
        push(jobs[0], counter, 3)
        assert counter.count == 3 and jobs[0].life.number == 1 and jobs[0].own_step == 3


def test_what_is_large_comes_back_from_a_checkpoint(tmp_path: pathlib.Path) -> None:
    """The note of a worker that lives has the small things, as they are now."""
    with local_job(workers=2, policy="async", checkpoint=str(tmp_path / "saves")) as jobs:
        counter = begin(jobs[0])
        begin(jobs[1])
        jobs[0].state["average"] = np.full(MOST_BYTES + 8, 7, np.uint8)
        push(jobs[0], counter, 1)
        assert jobs[0].save()
        wait_for_note(jobs, "worker-0", counter, jobs[0])
        jobs.kill("worker-0")
        back = jobs.add_worker("worker-0")
        assert abs(begin(back).count - counter.count) <= 1
        back.state["average"] = np.zeros(MOST_BYTES + 8, np.uint8)
        assert back.state["average"][0] == 7
