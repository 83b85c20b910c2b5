"""What is given again is recognised, and what only looks like it is not: a push takes the numbers of the moment."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from syncline import LayoutError, Rule
from syncline.testing import local_job
from syncline.worker.job import Job

SGD = Rule("SGD", lr=1.0)


@pytest.fixture
def job() -> Any:
    with local_job(workers=1) as jobs:
        yield jobs.jobs[0]


def value(job: Job, name: str = "x") -> list[float]:
    return np.asarray(job.kv.pull([name])[name]).reshape(-1).tolist()


def test_the_same_arrays_with_other_numbers(job: Job) -> None:
    job.kv.register({"x": np.zeros(2)}, SGD)
    grads, out = {"x": np.ones(2)}, {"x": np.zeros(2)}
    for k in range(4):
        grads["x"][...] = k
        job.kv.push_pull(grads, out=out).wait()
    assert out["x"].tolist() == [-6.0, -6.0]


def test_the_same_names_with_other_arrays(job: Job) -> None:
    job.kv.register({"x": np.zeros(2)}, SGD)
    grads = {"x": np.ones(2)}
    job.kv.push(grads).wait()
    grads["x"] = np.full(2, 5.0)
    job.kv.push(grads).wait()
    assert value(job) == [-6.0, -6.0]


def test_other_names_of_the_same_number(job: Job) -> None:
    job.kv.register({"x": np.zeros(2), "y": np.zeros(2)}, SGD)
    array = np.ones(2)
    job.kv.push({"x": array}).wait()
    job.kv.push({"y": array}).wait()
    assert value(job, "x") == value(job, "y") == [-1.0, -1.0]


def test_from_the_arena_and_from_elsewhere_in_turns(job: Job) -> None:
    job.kv.register({"x": np.zeros(2)}, SGD)
    own, inside = {"x": np.full(2, 10.0)}, job.kv.gradients()
    for _ in range(3):
        inside["x"][...] = 1.0
        job.kv.push(inside).wait()
        job.kv.push(own).wait()
    assert value(job) == [-33.0, -33.0]


def test_an_array_whose_shape_was_changed_in_place_is_looked_at_again(job: Job) -> None:
    job.kv.register({"x": np.zeros(4)}, SGD)
    grads = {"x": np.ones(4)}
    job.kv.push(grads).wait()
    grads["x"].shape = (2, 2)
    with pytest.raises(LayoutError, match=r"float64\[2, 2\]"):
        job.kv.push(grads)


def test_a_tensor_that_was_given_other_memory_is_looked_at_again(job: Job) -> None:
    job.kv.register({"x": torch.zeros(3)}, SGD)
    grads, out = {"x": torch.ones(3)}, {"x": torch.zeros(3)}
    job.kv.push_pull(grads, out=out).wait()
    grads["x"].data = torch.full((3,), 4.0)
    out["x"].data = torch.zeros(3)
    job.kv.push_pull(grads, out=out).wait()
    assert out["x"].tolist() == [-5.0] * 3


def test_strided_arrays_given_again(job: Job) -> None:
    job.kv.register({"x": np.zeros((2, 3))}, SGD)
    base, back = np.ones((3, 2)), np.zeros((3, 2))
    grads, out = {"x": base.T}, {"x": back.T}
    for k in (1.0, 2.0):
        base[...] = k
        job.kv.push_pull(grads, out=out).wait()
        assert (back == (-1.0 if k == 1.0 else -3.0)).all()


def test_a_registration_in_between(job: Job) -> None:
    job.kv.register({"x": np.zeros(2)}, SGD)
    grads, out = {"x": np.ones(2)}, {"x": np.zeros(2)}
    job.kv.push_pull(grads, out=out).wait()
    job.kv.register({"y": np.zeros(2)}, SGD)
    job.kv.push_pull(grads, out=out).wait()
    assert out["x"].tolist() == [-2.0, -2.0] and value(job, "y") == [0.0, 0.0]


def test_gradients_are_not_kept_alive(job: Job) -> None:
    job.kv.register({"x": np.zeros(2)}, SGD)
    array = np.ones(2)
    job.kv.push({"x": array}).wait()
    known = weakref.ref(array)
    del array
    gc.collect()
    assert known() is None


def test_results_of_two_pulls_are_two_results(job: Job) -> None:
    """The arrays may be the caller's own and the same; the dict is a new one each time."""
    job.kv.register({"x": np.zeros(2)}, SGD)
    grads, out = {"x": np.ones(2)}, {"x": np.zeros(2)}
    one = job.kv.push_pull(grads, out=out).wait()
    assert one is not None
    one["x"] = np.full(2, 9.0)
    two = job.kv.push_pull(grads, out=out).wait()
    assert two is not None and two["x"] is out["x"] and two["x"].tolist() == [-2.0, -2.0]
