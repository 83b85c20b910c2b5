"""A step of a torch job in `async` counts by its samples over those of the chief's first step."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker import nominal
from syncline.worker.job import Job


def model_of(job: Job) -> tuple[torch.nn.Parameter, DistributedOptimizer]:
    parameter = torch.nn.Parameter(torch.zeros(8))
    return parameter, DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), job=job)


def step(parameter: torch.nn.Parameter, opt: DistributedOptimizer, weight: float) -> None:
    parameter.grad = torch.ones(8)
    opt.step(weight=weight)
    opt.zero_grad()


@pytest.mark.parametrize("policy", ["async", "bounded:2"])
def test_the_chiefs_first_step_counts_in_full(policy: str) -> None:
    """worker-1 steps first, with a quarter of the chief's samples: it waits to hear what counts in full."""
    with local_job(workers=2, policy=policy) as jobs:

        def work(job: Job) -> float:
            parameter, opt = model_of(job)
            if job.rank == 1:
                step(parameter, opt, 8.0)
            else:
                step(parameter, opt, 32.0)
                step(parameter, opt, 16.0)
            job.barrier("all")
            opt.pull()
            return float(parameter.detach()[0])

        assert jobs.run(work) == [-0.5 * (1 + 0.5 + 0.25)] * 2


def test_a_chief_that_makes_no_step_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nominal, "CHIEF_SECONDS", 0.2)
    with local_job(workers=2, policy="async") as jobs:

        def work(job: Job) -> float:
            parameter, opt = model_of(job)
            if job.rank == 1:
                step(parameter, opt, 8.0)
                step(parameter, opt, 4.0)
            job.barrier("all")
            opt.pull()
            return float(parameter.detach()[0])

        assert jobs.run(work) == [-0.75] * 2


def test_ignored_weights_count_alike() -> None:
    with local_job(workers=1, policy="async", weights="ignore") as jobs:

        def work(job: Job) -> float:
            parameter, opt = model_of(job)
            for weight in (32.0, 8.0):
                step(parameter, opt, weight)
            return float(parameter.detach()[0])

        assert jobs.run(work) == [-1.0]


def test_a_short_first_batch_is_not_the_nominal_one() -> None:
    """Four samples in batches of eight: what counts in full is a batch of eight."""
    with local_job(workers=1, policy="async") as jobs:

        def work(job: Job) -> float:
            parameter, opt = model_of(job)
            for _ in DataLoader(TensorDataset(torch.zeros(4, 1)), 8):
                parameter.grad = torch.ones(8)
                opt.step()
            return float(parameter.detach()[0])

        assert jobs.run(work) == [-0.25]
