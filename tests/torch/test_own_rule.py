"""An optimizer of the user's own runs on the servers: they import it by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from syncline import Rule
from syncline.errors import RuleError, SynclineError
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of a running mean of gradients."""

    def __init__(self, params: Any, lr: float = 0.125, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(mean.sign() * group["lr"])


class Renamed(SignMomentum):
    """Its constructor has another word for `beta` than its groups."""

    def __init__(self, params: Any, lr: float = 0.125, memory: float = 0.5) -> None:
        super().__init__(params, lr, memory)


class PerRow(SignMomentum):
    """Its state has not the shape of its parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = torch.zeros(2)


NOT_AN_OPTIMIZER = 3
MODEL = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
BATCHES = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(0))


def trained(model: torch.nn.Module, opt: torch.optim.Optimizer, change_rate: bool) -> torch.Tensor:
    for k, batch in enumerate(BATCHES):
        if change_rate and k == 4:
            opt.param_groups[0]["lr"] = 0.25
        model(batch).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize(
    "settings", [{}, {"servers": 2, "slice_bytes": 64}, {"servers": 2, "replicas": 2}], ids=["one", "two", "replicas"]
)
def test_it_trains_as_in_one_process(settings: dict[str, Any]) -> None:
    alone = copy.deepcopy(MODEL)
    expected = trained(alone, SignMomentum(alone.parameters(), beta=0.75), change_rate=True)
    with local_job(workers=2, **settings) as jobs:

        def work(job: Job) -> torch.Tensor:
            model = copy.deepcopy(MODEL)
            own = SignMomentum(model.parameters(), beta=0.75)
            return trained(model, DistributedOptimizer(own, model=model, job=job), change_rate=True)

        for found in jobs.run(work):
            assert torch.equal(found, expected)


def test_its_state_comes_back() -> None:
    with local_job(workers=1) as jobs:
        model = copy.deepcopy(MODEL)
        opt = DistributedOptimizer(SignMomentum(model.parameters()), model=model, job=jobs[0])
        trained(model, opt, change_rate=False)
        state = opt.state_dict()
        assert set(state["state"][0]) == {"mean"} and state["state"][0]["mean"].any()
        opt.load_state_dict(state)
        again = opt.state_dict()
        assert torch.equal(again["state"][0]["mean"], state["state"][0]["mean"])


def test_by_name_alone() -> None:
    with local_job(workers=1) as jobs:
        jobs[0].kv.register({"x": np.zeros(4, np.float32)}, Rule(f"{__name__}:SignMomentum", lr=0.5))
        jobs[0].kv.push_pull({"x": np.ones(4, np.float32)}).wait()
        assert (np.asarray(jobs[0].kv.pull()["x"]) == -0.5).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NOT_AN_OPTIMIZER", "it is no torch.optim.Optimizer"),
        ("nowhere", "AttributeError.*servers need it as workers do"),
    ],
)
def test_a_wrong_name_is_an_error(name: str, words: str) -> None:
    with local_job(workers=1) as jobs, pytest.raises(SynclineError, match=f"rule .*{name}: .*{words}"):
        jobs[0].kv.register({"x": np.zeros(4, np.float32)}, Rule(f"{__name__}:{name}", lr=0.5))


def test_an_option_that_it_does_not_have_is_an_error() -> None:
    with local_job(workers=1) as jobs, pytest.raises(SynclineError, match="unexpected keyword argument 'momentum'"):
        jobs[0].kv.register({"x": np.zeros(4, np.float32)}, Rule(f"{__name__}:SignMomentum", momentum=0.5))


def test_one_of_the_script_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SignMomentum, "__module__", "__main__")
    with local_job(workers=1) as jobs, pytest.raises(RuleError, match="move the class to a module of its own"):
        DistributedOptimizer(SignMomentum(copy.deepcopy(MODEL).parameters()), job=jobs[0])


def test_numbers_that_would_be_lost_are_an_error() -> None:
    with local_job(workers=1) as jobs, pytest.raises(RuleError, match=r"beta = 0\.75.*would have 0\.5"):
        model = copy.deepcopy(MODEL)
        DistributedOptimizer(Renamed(model.parameters(), memory=0.75), model=model, job=jobs[0])


def test_state_that_cannot_be_saved_is_an_error_at_the_first_step() -> None:
    with local_job(workers=1) as jobs:
        jobs[0].kv.register({"x": np.zeros((4, 4), np.float32)}, Rule(f"{__name__}:PerRow"))
        with pytest.raises(SynclineError, match=r"cannot be .rows. of .*PerRow"):
            jobs[0].kv.push_pull({"x": np.ones((4, 4), np.float32)}).wait()
