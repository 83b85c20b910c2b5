"""Memory: what a step takes, it gives back."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from benchmarks.memory import return_what_is_freed
from syncline import Rule
from syncline.testing import local_job
from syncline.worker.job import Job

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="/proc tells the memory")


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_many_steps_do_not_grow(policy: str) -> None:
    """1,500 pushes of 1 MiB: one gradient kept in a hundred shows."""
    return_what_is_freed()  # otherwise the allocator keeps some of it, for each thread
    with local_job(workers=2, servers=2, policy=policy) as jobs:

        def steps(job: Job, count: int) -> None:
            for _ in range(count):
                job.kv.push_pull({"x": np.ones(1 << 18, np.float32)}).wait()

        jobs.run(lambda job: job.kv.register({"x": np.zeros(1 << 18, np.float32)}, Rule("Adam", lr=0.1)) and None)
        jobs.run(lambda job: steps(job, 40))
        gc.collect()
        before = resident_bytes()
        jobs.run(lambda job: steps(job, 750))
        gc.collect()
        assert resident_bytes() - before < 12 << 20


def test_jobs_one_after_the_other_do_not_grow() -> None:
    return_what_is_freed()

    def once() -> None:
        with local_job(workers=2) as jobs:

            def work(job: Job) -> None:
                job.kv.register({"x": np.zeros(1 << 20, np.float32)}, Rule("SGD", lr=1.0))
                job.kv.push_pull({"x": np.ones(1 << 20, np.float32)}).wait()

            jobs.run(work)

    for _ in range(3):
        once()
    grown = []
    for _ in range(6):  # as above
        gc.collect()
        before = resident_bytes()
        for _ in range(10):
            once()
        gc.collect()
        grown.append(resident_bytes() - before)
        if grown[-1] < 10 * (4 << 20):
            break
    # Each job has 4 MiB of parameters and two arenas of 4 MiB.
    assert min(grown) < 10 * (4 << 20), grown
