"""`job.step`: the job's steps so far, the same for whoever comes late; `own_step`: this worker's."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import syncline
from syncline.testing import local_job
from syncline.worker.job import Job

ONE = {"w": np.ones(3)}


def register(job: Job) -> None:
    job.kv.register({"w": np.zeros(3)}, syncline.Rule("Add"))


def push(job: Job, times: int) -> list[int]:
    found = []
    for _ in range(times):
        job.kv.push_pull(ONE).wait()
        found.append(job.step)
    return found


def test_in_rounds_it_is_the_round_for_all(tmp_path: pathlib.Path) -> None:
    """One worker rests for a while: it has made fewer steps, and knows how many the job has made."""

    def work(job: Job) -> list[int]:
        register(job)
        found = push(job, 2)
        job.rest()
        if job.is_chief:
            push(job, 3)
        job.barrier("all")
        return found + push(job, 1)

    with local_job(workers=2, folder=str(tmp_path)) as jobs:
        assert jobs.run(work) == [[1, 2, 6], [1, 2, 6]]
        assert [job.own_step for job in jobs] == [6, 3]
        assert jobs[1].stats().step == 6 and jobs[1].stats().own_step == 3


@pytest.mark.parametrize("policy", ["async", "bounded:8"])
def test_otherwise_it_is_the_pushes_of_all(policy: str, tmp_path: pathlib.Path) -> None:
    def work(job: Job) -> int:
        register(job)
        push(job, 4)
        job.barrier("pushed")
        job.kv.pull()
        return job.step

    with local_job(workers=3, policy=policy, folder=str(tmp_path)) as jobs:
        assert jobs.run(work) == [12, 12, 12]


def test_a_push_under_way_is_counted(tmp_path: pathlib.Path) -> None:
    """Whoever reads it right behind a step has that step in it, whether the answer has come or not."""
    with local_job(workers=1, folder=str(tmp_path)) as jobs:
        register(jobs[0])
        ticket = jobs[0].kv.push(ONE)
        assert jobs[0].step == 1
        ticket.wait()
        assert jobs[0].step == 1


def test_who_joins_later_goes_on_where_the_job_is(tmp_path: pathlib.Path) -> None:
    with local_job(workers=1, most_workers=2, folder=str(tmp_path)) as jobs:
        register(jobs[0])
        push(jobs[0], 5)
        late = jobs.add_worker("worker-1")
        register(late)
        assert (late.step, late.own_step) == (5, 0)
        jobs[0].rest()
        assert push(late, 1) == [6] and late.own_step == 1


def test_local_steps_are_this_workers_own(tmp_path: pathlib.Path) -> None:
    with local_job(workers=1, folder=str(tmp_path), sync_every=3) as jobs:
        jobs[0].stepped()
        assert jobs[0].step == jobs[0].own_step == 1
