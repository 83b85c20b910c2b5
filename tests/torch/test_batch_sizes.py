"""Batches of unequal size without a loader of ours: noticed once, where it matters, and only there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job

SAID = "have unequal sizes ("
Train = Callable[[torch.nn.Module, DistributedOptimizer], None]


class Model(torch.nn.Module):
    """Takes its batch in several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, scale: float = 1.0, *, batch: Any = None, pair: Any = None) -> torch.Tensor:
        x = batch["x"] if isinstance(batch, dict) else pair[0] if pair is not None else batch
        out: torch.Tensor = self.inner(x) * scale
        return out


def learn(model: torch.nn.Module, *sizes: int, form: str = "tensor") -> None:
    for size in sizes:
        x = torch.ones(size, 4)
        named = {"tensor": {"batch": x}, "dict": {"batch": {"x": x}}, "pair": {"pair": [x, 1]}}[form]
        model(2.0, **named).mean().backward()


def run(train: Train, workers: int = 2, **settings: Any) -> None:
    def work(job: Job) -> None:
        model = Model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        train(model, optimizer)
        optimizer.zero_grad()

    with local_job(workers=workers, **settings) as jobs:
        jobs.run(work)


@pytest.mark.parametrize("form", ["tensor", "dict", "pair"])
@pytest.mark.parametrize("settings", [{}, {"sync_every": 2}, {"exchange": "ring"}], ids=str)
def test_the_last_batch_is_smaller(form: str, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    def train(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
        for size in (8, 8, 5, 8, 8, 5):
            learn(model, size, form=form)
            optimizer.step()

    run(train, **settings)
    told = [line for line in capsys.readouterr().err.splitlines() if "unequal" in line]
    assert len(told) == 1 and SAID in told[0] and "opt.step(weight=n)" in told[0]


def test_each_batch_of_an_accumulation_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of 2, the last of them of 1. What is evaluated is not trained with. A model that two optimizers use
    sees other numbers of equal batches in each step, and nothing is said of these."""

    def train(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
        for sizes in ((2, 2, 2, 2), (2, 2), (2, 2, 1)):
            learn(model, *sizes)
            with torch.no_grad():
                model(batch=torch.ones(100, 4))
            optimizer.step()

    run(train)
    said = capsys.readouterr().err
    assert said.count(SAID) == 1 and "(2 samples in one step, 1, 2 in the next)" in said


def weighted(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
    for size in (8, 5):
        learn(model, size)
        optimizer.step(weight=size)


def equal(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
    for _ in range(3):
        learn(model, 8)
        optimizer.step()


def by_our_loader(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
    for (x,) in DataLoader(TensorDataset(torch.ones(26, 4)), batch_size=8):
        model(batch=x).mean().backward()
        optimizer.step()


def unequal(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
    for size in (8, 5):
        learn(model, size)
        optimizer.step()


@pytest.mark.parametrize(
    ("train", "settings"),
    [
        (weighted, {}),
        (equal, {}),
        (by_our_loader, {}),
        (unequal, {"policy": "async"}),
        (unequal, {"workers": 1}),
    ],
    ids=["weighted", "equal", "loader", "async", "alone"],
)
def test_nothing_is_said_where_it_does_not_matter(
    train: Train, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(train, **settings)
    assert "unequal" not in capsys.readouterr().err


@pytest.mark.parametrize("train", [weighted, by_our_loader, unequal])
def test_the_hook_goes_when_all_is_said(train: Train) -> None:
    def looked_at(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
        assert len(model._forward_pre_hooks) == 1
        train(model, optimizer)
        assert not model._forward_pre_hooks

    run(looked_at)


def test_models_can_be_copied_and_saved_whole() -> None:
    """A copy has nothing of the job, and works without it."""

    def copied(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        assert b"syncline" not in file.getvalue()
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(batch=torch.ones(3, 4)), model(batch=torch.ones(3, 4)))

    run(copied)
