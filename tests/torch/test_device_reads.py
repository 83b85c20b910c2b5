"""New parameters on a GPU are there for whoever reads them, by whatever way, though `step()` does not wait for them.

Each test runs over a GPU where there is one, and over a twin whose copies happen late or at random.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

SMALL_SLICES = {"slice_bytes": 256}


def ones_as_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def by_state_dict(model: nn.Module, opt: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(model.state_dict().values())


def by_parameters(model: nn.Module, opt: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(model.parameters())


def by_attributes(model: nn.Module, opt: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    return [dict(m._parameters)[name] for m in model.modules() for name in m._parameters]


def by_a_copy(model: nn.Module, opt: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(copy.deepcopy(model).parameters())


def by_waiting(model: nn.Module, opt: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    opt.wait()
    return kept


def by_pulling(model: nn.Module, opt: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    opt.pull()
    return kept


def by_the_state_of_the_optimizer(model: nn.Module, opt: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    opt.state_dict()
    return kept


READS = [
    by_state_dict,
    by_parameters,
    by_attributes,
    by_a_copy,
    by_waiting,
    by_pulling,
    by_the_state_of_the_optimizer,
]


@pytest.mark.parametrize("read", READS)
def test_new_parameters_are_there_for_whoever_reads_them(device: str, read: Any) -> None:
    def work(job: Job) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(5, 30), nn.Linear(30, 2), nn.Linear(2, 2)).to(device)
        model[2].weight.data = model[2].weight.data.t()  # does not lie in the flat memory
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        kept = list(model.parameters())
        for _ in range(3):
            ones_as_gradients(model)
            opt.step()
        return [tensor.detach().cpu().clone() for tensor in read(model, opt, kept)]

    with local_job(workers=1, **SMALL_SLICES) as jobs:
        (found,) = jobs.run(work)
    assert len(found) == 6
    for tensor in found:
        assert torch.equal(tensor, torch.full_like(tensor, -3.0))


@pytest.mark.parametrize("how", ["no overlap", "no model", "compiled", "compiled later"])
def test_where_reads_cannot_be_seen_everything_is_there_after_the_step(device: str, how: str) -> None:
    def work(job: Job) -> list[torch.Tensor]:
        inner = nn.Sequential(nn.Linear(5, 30, bias=False), nn.Linear(30, 2, bias=False)).to(device)
        model: nn.Module = inner
        for parameter in inner.parameters():
            nn.init.zeros_(parameter)
        if how == "compiled":
            model = torch.compile(inner, backend="eager")  # type: ignore[assignment]
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = DistributedOptimizer(sgd, model=None if how == "no model" else model, overlap=how != "no overlap")
        if how == "compiled later":
            model = torch.compile(inner, backend="eager")  # type: ignore[assignment]
        x = torch.ones(1, 5, device=device)
        found = []
        kept = list(inner.parameters())
        for _ in range(3):
            if how.startswith("compiled"):
                found.append(model(x).sum().detach().cpu())
            for parameter in kept:
                parameter.grad = torch.ones_like(parameter)
            opt.step()
        return [parameter.detach().cpu().clone() for parameter in kept] + found

    with local_job(workers=1, **SMALL_SLICES) as jobs:
        (found,) = jobs.run(work)
    torch._dynamo.reset()
    for tensor in found[:2]:
        assert torch.equal(tensor, torch.full_like(tensor, -3.0))
    # x is 1: layer one gives 5 w each, layer two 30 * 5 w * w each, two of them.
    assert [float(value) for value in found[2:]] == [300.0 * n * n for n in range(3)][: len(found) - 2]


def test_a_model_that_moves_and_grows(device: str) -> None:
    """Tensors in other memory, a group that comes later, a second optimizer on the same module."""

    def work(job: Job) -> list[torch.Tensor]:
        model, more = nn.Linear(5, 30).to(device), nn.Linear(5, 30).to(device)
        tensors = [*model.parameters(), *more.parameters()]
        for tensor in tensors:
            nn.init.zeros_(tensor)
        one = DistributedOptimizer(torch.optim.SGD([model.weight], lr=1.0), model=model)
        two = DistributedOptimizer(torch.optim.SGD([model.bias], lr=2.0), model=model)
        for step in range(3):
            ones_as_gradients(model)
            ones_as_gradients(more)
            one.step()
            two.step()
            if step == 0:
                model.to(torch.float64).to(torch.float32)
            if step == 1:
                one.add_param_group({"params": list(more.parameters()), "lr": 4.0})
        assert [id(p) for p in model.parameters()] == [id(t) for t in tensors[:2]]
        return [tensor.detach().cpu().clone() for tensor in tensors]

    with local_job(workers=1, **SMALL_SLICES) as jobs:
        (found,) = jobs.run(work)
    assert [float(tensor.flatten()[0]) for tensor in found] == [-3.0, -6.0, -4.0, -4.0]
    assert all(bool((tensor == tensor.flatten()[0]).all()) for tensor in found)
