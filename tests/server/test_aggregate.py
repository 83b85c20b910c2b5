"""`--aggregate`: how the gradients of a round become one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline import Rule
from syncline.core.aggregate import Aggregate, aggregated, parse_aggregate
from syncline.errors import ConfigError, SynclineError
from syncline.testing import local_job
from syncline.worker.job import Job

SHAPES = pytest.mark.parametrize(
    "settings",
    [{}, {"servers": 2, "slice_bytes": 64}, {"servers": 2, "replicas": 2}, {"transport": "tcp"}],
    ids=["one server", "two servers", "two replicas", "tcp"],
)
VALUES = (1.0, 2.0, 4.0, 1024.0)


def trained(aggregate: str, values: tuple[float, ...] = VALUES, **settings: Any) -> np.ndarray[Any, Any]:
    """The parameter after one round of SGD at rate 1: the negative aggregate of these gradients."""
    with local_job(workers=len(values), aggregate=aggregate, **settings) as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            start = {"x": np.zeros(40, np.float32), "y": np.zeros((3, 8), np.float32)}
            rules = {"x": Rule("SGD", lr=1.0), "y": Rule("SGD", lr=1.0)}
            job.kv.register(start, rules)
            gradients = {name: np.full(value.shape, values[job.rank], np.float32) for name, value in start.items()}
            job.kv.push_pull(gradients, weight=1.0 + job.rank).wait()
            found = job.kv.pull()
            return np.concatenate([np.asarray(found[name]).reshape(-1) for name in ("x", "y")])

        results = jobs.run(work)
    assert all((one == results[0]).all() for one in results)
    return -results[0]


@SHAPES
def test_each_way(settings: dict[str, Any]) -> None:
    assert (trained("mean", **settings) == (1 + 4 + 12 + 4096) / 10).all()
    assert (trained("sum", **settings) == 1031.0).all()
    assert (trained("median", **settings) == 3.0).all()
    assert (trained("trimmed:0.25", **settings) == 3.0).all()
    assert (trained("median", VALUES[:3], **settings) == 2.0).all()


def test_the_memory_that_it_needs_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trained("median")
    said = [line for line in capsys.readouterr().err.splitlines() if "--aggregate" in line]
    assert said == ["syncline: coordinator: --aggregate median needs the pushes of all 4 workers at once: 1 KiB"]
    trained("norm-clipped:1")
    assert "at once" not in capsys.readouterr().err


@SHAPES
def test_a_push_is_clipped_by_its_whole_norm(settings: dict[str, Any]) -> None:
    """Over all parameters and servers: 64 numbers of 1 have the norm 8."""
    found = trained("norm-clipped:8", (1.0, 4.0), **settings)
    assert np.allclose(found, (1 * 1.0 + 2 * 1.0) / 3, rtol=1e-5), found
    found = trained("norm-clipped:16", (1.0, 4.0), **settings)
    assert np.allclose(found, (1 * 1.0 + 2 * 2.0) / 3, rtol=1e-5), found


def test_who_has_not_pushed_a_parameter_counts_as_zero() -> None:
    """As in the mean. Otherwise a wrong gradient that few workers push would not be trimmed."""
    with local_job(workers=4, aggregate="trimmed:0.25") as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            start = {"x": np.zeros(4, np.float32), "y": np.zeros(4, np.float32)}
            job.kv.register(start, Rule("SGD", lr=1.0))
            names = ("x", "y") if job.rank == 3 else ("y",)
            job.kv.push_pull({name: np.full(4, 1e6 if job.rank == 3 else 2.0, np.float32) for name in names}).wait()
            found = job.kv.pull()
            return np.stack([np.asarray(found[name]) for name in ("x", "y")])

        for found in jobs.run(work):
            assert (found[0] == 0.0).all() and (found[1] == -2.0).all(), found


def test_rates_of_workers_count_before() -> None:
    """Rates 1, 0.25 and 0.25: of the steps 1, 0.5 and 1 the median is 1."""
    with local_job(workers=3, aggregate="median", lr_per_worker=True) as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            job.kv.register({"x": np.zeros(4, np.float32)}, Rule("SGD", lr=0.5))
            job.kv.set(lr=(1.0, 0.25, 0.25)[job.rank])
            job.kv.push_pull({"x": np.full(4, (1.0, 2.0, 4.0)[job.rank], np.float32)}).wait()
            return np.asarray(job.kv.pull()["x"])

        for found in jobs.run(work):
            assert (found == -1.0).all(), found


def test_counters_are_not_clipped() -> None:
    with local_job(workers=2, aggregate="norm-clipped:1") as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            start = {"x": np.zeros(4, np.float32), "count": np.zeros(4, np.int64)}
            job.kv.register(start, Rule("Add"), reduce="sum")
            job.kv.push_pull({"x": np.full(4, 100.0, np.float32), "count": np.full(4, 3)}).wait()
            return np.asarray(job.kv.pull()["count"])

        for found in jobs.run(work):
            assert (found == 6).all(), found


def first_and_weights(gradients: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return gradients[0] + weights.sum()


def wrong_shape(gradients: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return gradients


def not_a_number(gradients: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return gradients[0] * np.nan


def raises(gradients: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raise ValueError("no idea")


NOT_CALLABLE = 3


@SHAPES
def test_a_function_of_ones_own(settings: dict[str, Any]) -> None:
    assert (trained(f"{__name__}:first_and_weights", **settings) == 11.0).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_shape", r"returned an array of shape .* one number for each column"),
        ("not_a_number", r"returned NaN or Inf"),
        ("raises", r"ValueError: no idea"),
        ("NOT_CALLABLE", r"int is not a function"),
        ("nowhere", r"AttributeError.*servers need it as workers do"),
    ],
)
def test_one_that_is_wrong_is_named(name: str, words: str) -> None:
    with pytest.raises(SynclineError, match=rf"--aggregate {__name__}:{name}: .*{words}"):
        trained(f"{__name__}:{name}")


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("middle", {}, "must be one of mean, sum, median"),
        ("trimmed", {}, "more than 0 and less than 0.5"),
        ("trimmed:0.5", {}, "more than 0 and less than 0.5"),
        ("trimmed:0.1", {}, "trims none of 4 workers.*say trimmed:0.25 or more"),
        ("trimmed:0.25", {"least_workers": 3}, "trims none of 3 workers.*say trimmed:0.34 or more"),
        ("norm-clipped:0", {}, "more than 0"),
        ("norm-clipped:-1", {}, "more than 0"),
        ("median", {"exchange": "ring"}, "needs servers"),
        ("median", {"policy": "async"}, "needs --policy sync"),
        ("sum", {"policy": "bounded:1"}, "needs --policy sync"),
        ("median", {"policy": "sync:spare=1"}, "cannot be used with sync:spare=1"),
        ("median", {"codec": "bf16"}, "leave out --codec bf16"),
    ],
)
def test_what_cannot_be_is_refused(text: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words), local_job(workers=4, aggregate=text, **settings):
        pass


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 16, 17, 33])
def test_the_kernels_agree_with_numpy(num_rows: int) -> None:
    rows = np.random.default_rng(num_rows).normal(size=(num_rows, 40_000)).astype(np.float32)
    weights = [1.0] * num_rows
    assert np.allclose(aggregated(Aggregate("median"), list(rows), weights), np.median(rows, axis=0), atol=1e-6)
    how = parse_aggregate("trimmed:0.3")
    assert how is not None
    cut = min(int(0.3 * num_rows), (num_rows - 1) // 2)
    wanted = np.sort(rows, axis=0)[cut : num_rows - cut].mean(axis=0)
    assert np.allclose(aggregated(how, list(rows), weights), wanted, atol=1e-6)
