"""`job.kv`: what can be registered, pushed and pulled, and what is refused with which words."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE

from syncline import LayoutError, Rule, RuleError, WaitTimeout
from syncline.core.wire.traffic import CommitStaged
from syncline.testing import local_job
from syncline.worker.job import Job

SGD = Rule("SGD", lr=1.0)


def test_the_chiefs_values_win_and_the_others_wait_for_them() -> None:
    order = []

    def register(job: Job) -> Any:
        if job.is_chief:
            order.append("chief")
        values = job.kv.register({"a": np.full(3, 1.0 + job.rank, np.float32)}, SGD)
        order.append("known")
        return values["a"].tolist()

    with local_job(workers=3, servers=2) as jobs:
        assert jobs.run(register) == [[1.0] * 3] * 3
    assert order[0] == "chief"


def test_declared_values_come_by_a_pull_into_memory_of_the_caller() -> None:
    """The chief's, also of arrays that are no row of bytes, put together slice by slice."""

    def declare(job: Job) -> list[list[float]]:
        own = {"a": np.full((40, 3), 1.0 + job.rank), "b": np.arange(12.0 + job.rank)[:12].reshape(3, 4).T - job.rank}
        job.kv.declare(own, SGD)
        assert own["a"][0, 0] == 1.0 + job.rank, "what was there stays"
        out = {"a": np.zeros((40, 3)), "b": np.zeros((4, 3))}
        job.kv.pull(out=out)
        return [out["a"].ravel().tolist(), out["b"].ravel().tolist()]

    with local_job(workers=2, servers=2, slice_bytes=128) as jobs:
        wanted = [[1.0] * 120, np.arange(12.0).reshape(3, 4).T.ravel().tolist()]
        assert jobs.run(declare) == [wanted, wanted]


def test_another_layout_is_an_error_that_names_parameter_shapes_and_types() -> None:
    def register(job: Job) -> None:
        shape, dtype = ((10, 84), np.float32) if job.rank else ((10, 120), np.float64)
        job.kv.register({"fc.weight": np.zeros(shape, dtype)}, SGD)

    message = (
        r"worker-1 registered 'fc.weight' as float32\[10, 84\], the job has float64\[10, 120\]; "
        r"start worker-1 with the same model as the rest of the job"
    )
    with local_job(workers=2) as jobs, pytest.raises(LayoutError, match=message):
        jobs.run(register)


@pytest.mark.parametrize("names", [("a", "other"), ("a",), ("b", "c")])
def test_other_names_are_an_error_and_not_a_wait(names: tuple[str, ...]) -> None:
    def register(job: Job) -> None:
        mine = names if job.rank else ("a", "b")
        job.kv.register({name: np.zeros(2) for name in mine}, SGD)

    with local_job(workers=2) as jobs, pytest.raises(LayoutError, match=r"worker-1 (registered|did not register)"):
        jobs.run(register, timeout_seconds=PATIENCE)


def test_calling_again_adds_parameters_while_pushes_go_on() -> None:
    def work(job: Job) -> list[float]:
        job.kv.register({"a": np.zeros(2)}, SGD)
        job.kv.push({"a": np.ones(2)}).wait()
        job.kv.register({"b": np.zeros(3)}, Rule("Add"))
        assert job.kv.register({"a": np.full(2, 9.0)}, SGD)["a"].tolist() == [-1.0, -1.0]
        job.kv.push({"a": np.ones(2), "b": np.full(3, 5.0)}).wait()
        pulled = job.kv.pull()
        return [*pulled["a"].tolist(), *pulled["b"].tolist()]

    with local_job(workers=2, servers=2) as jobs:
        assert jobs.run(work) == [[-2.0, -2.0, 5.0, 5.0, 5.0]] * 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["numpy", "torch", "bfloat16"])
def test_nan_and_inf_in_a_registration(bad: float, kind: str) -> None:
    array: Any = np.array([1.0, bad], np.float32)
    if kind != "numpy":
        array = torch.from_numpy(array).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    with local_job(workers=1) as jobs, pytest.raises(LayoutError, match="registers 'x' with NaN or Inf in it"):
        jobs[0].kv.register({"x": array}, SGD)


def test_two_parameters_of_one_name() -> None:
    with local_job(workers=1) as jobs, pytest.raises(LayoutError, match="two parameters are named 'x'"):
        jobs[0].kv.register([("x", np.zeros(1)), ("x", np.zeros(2))], SGD)


def test_bad_registrations_and_pushes_say_what_is_wrong() -> None:
    with local_job(workers=1) as jobs:
        kv = jobs[0].kv
        with pytest.raises(RuleError, match="integers take Add or Assign, not SGD"):
            kv.register({"n": np.zeros(2, np.int64)}, SGD)
        with pytest.raises(RuleError, match="'x' has no rule"):
            kv.register({"x": np.zeros(2)}, {"y": SGD})
        with pytest.raises(RuleError, match=r"no rule 'LBFGS'.*choose from: .*Adam"):
            Rule("LBFGS")
        with pytest.raises(RuleError, match="SGD has no option 'speed'; it has: lr"):
            Rule("SGD", speed=1)
        with pytest.raises(RuleError, match="Invalid learning rate"):
            kv.register({"x": np.zeros(2)}, Rule("SGD", lr=-1.0))
        with pytest.raises(LayoutError, match="nothing to register"):
            kv.register({}, SGD)
        with pytest.raises(LayoutError, match="has dtype complex64; supported: "):
            kv.register({"x": np.zeros(2, np.complex64)}, SGD)
        with pytest.raises(LayoutError, match="is a list; give NumPy arrays or torch CPU tensors"):
            kv.register({"x": [1.0]}, SGD)
        with pytest.raises(LayoutError, match="reduce = 'max': must be one of mean, sum"):
            kv.register({"x": np.zeros(2)}, SGD, reduce="max")
        kv.register({"x": np.zeros((2, 2), np.float32)}, SGD)
        with pytest.raises(LayoutError, match=r"pushes 'x' as float32\[4\], the job has float32\[2, 2\]"):
            kv.push({"x": np.zeros(4, np.float32)})
        with pytest.raises(LayoutError, match=r"pushes 'x' as float64"):
            kv.push({"x": np.zeros((2, 2))})
        with pytest.raises(LayoutError, match="no parameter is named 'y'; choose from: x"):
            kv.push({"y": np.zeros(4)})
        with pytest.raises(
            LayoutError, match="'x' is sparse, and servers take no sparse gradients yet; give its to_dense"
        ):
            kv.push({"x": torch.zeros(2, 2).to_sparse()})
        with pytest.raises(LayoutError, match="weight = nan"):
            kv.push({"x": np.zeros((2, 2), np.float32)}, weight=float("nan"))
        with pytest.raises(LayoutError, match=r"out\['x'\] is float32\[3\]"):
            kv.pull(out={"x": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("dtype", "as_torch"),
    [(dtype, True) for dtype in ("float16", "bfloat16", "float32", "float64")]
    + [(dtype, False) for dtype in ("float16", "float32", "float64")],  # NumPy has no bfloat16
)
def test_every_float_type_both_ways(dtype: str, as_torch: bool) -> None:
    start: Any = torch.full((5, 3), 2.0, dtype=getattr(torch, dtype))
    grad: Any = torch.full((5, 3), 0.5, dtype=getattr(torch, dtype))
    if not as_torch:
        start, grad = start.numpy(), grad.numpy()
    with local_job(workers=2, servers=2) as jobs:

        def work(job: Job) -> Any:
            job.kv.register({"x": start}, SGD, reduce="sum")
            return job.kv.push_pull({"x": grad}).wait()

        for result in jobs.run(work):
            value = result["x"]
            assert str(value.dtype).removeprefix("torch.") == dtype
            assert value.tolist() == [[1.0] * 3] * 5


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8"])
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_integers_add_and_assign_exactly(dtype: str, policy: str) -> None:
    with local_job(workers=2, policy=policy) as jobs:

        def work(job: Job) -> list[int]:
            rules = {"n": Rule("Add"), "m": Rule("Assign")}
            job.kv.register({"n": np.zeros(3, dtype), "m": np.zeros(3, dtype)}, rules, reduce="sum")
            for _ in range(3):
                job.kv.push({"n": np.full(3, 1 + job.rank, dtype)}).wait()
            if job.is_chief:
                job.kv.push({"m": np.full(3, 7, dtype)}).wait()
            else:
                job.kv.push({}).wait()
            job.barrier("end")
            pulled = job.kv.pull()
            return [*pulled["n"].tolist(), *pulled["m"].tolist()]

        assert jobs.run(work) == [[9, 9, 9, 7, 7, 7]] * 2


def test_any_subset_may_be_pushed_and_versions_tell_of_it() -> None:
    with local_job(workers=1, servers=2, slice_bytes=64) as jobs:
        kv = jobs[0].kv
        kv.register({"a": np.zeros(16, np.float32), "b": np.zeros(16, np.float32), "c": np.zeros((0, 4))}, SGD)
        kv.push({"b": np.ones(16, np.float32)}).wait()
        kv.push({}).wait()
        pulled = kv.pull()
        assert pulled["a"].tolist() == [0.0] * 16 and pulled["b"].tolist() == [-1.0] * 16
        assert pulled.versions["a"] == 0 and pulled.versions["b"] == 1 and pulled["c"].shape == (0, 4)


def test_gradients_lie_in_the_arena_and_are_pushed_from_there() -> None:
    with local_job(workers=1) as jobs:
        kv = jobs[0].kv
        kv.register({"x": np.zeros(1000, np.float32), "t": torch.zeros(2, 2)}, SGD)
        for _ in range(2):
            gradients = kv.gradients()
            gradients["x"][:] = 1.0
            gradients["t"].fill_(2.0)
            out = kv.push_pull(gradients).wait()
        assert isinstance(gradients["t"], torch.Tensor)
        assert out["x"][0] == -2.0 and out["t"].tolist() == [[-4.0] * 2] * 2  # type: ignore[index]


def test_pull_into_given_arrays_of_any_strides() -> None:
    with local_job(workers=1) as jobs:
        kv = jobs[0].kv
        value = np.arange(12, dtype=np.float32).reshape(3, 4)
        kv.register({"x": value, "y": torch.arange(6.0).reshape(2, 3)}, SGD)
        strided = np.zeros((3, 8), np.float32)[:, ::2]
        turned = torch.zeros(3, 2).t()
        pulled = kv.pull(out={"x": strided, "y": turned})
        assert pulled["x"] is strided and (strided == value).all()
        assert turned.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        plain = np.zeros((3, 4), np.float32)
        kv.push_pull({"x": np.ones((3, 4), np.float32)}, out={"x": plain}).wait()
        assert (plain == value - 1).all()


def test_min_version_waits_for_the_update() -> None:
    with local_job(workers=2, policy="async") as jobs:

        def work(job: Job) -> float:
            job.kv.register({"x": np.zeros(1)}, SGD)
            if job.is_chief:
                threading.Event().wait(0.2)
                job.kv.push({"x": np.ones(1)}).wait()
            pulled = job.kv.pull(min_version=1)
            assert pulled.versions["x"] == 1
            return float(pulled["x"][0])

        assert jobs.run(work) == [-1.0, -1.0]


def test_a_wait_that_passes_its_deadline_names_who_is_missing() -> None:
    both, late = threading.Barrier(2), threading.Barrier(3)
    with local_job(workers=3, wait_seconds=PATIENCE) as jobs:

        def work(job: Job) -> str:
            job.kv.register({"x": np.zeros(1)}, SGD)
            if job.rank == 2:
                late.wait()
                job.kv.push({"x": np.ones(1)}).wait()
                return ""
            ticket = job.kv.push({"x": np.ones(1)})
            both.wait(PATIENCE)
            deadline, text = time.monotonic() + PATIENCE, "worker-1"
            while "worker-1" in text and time.monotonic() < deadline:  # whose push may still be on its way
                with pytest.raises(WaitTimeout) as caught:
                    ticket.wait(timeout_seconds=0.2)
                text = str(caught.value).partition(": ")[2]
            late.wait()
            ticket.wait()  # the same ticket can be waited for again
            return str(caught.value)

        texts = jobs.run(work)
    assert re.search(r"step 1 has waited [0-9.]+ s", texts[0]) and "the round waits for worker-2" in texts[0]


def test_a_barrier_that_passes_its_deadline_names_who_is_missing() -> None:
    with (
        local_job(workers=2, wait_seconds=0.3) as jobs,
        pytest.raises(WaitTimeout, match=r"worker-0: the barrier 'here' has waited [0-9.]+ s for worker-1 "),
    ):
        jobs[0].barrier("here")


def test_a_registration_that_passes_its_deadline_names_who_is_missing() -> None:
    with (
        local_job(workers=2, wait_seconds=0.3) as jobs,
        pytest.raises(WaitTimeout, match=r"worker-1: .*registration.* has waited [0-9.]+ s for worker-0"),
    ):
        jobs[1].kv.register({"x": np.zeros(1)}, SGD)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_what_is_sent_again_is_what_was_pushed(house: Callable[..., Any], shares_memory: bool) -> None:
    """The caller fills its array for the next step before the push is acknowledged, and the server dies meanwhile."""
    twin = house(2, shares_memory=shares_memory, policy="async", window=1, slice_bytes=64)
    twin.job.kv.register({"a": np.zeros(64)}, SGD)
    victim, is_hit = twin.servers["server-1"], threading.Event()

    def die(message: Any) -> None:
        if isinstance(message, CommitStaged):
            is_hit.set()
            victim.die()

    victim.fail = die
    mine = {"a": np.ones(64)}
    ticket = twin.job.kv.push(mine)
    mine["a"][:] = 1000.0
    assert is_hit.wait(PATIENCE)
    twin.fail_over("server-1", "server-0")
    ticket.wait()
    np.testing.assert_array_equal(twin.everything()["a"], np.full(64, -1.0))


# -- hyperparameters ----------------------------------------------------------------------------------------


def pushed(job: Job, *names: str) -> list[float]:
    """What one push of ones does to the first number of each."""
    before = {name: float(job.kv.pull([name])[name][0]) for name in names}
    job.kv.push({name: np.ones(2) for name in names}).wait()
    return [round(float(job.kv.pull([name])[name][0]) - before[name], 6) for name in names]


def test_hyperparameters_of_rules_can_be_changed() -> None:
    """From the next push on, of all or of some names; what the chief says counts in a round."""

    def work(job: Job) -> None:
        job.kv.register({"a": np.zeros(2), "b": np.zeros(2)}, {"a": Rule("SGD", lr=1.0), "b": Rule("SGD", lr=2.0)})
        job.kv.register({"mask": np.zeros(2)}, Rule("Assign"))
        job.barrier("registered")
        assert pushed(job, "a", "b") == [-1.0, -2.0]
        job.kv.set(lr=0.5 if job.is_chief else 7.0)
        assert pushed(job, "a", "b") == [-0.5, -0.5]
        job.kv.set(["b"], lr=0.25, maximize=True)
        assert pushed(job, "a", "b") == [-0.5, 0.25]
        assert pushed(job, "b") == [0.25]
        job.kv.set("b", maximize=False)
        assert pushed(job, "a", "b") == [-0.5, -0.25]
        out = job.kv.push_pull({"a": np.ones(2)}).wait()
        assert out is not None and float(out["a"][0]) == -3.0

    with local_job(workers=2, servers=2) as jobs:
        jobs.run(work)


def test_without_rounds_each_workers_numbers_are_its_own() -> None:
    """What was not registered is torch's default again for the push of another worker."""
    with local_job(workers=2, policy="async") as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(2)}, Rule("SGD", lr=1.0)))
        first, second = jobs
        first.kv.set(lr=0.5, weight_decay=100.0)
        assert pushed(first, "x") == [-0.5]
        assert pushed(second, "x") == [-1.0]


def test_the_factor_of_a_plateau_is_on_what_was_set() -> None:
    with local_job(workers=1, stop=("loss.plateau(1)",), on_plateau="lr*0.5") as jobs:
        job = jobs[0]
        job.kv.register({"x": np.zeros(2)}, Rule("SGD", lr=1.0))
        job.kv.set(lr=4.0)
        for loss in (1.0, 2.0):
            job.measures.report_whole({"loss": loss})
        assert job.lr_factor == 0.5 and pushed(job, "x") == [-2.0]


def test_what_cannot_be_set() -> None:
    with local_job(workers=1) as jobs:
        kv = jobs[0].kv
        kv.register({"a": np.zeros(2), "b": np.zeros(2)}, SGD)
        kv.register({"mask": np.zeros(2)}, Rule("Assign"))
        for call, words in (
            (kv.set, r"kv.set\(\) changes nothing; give an option, e.g. kv.set\(lr=0.05\)"),
            (lambda: kv.set(rate=1.0), r"kv.set\(rate\): no rule of this job has that"),
            (lambda: kv.set("mask", lr=1.0), "rule Assign has no option 'lr'; it has: none"),
            (lambda: kv.set("c", lr=1.0), "no parameter is named 'c'; choose from: a, b, mask"),
            (lambda: kv.set("a", lr=1.0), "'a' and 'b' were registered with the same rule and change together"),
            (lambda: kv.set(lr=float("nan")), "lr is NaN"),
            (lambda: kv.push({"a": np.zeros(2)}, lr=0.5), r"a push takes no lr: .* kv.set\(lr=…\) changes it"),
            (lambda: kv.push_pull({"a": np.zeros(2)}, lr=0.5), r"a push takes no lr: .* kv.set\(lr=…\) changes it"),
        ):
            with pytest.raises(ValueError, match=words):
                call()  # type: ignore[no-untyped-call]
        assert pushed(jobs[0], "a") == [-1.0]
