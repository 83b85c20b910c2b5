"""`job.merge`: workers come together as to a barrier, and each gets the weighted means of what all have brought."""

from __future__ import annotations

import math

import pytest

from syncline.core.metrics import weighted_means
from syncline.testing import local_job
from syncline.worker.job import Job


def test_weighted_means() -> None:
    reports = [{"a": (1.0, 1.0), "b": (5.0, 0.0)}, {"a": (4.0, 2.0), "b": (7.0, 1.0), "c": (math.nan, 1.0)}]
    assert weighted_means(reports) == {"a": 3.0, "b": 7.0}
    assert weighted_means([]) == {}


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_all_workers_get_the_same_means(policy: str) -> None:
    with local_job(workers=3, policy=policy) as jobs:

        def work(job: Job) -> list[dict[str, float]]:
            first = job.merge("m", {"loss": (float(job.rank), float(job.rank))})
            second = job.merge("m", {"rate": (0.5, 1.0)} if job.is_chief else {})
            job.barrier("m2")
            return [first, second]

        assert jobs.run(work) == [[{"loss": 5 / 3}, {"rate": 0.5}]] * 3


def test_a_worker_that_skipped_turns_meets_the_others() -> None:
    """As a restarted one does: the turn is given, not counted. Of the last turn, a late one gets the means."""
    with local_job(workers=2) as jobs:

        def work(job: Job) -> list[dict[str, float]]:
            found = [job.merge("m", {"x": (float(job.rank), 1.0)}, turn=turn) for turn in (3, 4)]
            return [*found, job.merge("m", {"x": (9.0, 1.0)}, turn=4), job.merge("m", {"x": (9.0, 1.0)}, turn=2)]

        assert jobs.run(work) == [[{"x": 0.5}, {"x": 0.5}, {"x": 0.5}, {}]] * 2
