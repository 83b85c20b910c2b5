"""Gradients that are not finite, as a torch script meets them: refused by name, with every way into the arena."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from syncline.net.memory import MemoryConnection
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer, carriers
from syncline.worker.job import Job

torch.manual_seed(0)
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
NAN = float("nan")


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def backward(model: torch.nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def plain(steps: list[torch.Tensor], lr: float = 0.1, **options: Any) -> list[torch.Tensor]:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    for x in steps:
        backward(model, x)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"servers": 2, "slice_bytes": 64}], ids=["one server", "two servers"])
@pytest.mark.parametrize("sockets", [False, True], ids=["shared memory", "sockets"])
@pytest.mark.parametrize("looks", [False, True], ids=["looked at in the arena", "looked at while it is copied"])
def test_a_bad_gradient_counts_nowhere(
    looks: bool,
    sockets: bool,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Over sockets good slices of the bad step have left early, during backward: they are not pushed either."""
    if sockets:
        monkeypatch.setattr(MemoryConnection, "shares_memory", False)
    if looks:
        monkeypatch.setattr(carriers, "LOOK_BYTES", 1)
        monkeypatch.setattr(carriers, "SMALL_BYTES", 1)

    def train(job: Job) -> list[torch.Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for step in range(3):
            backward(model, batch(0, step))
            if job.rank == 1 and step == 1:
                model[0].weight.grad.data[0, 0] = NAN  # backward's last gradient, after its own bytes have left
            optimizer.step()
        assert (job.exchange.early_bytes == 0) == sockets
        assert job.exchange.clock == 3 and job.exchange.finite.num_refused == job.rank
        return [parameter.detach() for parameter in model.parameters()]

    with local_job(workers=2, **settings) as jobs:
        results = jobs.run(train)
    expected = plain([batch(0, step) for step in range(3)])
    for found in results:
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)
    text = "the push of step 2 was refused: '0.weight' is not finite; the round continues without it"
    assert f"syncline: worker-1: {text}" in capfd.readouterr().err


@pytest.mark.parametrize("small_bytes", [1, 64 << 10], ids=["looked at while it is copied", "looked at in the arena"])
def test_one_that_left_early_is_bad_and_only_another_is_copied_again(
    small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That what is copied at the step is finite says nothing about what left during backward."""
    monkeypatch.setattr(MemoryConnection, "shares_memory", False)
    monkeypatch.setattr(carriers, "LOOK_BYTES", 1)
    monkeypatch.setattr(carriers, "SMALL_BYTES", small_bytes)

    def train(job: Job) -> list[torch.Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        if job.rank == 1:
            model[2].bias.register_hook(lambda gradient: gradient * NAN)
        backward(model, batch(0, 0))
        if job.rank == 1:
            model[0].weight.grad.data.mul_(3.0)
        optimizer.step()
        assert job.exchange.finite.num_refused == job.rank
        return [parameter.detach() for parameter in model.parameters()]

    with local_job(workers=2) as jobs:
        for found in jobs.run(train):
            for one, two in zip(found, plain([batch(0, 0)]), strict=True):
                torch.testing.assert_close(one, two)


@pytest.mark.parametrize("restored", [True, False])
def test_what_another_optimizer_has_left_in_the_arena_is_not_believed(restored: bool) -> None:
    """Both copied the gradient in backward, and found it finite. Then one of them has pushed another one."""

    def train(job: Job) -> tuple[float, float, int]:
        model = torch.nn.Linear(256, 256, bias=False)  # large enough for digests
        torch.nn.init.zeros_(model.weight)
        one, two = (DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model) for _ in range(2))
        model.weight.sum().backward()
        assert model.weight.grad is not None
        model.weight.grad[0, 0] = NAN
        model.weight.grad[0, 1] = 5.0
        one.step()
        if restored:
            model.weight.grad[0, :2] = 1.0
        two.step()
        two.wait()
        first, second = model.weight[0, :2].tolist()
        return first, second, job.exchange.finite.num_refused

    with local_job(workers=2, transport="tcp") as jobs:
        assert jobs.run(train) == [(-1.0, -1.0, 1) if restored else (0.0, 0.0, 2)] * 2


def test_what_only_unscaling_makes_infinite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite while it was copied, times 1/scale it is not: the scaler has found no overflow, so it is an offence."""
    monkeypatch.setattr(carriers, "LOOK_BYTES", 1)

    def train(job: Job) -> int:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-20)
        scaler.scale(model(batch(0, 0)).square().mean()).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
            parameter.grad.view(-1)[0] = 1e37
        scaler.step(optimizer)
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), MODEL.parameters(), strict=True))
        return job.exchange.finite.num_refused

    with local_job(workers=2) as jobs:
        assert jobs.run(train) == [1, 1]


def test_a_scalers_overflow_is_no_offence() -> None:
    """A GradScaler finds its scale by overflowing: rounds are skipped, nobody is refused or quarantined."""

    def train(job: Job) -> tuple[list[torch.Tensor], int, bool, int]:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(batch(0, step)).square().mean()
            if job.rank == 1 and step < 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        finite = job.exchange.finite
        parameters = [parameter.detach() for parameter in model.parameters()]
        return parameters, finite.num_refused, finite.is_quarantined, job.exchange.clock

    with local_job(workers=2, bad_pushes=1) as jobs:
        results = jobs.run(train)
    for found, num_refused, is_quarantined, clock in results:
        assert (num_refused, is_quarantined, clock) == (0, False, 6)
        for one, two in zip(found, plain([batch(0, 4), batch(0, 5)]), strict=True):
            torch.testing.assert_close(one, two)


def test_the_chiefs_word_counts_although_its_gradient_does_not() -> None:
    """Learning rate and clip_norm of the round are the chief's, also in the round from which it is refused."""

    def train(job: Job) -> list[torch.Tensor]:
        model = copy.deepcopy(MODEL)
        inner = torch.optim.SGD(model.parameters(), lr=9.0)
        optimizer = DistributedOptimizer(inner, model=model, clip_norm=0.01)
        optimizer.param_groups[0]["lr"] = 0.5 if job.is_chief else 7.0
        backward(model, batch(0, 0))
        if job.is_chief:
            model[2].bias.grad.fill_(NAN)
        optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    expected = copy.deepcopy(MODEL)
    backward(expected, batch(0, 0))
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    with local_job(workers=2, servers=2, slice_bytes=64) as jobs:
        for found in jobs.run(train):
            for one, two in zip(found, expected.parameters(), strict=True):
                torch.testing.assert_close(one, two.detach())


def test_local_steps_push_a_delta_that_must_be_finite_too() -> None:
    """One worker's local steps end in NaN: it takes the others' mean and is well again."""

    def train(job: Job) -> tuple[list[torch.Tensor], int]:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for step in range(4):
            backward(model, batch(0, step))
            if job.rank == 1 and step == 1:
                model[2].weight.grad[0, 0] = NAN
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()], job.exchange.finite.num_refused

    with local_job(workers=2, sync_every=2) as jobs:
        results = jobs.run(train)
    expected = plain([batch(0, step) for step in range(4)])
    for rank, (found, num_refused) in enumerate(results):
        assert num_refused == rank
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)
