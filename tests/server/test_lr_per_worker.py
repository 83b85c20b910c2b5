"""`--lr-per-worker`: in `sync` each gradient counts by its own worker's learning rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline import Rule
from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.worker.job import Job

SHAPES = pytest.mark.parametrize(
    "settings",
    [{}, {"servers": 2, "slice_bytes": 64}, {"servers": 2, "replicas": 2}, {"transport": "tcp"}],
    ids=["one server", "two servers", "two replicas", "tcp"],
)


def trained(rates: list[float], rule: Rule, steps: int = 1, **settings: Any) -> np.ndarray[Any, Any]:
    with local_job(workers=len(rates), lr_per_worker=True, **settings) as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            job.kv.register({"x": np.zeros(64, np.float32)}, rule)
            job.kv.set(lr=rates[job.rank])
            for _ in range(steps):
                job.kv.push_pull({"x": np.full(64, 1.0 + job.rank, np.float32)}, weight=1.0 + job.rank).wait()
            return np.asarray(job.kv.pull()["x"])

        results = jobs.run(work)
    assert all((one == results[0]).all() for one in results)
    return results[0]


@SHAPES
def test_gradients_are_scaled_by_their_own_rate(settings: dict[str, Any]) -> None:
    """Rates 1 and 0.25, gradients 1 and 2, weights 1 and 3 of 4… the sum of wᵢ·lrᵢ·gᵢ over that of wᵢ, per step."""
    found = trained([1.0, 0.25], Rule("SGD", lr=0.5), steps=3, **settings)
    assert (found == -3 * (1 * 1.0 * 1.0 + 2 * 0.25 * 2.0) / 3).all(), found


def test_the_rule_runs_with_the_highest_rate() -> None:
    """Adam's first step is its rate: the highest, whoever is the chief."""
    found = trained([0.125, 0.5], Rule("Adam", lr=0.25))
    assert np.allclose(found, -0.5, rtol=1e-6), found


def test_a_worker_that_has_set_no_rate_has_the_registered_one() -> None:
    with local_job(workers=2, lr_per_worker=True) as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            job.kv.register({"x": np.zeros(4, np.float32)}, Rule("SGD", lr=0.5))
            if job.rank == 1:
                job.kv.set(lr=1.0)
            job.kv.push_pull({"x": np.ones(4, np.float32)}).wait()
            return np.asarray(job.kv.pull()["x"])

        for found in jobs.run(work):
            assert (found == -0.75).all()


def test_without_it_the_chief_counts() -> None:
    """Otherwise the tests above would prove nothing."""
    with local_job(workers=2) as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            job.kv.register({"x": np.zeros(4, np.float32)}, Rule("SGD", lr=0.5))
            job.kv.set(lr=1.0 / (1 + job.rank))
            job.kv.push_pull({"x": np.ones(4, np.float32)}).wait()
            return np.asarray(job.kv.pull()["x"])

        for found in jobs.run(work):
            assert (found == -1.0).all()


@pytest.mark.parametrize("settings", [{"policy": "async"}, {"policy": "bounded:1"}, {"exchange": "ring"}])
def test_elsewhere_it_is_refused(settings: dict[str, Any]) -> None:
    with (
        pytest.raises(ConfigError, match="--lr-per-worker needs"),
        local_job(workers=2, lr_per_worker=True, **settings),
    ):
        pass
