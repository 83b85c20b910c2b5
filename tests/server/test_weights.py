"""In `bounded` and `async` a push counts by its weight over the nominal weight. Numbers are dyadic, checks exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline import Rule
from syncline.errors import ConfigError, SynclineError
from syncline.testing import local_job
from syncline.worker.job import Job

SHAPES = pytest.mark.parametrize(
    "settings",
    [{}, {"servers": 2, "slice_bytes": 64}, {"servers": 2, "replicas": 2}, {"transport": "tcp"}],
    ids=["one server", "two servers", "two replicas", "tcp"],
)
POLICIES = pytest.mark.parametrize("policy", ["bounded:2", "async"])


def pushed(each: list[float], rule: Rule, **settings: Any) -> np.ndarray[Any, Any]:
    """The parameter after each worker has pushed ones with its weight, in the order of ranks."""
    with local_job(workers=len(each), **settings) as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            job.kv.register({"x": np.zeros(64, np.float32), "y": np.zeros(3, np.float32)}, rule)
            for rank, weight in enumerate(each):
                if job.rank == rank:
                    job.kv.push({"x": np.ones(64, np.float32)}, weight=weight).wait()
                job.barrier(f"{rank}")
            found = job.kv.pull()
            assert not found["y"].any(), "nobody has pushed it"
            return np.asarray(found["x"])

        results = jobs.run(work)
    assert all((one == results[0]).all() for one in results)
    return results[0]


@SHAPES
@POLICIES
def test_a_gradient_is_scaled_by_its_weight(policy: str, settings: dict[str, Any]) -> None:
    """1 + 3 + 0.5 + 0 ones, at a rate of 0.5."""
    found = pushed([1.0, 3.0, 0.5, 0.0], Rule("SGD", lr=0.5), policy=policy, **settings)
    assert (found == -2.25).all(), found


@POLICIES
def test_ignored_weights_count_alike(policy: str) -> None:
    found = pushed([1.0, 3.0, 0.5, 0.0], Rule("SGD", lr=0.5), policy=policy, weights="ignore")
    assert (found == -2.0).all(), found


def test_a_delta_is_scaled_and_an_assigned_value_is_not() -> None:
    assert (pushed([1.0, 3.0], Rule("Add"), policy="async") == 4.0).all()
    assert (pushed([1.0, 3.0], Rule("Assign"), policy="async") == 1.0).all()


def test_a_counter_is_scaled_too() -> None:
    with local_job(workers=1, policy="async") as jobs:
        jobs[0].kv.register({"count": np.zeros(4, np.int64)}, Rule("Add"))
        jobs[0].kv.push({"count": np.full(4, 2)}, weight=1.5).wait()
        assert (np.asarray(jobs[0].kv.pull()["count"]) == 3).all()


def test_ignored_weights_in_sync_are_refused() -> None:
    with pytest.raises(ConfigError, match="--weights ignore needs"), local_job(workers=2, weights="ignore"):
        pass


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adamax"])
def test_of_a_rule_that_normalises_the_step_is_scaled(name: str) -> None:
    """Such a rule makes about the same step of a gradient and of three times that gradient."""
    whole = pushed([1.0], Rule(name, lr=0.125), policy="async")
    third = pushed([3.0], Rule(name, lr=0.125), policy="async")
    assert whole.any() and np.allclose(third, 3 * whole, rtol=1e-6)
    again = pushed([3.0, 1.0], Rule(name, lr=0.125), policy="async")
    twice = pushed([1.0, 1.0], Rule(name, lr=0.125), policy="async")
    assert np.allclose(again, twice + 2 * whole, rtol=1e-2), "the next push has the rule's own rate again"


def test_in_sync_the_mean_is_weighted_as_before() -> None:
    assert (pushed([1.0], Rule("SGD", lr=0.5), policy="sync") == -0.5).all()
    assert (pushed([3.0], Rule("SGD", lr=0.5), policy="sync") == -0.5).all(), "a round of one has its own mean"


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(SynclineError, match="must be a number from 0 on"):
        pushed([weight], Rule("SGD", lr=0.5), policy="async")


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_round_without_weight_changes_nothing_and_is_said_once(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_job(workers=2, policy=policy) as jobs:

        def work(job: Job) -> None:
            job.kv.register({"x": np.zeros(4, np.float32)}, Rule("SGD", lr=1.0))
            for _ in range(3):
                job.kv.push_pull({"x": np.ones(4, np.float32)}, weight=0.0).wait()
            job.barrier("all")
            assert not job.kv.pull()["x"].any()

        jobs.run(work)
    said = [
        line for line in capsys.readouterr().err.splitlines() if "weight 0, so this update changes nothing" in line
    ]
    assert len(said) == 1
