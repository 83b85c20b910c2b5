"""`sync` with N workers gives the same numbers as one process on the same global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

STEPS = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
}


class Net(torch.nn.Module):
    """Small, with a tensor that two servers or a small slice size will cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 33)
        self.second = torch.nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result


torch.manual_seed(0)
CHIEFS, OTHERS = Net(), Net()  # made once: torch's random state is one for all threads


def make_model(is_chief: bool = True) -> Net:
    return copy.deepcopy(CHIEFS if is_chief else OTHERS)


def make_batches(sizes: list[int]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For every step one batch per worker, of these sizes."""
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(n, 7, generator=generator), torch.randint(5, (n,), generator=generator)) for n in sizes]
        for _ in range(STEPS)
    ]


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def one_process(make: Callable[[Any], torch.optim.Optimizer], sizes: list[int], clip: float | None = None) -> Net:
    model = make_model()
    optimizer = make(model.parameters())
    for step in make_batches(sizes):
        x, y = torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def workers(
    make: Callable[[Any], torch.optim.Optimizer], sizes: list[int], clip: float | None = None, **settings: Any
) -> list[Net]:
    def train(job: Job) -> Net:
        model = make_model(job.is_chief)  # the chief's values win
        optimizer = DistributedOptimizer(make(model.parameters()), model=model, clip_norm=clip)
        for step in make_batches(sizes):
            x, y = step[job.rank]
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step(weight=len(x))
        return copy.deepcopy(model)

    with local_job(workers=len(sizes), **settings) as jobs:
        return jobs.run(train)


def check_equal(models: list[Net], expected: Net, tolerance: float = 2e-5) -> None:
    for model in models:
        for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(
                value, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    for model in models[1:]:  # every worker holds the very same bits
        for value, other in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(value, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_workers_equal_one_process(name: str) -> None:
    check_equal(workers(OPTIMIZERS[name], [4, 4]), one_process(OPTIMIZERS[name], [4, 4]))


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_four_workers_two_servers_small_slices_uneven_batches(name: str) -> None:
    """Slices of 256 bytes cut every tensor; weights make up for the uneven batches."""
    sizes = [1, 5, 2, 8]
    models = workers(OPTIMIZERS[name], sizes, servers=2, slice_bytes=256)
    check_equal(models, one_process(OPTIMIZERS[name], sizes))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_clip_norm_clips_the_mean_over_all_servers(name: str, servers: int) -> None:
    """Clipped by the norm of the round's mean: not per worker, not per server."""
    models = workers(OPTIMIZERS[name], [3, 6], clip=0.05, servers=servers, slice_bytes=256)
    expected = one_process(OPTIMIZERS[name], [3, 6], clip=0.05)
    check_equal(models, expected)
    unclipped = one_process(OPTIMIZERS["SGD"], [3, 6])
    assert not torch.allclose(expected.first.weight, unclipped.first.weight, atol=1e-4)


def test_a_norm_below_the_bound_is_left_alone() -> None:
    models = workers(OPTIMIZERS["SGD"], [4, 4], clip=1e6, servers=2)
    check_equal(models, one_process(OPTIMIZERS["SGD"], [4, 4]))


def test_muon_steps_matrices_only() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)

    check_equal(workers(make, [4, 4], servers=2), one_process(make, [4, 4]), tolerance=2e-3)


def test_accumulation_equals_one_process() -> None:
    """Two backwards per step, the first under no_sync, as a user of DDP writes it."""
    batches = make_batches([2, 2, 2, 2])

    def train(job: Job) -> Net:
        model = make_model()
        optimizer = DistributedOptimizer(OPTIMIZERS["Adam"](model.parameters()), model=model)
        for step in batches:
            optimizer.zero_grad()
            with optimizer.no_sync():
                (loss_of(model, *step[2 * job.rank]) / 2).backward()
            (loss_of(model, *step[2 * job.rank + 1]) / 2).backward()
            optimizer.step()
        return copy.deepcopy(model)

    with local_job(workers=2) as jobs:
        models = jobs.run(train)
    check_equal(models, one_process(OPTIMIZERS["Adam"], [2, 2, 2, 2]))


@pytest.mark.parametrize("name", ["Adam", "momentum"])
def test_two_equal_runs_are_bit_equal(name: str) -> None:
    """Sums are taken in the order of worker names, whoever comes first."""
    first = workers(OPTIMIZERS[name], [3, 1, 2, 5], servers=2, slice_bytes=512)
    second = workers(OPTIMIZERS[name], [3, 1, 2, 5], servers=2, slice_bytes=512)
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_float_types(dtype: torch.dtype) -> None:
    batches = make_batches([4, 4])

    def make() -> Net:
        return make_model().to(dtype)

    def train(job: Job) -> Net:
        model = make()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for step in batches:
            x, y = step[job.rank]
            optimizer.zero_grad()
            loss_of(model, x.to(dtype), y).backward()
            optimizer.step()
        return copy.deepcopy(model)

    with local_job(workers=2, servers=2) as jobs:
        models = jobs.run(train)
    expected = make()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in batches:
        optimizer.zero_grad()
        total = torch.stack([loss_of(expected, x.to(dtype), y) for x, y in step]).mean()
        total.backward()
        optimizer.step()
    check_equal(models, expected, tolerance=1e-10 if dtype is torch.float64 else 3e-2)
