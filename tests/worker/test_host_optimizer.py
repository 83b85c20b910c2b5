"""`HostOptimizer` and `MeanGradients`: the steps of adapters whose arrays are in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline import ConfigError, LayoutError, Rule, RuleError
from syncline.core.layout import in_ranges
from syncline.testing import local_job
from syncline.worker.exchange.commit import Push
from syncline.worker.host_optimizer import HostOptimizer
from syncline.worker.job import Job
from syncline.worker.mean_gradients import MeanGradients

Arrays = dict[str, np.ndarray[Any, Any]]
CHANCE = np.random.default_rng(0)
X, Y = CHANCE.normal(size=(24, 3)).astype(np.float32), CHANCE.normal(size=24).astype(np.float32)
SGD, LR = Rule("SGD", lr=0.1), np.float32(0.1)


def first() -> Arrays:
    return {"w": np.full(3, 0.5, np.float32), "b": np.zeros((), np.float32)}


def gradients(at: Arrays, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Arrays:
    """Of the mean squared error."""
    error = x @ at["w"] + at["b"] - y
    return {"w": 2 * x.T @ error / np.float32(len(y)), "b": np.asarray(2 * error.mean(), np.float32)}


def alone(num_steps: int, rate: float = 0.1, size: int = 8, momentum: float = 0.0) -> Arrays:
    """One process on the global batch."""
    at, speed = first(), {name: np.zeros_like(value) for name, value in first().items()}
    for step in range(num_steps):
        found = gradients(at, X[step * size : step * size + size], Y[step * size : step * size + size])
        for name in at:
            speed[name] = np.float32(momentum) * speed[name] + found[name]
            at[name] = at[name] - np.float32(rate) * speed[name]
    return at


def part(job: Job, step: int, sizes: tuple[int, int] = (4, 4)) -> slice:
    begin = step * sum(sizes) + sum(sizes[: job.rank])
    return slice(begin, begin + sizes[job.rank])


def assert_same(one: Arrays, two: Arrays) -> None:
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{"servers": 2}, {"exchange": "ring"}, {"transport": "tcp"}])
def test_in_sync_the_parameters_equal_those_of_one_process(settings: dict[str, Any]) -> None:
    """With momentum, so that the rule keeps state; 3 and 5 samples, so that weights matter."""

    def train(job: Job) -> tuple[Arrays, Arrays]:
        optimizer = HostOptimizer(
            job, first() if job.is_chief else {n: a + 9 for n, a in first().items()}, SGD_MOMENTUM
        )
        at = optimizer.values
        for step in range(3):
            mine = part(job, step, (3, 5))
            at = optimizer.step(gradients(at, X[mine], Y[mine]), weight=len(Y[mine]))
        return {n: a.copy() for n, a in at.items()}, optimizer.state()["w"]

    with local_job(workers=2, **settings) as jobs:
        (one, state), (two, _) = jobs.run(train)
    assert_same(one, alone(3, momentum=0.9))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert state["momentum_buffer"].shape == (3,) and state["momentum_buffer"].any()


SGD_MOMENTUM = Rule("SGD", lr=0.1, momentum=0.9)


def test_the_weight_is_the_number_of_samples_that_were_handed_out() -> None:
    def train(job: Job) -> list[float]:
        optimizer = HostOptimizer(job, {"a": np.zeros(1, np.float32)}, Rule("SGD", lr=1.0))
        job.samples.taken += 3 if job.rank else 1
        return optimizer.step({"a": np.full(1, -4.0 * job.rank, np.float32)})["a"].tolist()

    with local_job(workers=2) as jobs:
        assert jobs.run(train) == [[3.0], [3.0]]


def test_options_change_from_the_next_step_on_for_all_or_by_name() -> None:
    def train(job: Job) -> list[list[float]]:
        rules = {"a": Rule("SGD", lr=1.0), "b": Rule("SGD", lr=1.0)}
        optimizer = HostOptimizer(job, {n: np.zeros(1, np.float32) for n in rules}, rules)
        down, seen = {n: np.full(1, -1.0, np.float32) for n in rules}, []
        for options in (None, {"lr": 10.0}, {"b": {"lr": 100.0}}, None):
            at = optimizer.step(down, options=options)
            seen.append([float(at["a"][0]), float(at["b"][0])])
        with pytest.raises(RuleError, match="momentun"):
            optimizer.step(down, options={"momentun": 0.9})
        assert job.rates() == {"0": 10.0, "1": 100.0}
        return seen

    with local_job(workers=1) as jobs:
        assert jobs.run(train) == [[[1.0, 1.0], [11.0, 11.0], [21.0, 111.0], [31.0, 211.0]]]


@pytest.mark.parametrize("policy", ["async", "bounded:2"])
def test_without_rounds_every_push_counts_and_pull_brings_them_all(policy: str) -> None:
    def train(job: Job) -> list[float]:
        optimizer = HostOptimizer(job, {"a": np.zeros(1, np.float32)}, Rule("SGD", lr=1.0))
        for _ in range(5):
            optimizer.step({"a": np.full(1, -1.0, np.float32)})
        job.barrier("all")
        return optimizer.pull()["a"].tolist()

    with local_job(workers=2, policy=policy) as jobs:
        assert jobs.run(train) == [[10.0], [10.0]]


def test_with_pull_every_pushes_in_between_bring_nothing() -> None:
    def train(job: Job) -> list[float]:
        optimizer = HostOptimizer(job, {"a": np.zeros(1, np.float32)}, Rule("SGD", lr=1.0))
        seen = [float(optimizer.step({"a": np.full(1, -1.0, np.float32)})["a"][0]) for _ in range(4)]
        job.settle()
        assert optimizer.new_values() is not None and optimizer.new_values() is None
        return [*seen, float(optimizer.values["a"][0])]

    with local_job(workers=1, policy="async", pull_every=3) as jobs:
        assert jobs.run(train) == [[0.0, 0.0, 3.0, 3.0, 4.0]]


def test_clipping_is_of_the_mean_in_rounds_and_of_the_own_push_otherwise() -> None:
    def train(job: Job) -> list[float]:
        optimizer = HostOptimizer(job, {"a": np.zeros(2, np.float32)}, Rule("SGD", lr=1.0), clip_norm=1.0)
        push = np.array([-6.0, 0.0] if job.rank else [0.0, -8.0], np.float32)
        optimizer.step({"a": push})
        job.barrier("all")
        return optimizer.pull()["a"].tolist()

    for policy, expected in (("sync", [0.6, 0.8]), ("async", [1.0, 1.0])):
        with local_job(workers=2, policy=policy) as jobs:
            assert jobs.run(train) == [pytest.approx(expected, abs=1e-5)] * 2


@pytest.mark.parametrize("every", [1, 3])
def test_changes_of_an_optimizer_on_the_worker_are_averaged_by_their_weights(every: int) -> None:
    """Worker 0 moves by 1 and worker 1 by 5 in each step, with weights 3 and 1: the mean is 2 per step. The last
    steps are fewer than H: a rest pushes them too."""

    def train(job: Job) -> tuple[list[float], list[bool]]:
        optimizer = HostOptimizer(job, {"a": np.zeros(1, np.float32)}, None)
        assert optimizer.runs_on_worker
        at, pushed = optimizer.values["a"].copy(), []
        for _ in range(4):
            at += 5 if job.rank else 1  # in place, as Keras with torch does
            new = optimizer.local_step({"a": at}, weight=1 if job.rank else 3)
            pushed.append(new is not None)
            at = at if new is None else new["a"].copy()
        job.rest()
        if (new := optimizer.new_values()) is not None:
            at = new["a"].copy()
        at += 5 if job.rank else 1
        optimizer.local_step({"a": at}, weight=1 if job.rank else 3)
        job.rest()
        return optimizer.values["a"].tolist(), pushed

    with local_job(workers=2, sync_every=every) as jobs:
        assert jobs.run(train) == [([10.0], [(k + 1) % every == 0 for k in range(4)])] * 2


def test_a_worker_that_does_not_ask_for_new_values_undoes_nothing() -> None:
    """A rest has brought the other worker's change; the next push has only what this worker has changed since."""

    def train(job: Job) -> list[float]:
        optimizer = HostOptimizer(job, {"a": np.zeros(1, np.float32)}, None)
        at = np.zeros(1, np.float32)
        for _ in range(2):
            at += 1 + job.rank
            optimizer.local_step({"a": at})
            job.rest()
        return optimizer.values["a"].tolist()

    with local_job(workers=2, sync_every=8) as jobs:
        assert jobs.run(train) == [[3.0], [3.0]]


@pytest.mark.parametrize("settings", [{"policy": "async"}, {"policy": "async", "sync_every": 2}])
def test_without_rounds_changes_count_in_full(settings: dict[str, Any]) -> None:
    def train(job: Job) -> list[float]:
        optimizer = HostOptimizer(job, {"a": np.zeros(1, np.float32)}, None)
        at = optimizer.values["a"].copy()
        for _ in range(6):
            new = optimizer.local_step({"a": at + 1 + job.rank}, weight=1 + job.rank)
            at = at + 1 + job.rank if new is None else new["a"].copy()
        job.barrier("all")
        return optimizer.pull()["a"].tolist()

    with local_job(workers=2, **settings) as jobs:
        assert jobs.run(train) == [[18.0], [18.0]]


def test_an_outer_rule_descends_along_the_change() -> None:
    def train(job: Job) -> list[float]:
        optimizer = HostOptimizer(job, {"a": np.zeros(1, np.float32)}, SGD)
        assert optimizer.runs_on_worker
        for step in range(2):
            optimizer.local_step({"a": np.full(1, 2.0 * (step + 1), np.float32)})
        return optimizer.values["a"].tolist()

    with local_job(workers=1, sync_every=2, outer="SGD(lr=0.5)") as jobs:
        assert jobs.run(train) == [[2.0]]


@pytest.mark.parametrize(("mode", "expected"), [("chief", 1.0), ("mean", 2.5)])
def test_buffers_are_the_chiefs_or_the_weighted_mean(mode: str, expected: float) -> None:
    def train(job: Job) -> list[float]:
        buffers = {"mean": np.full(2, 7.0 + job.rank, np.float32), "count": np.zeros((), np.int64)}
        named = {"a": np.zeros(1, np.float32)}
        optimizer = HostOptimizer(job, named, SGD, buffers=buffers, buffer_mode=mode)
        assert optimizer.buffer_values["mean"].tolist() == [7.0, 7.0]
        own = {"mean": np.full(2, 1.0 + 2 * job.rank, np.float32), "count": np.asarray(5, np.int64)}
        optimizer.step({"a": np.ones(1, np.float32)}, weight=1.0 + 2 * job.rank, buffers=own)
        assert optimizer.buffer_values["count"] == 5
        return optimizer.buffer_values["mean"].tolist()

    with local_job(workers=2) as jobs:
        assert jobs.run(train) == [[expected] * 2] * 2


def test_buffers_that_have_not_changed_are_not_pushed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of frozen layers are among Keras' buffers: the chief sent all of them with every step. In another
    generation, whose servers may have got older values back, they are pushed once more.
    """
    with local_job(workers=1) as jobs:
        job = jobs[0]
        buffers = {"frozen": np.ones(4, np.float32), "mean": np.zeros(2, np.float32)}
        optimizer = HostOptimizer(job, {"a": np.zeros(1, np.float32)}, SGD, buffers=buffers)
        commit, layout, pushed = job.exchange.commit, job.exchange.layout, list[Push]()

        def noted(push: Push, target: Any) -> Any:
            pushed.append(push)
            return commit(push, target)

        monkeypatch.setattr(job.exchange, "commit", noted)

        def step(mean: float) -> list[str]:
            own = {**buffers, "mean": np.full(2, mean, np.float32)}
            optimizer.step({"a": np.ones(1, np.float32)}, buffers=own)
            return [name for name in buffers if in_ranges(pushed[-1].pushed, layout.parameter_id(name))]

        assert step(1.0) == ["frozen", "mean"]
        assert step(2.0) == ["mean"]
        assert step(2.0) == []
        assert optimizer.buffer_values["mean"].tolist() == [2.0, 2.0]
        monkeypatch.setattr(Job, "generation", property(lambda job: 1_000))
        assert step(2.0) == ["frozen", "mean"]


def test_a_late_worker_begins_with_the_jobs_values_and_two_models_do_not_mix() -> None:
    with local_job(workers=1, most_workers=2) as jobs:
        first_one = HostOptimizer(jobs[0], {"a": np.zeros(1, np.float32)}, SGD)
        first_one.step({"a": np.full(1, -10.0, np.float32)})
        second = HostOptimizer(jobs[0], {"a": np.full(1, 4.0, np.float32)}, SGD)
        assert second.values["a"].tolist() == [4.0]
        late = jobs.add_worker("worker-1")
        assert HostOptimizer(late, {"a": np.full(1, 9.0, np.float32)}, SGD).values["a"].tolist() == [1.0]
        assert HostOptimizer(late, {"a": np.full(1, 9.0, np.float32)}, SGD).values["a"].tolist() == [4.0]


def test_what_cannot_be_pushed_is_named() -> None:
    with local_job(workers=1) as jobs:
        optimizer = HostOptimizer(jobs[0], {"a": np.zeros(2, np.float32)}, SGD)
        for wrong, words in (
            ({"b": np.zeros(2, np.float32)}, "'b', which is not registered; there are: a"),
            ({"a": np.zeros(2)}, r"'a' as float64\[2\], the job has float32\[2\]"),
            ({"a": np.zeros(3, np.float32)}, r"'a' as float32\[3\], the job has float32\[2\]"),
        ):
            with pytest.raises(LayoutError, match=words):
                optimizer.step(wrong)
        with pytest.raises(ConfigError, match="gradients to step"):
            optimizer.local_step({"a": np.zeros(2, np.float32)})
        on_worker = HostOptimizer(jobs[0], {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}, None)
        with pytest.raises(ConfigError, match="local_step"):
            on_worker.step({"a": np.zeros(2, np.float32)})
        with pytest.raises(ConfigError, match="'b' is missing"):
            on_worker.local_step({"a": np.zeros(2, np.float32)})


@pytest.mark.parametrize("settings", [{}, {"exchange": "ring"}])
def test_the_mean_gradient_of_a_round_is_weighted(settings: dict[str, Any]) -> None:
    def train(job: Job) -> list[list[float]]:
        means = MeanGradients(job, {"a": np.full(1, 9.0, np.float32), "b": np.zeros(1, np.float32)})
        one = means.mean({"a": np.full(1, 4.0 * job.rank, np.float32), "b": np.ones(1, np.float32)}, 1 + 2 * job.rank)
        seen = [one["a"].tolist(), one["b"].tolist()]
        two = means.mean({"a": np.full(1, 4.0 * job.rank, np.float32)})
        return [*seen, two["a"].tolist(), two["b"].tolist()]

    with local_job(workers=2, **settings) as jobs:
        assert jobs.run(train) == [[[3.0], [1.0], [2.0], [0.0]]] * 2


@pytest.mark.parametrize("settings", [{"policy": "async"}, {"policy": "sync:spare=1"}, {"sync_every": 2}])
def test_a_mean_gradient_needs_rounds_of_all_workers(settings: dict[str, Any]) -> None:
    with local_job(workers=2, **settings) as jobs, pytest.raises(ConfigError, match="distributed optimizer"):
        MeanGradients(jobs[0], {"a": np.zeros(1, np.float32)})
