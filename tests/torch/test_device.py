"""A model on a GPU: the same numbers as one process, though copies go beside the script's own work.

Each test runs over a GPU where there is one, and over a twin whose copies happen late or at random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

STEPS = 5
SMALL_SLICES = {"slice_bytes": 256}
Body = Callable[[nn.Module, Any, torch.Tensor, int], None]


class Net(nn.Module):
    """Several slices of small ones, a tied weight, a part that is not always used, one that never is."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.one = nn.Linear(6, 40)
        self.two = nn.Linear(40, 6)
        self.extra = nn.Linear(6, 6)
        self.never = nn.Parameter(torch.ones(33))
        self.to(dtype)

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        x = self.two(torch.relu(self.one(x)))
        x = self.extra(x) if extra else x
        return F.linear(x, self.one.weight)


torch.manual_seed(0)
NET, NET_16 = Net(), Net(torch.bfloat16)
INPUTS = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: torch.Tensor, **how: Any) -> torch.Tensor:
    return model(x.to(next(iter(model.parameters())).dtype), **how).float().square().mean()


def plain(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
    opt.zero_grad()
    loss_of(model, x).backward()
    opt.step()


def sometimes_more(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
    """Parameters without a gradient in some steps."""
    opt.zero_grad()
    loss_of(model, x, extra=bool(step % 2)).backward()
    opt.step()


def clipped(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
    opt.zero_grad()
    loss_of(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    opt.step()


def one_edited(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
    """Only the sign of one item, past the version counter."""
    opt.zero_grad()
    loss_of(model, x).backward()
    model.two.weight.grad.data[3, 7] *= -1.0
    opt.step()


def two_backwards(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
    opt.zero_grad()
    loss_of(model, x).backward()
    loss_of(model, 2 * x, extra=True).backward()
    opt.step()


def accumulated(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
    opt.zero_grad()
    if isinstance(opt, DistributedOptimizer):
        with opt.no_sync():
            loss_of(model, x).backward()
    else:
        loss_of(model, x).backward()
    loss_of(model, 2 * x).backward()
    opt.step()


def kept_gradients(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
    """Gradients are zeroed in place, and one is taken away after backward."""
    opt.zero_grad(set_to_none=False)
    loss_of(model, x).backward()
    if step == 2:
        model.two.bias.grad = None
    opt.step()


def scaled(model: nn.Module, opt: Any, x: torch.Tensor, step: int, unscale: bool = False) -> None:
    scaler = torch.amp.GradScaler(x.device.type, init_scale=64.0)
    opt.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    if unscale:
        scaler.unscale_(opt)
    scaler.step(opt)


def unscaled(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
    scaled(model, opt, x, step, unscale=True)


def train(job: Job | None, device: str, net: nn.Module, make: Any, body: Body, **how: Any) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(net).to(device)
    opt = make(model.parameters())
    if job is not None:
        opt = DistributedOptimizer(opt, model=model, **how)
    for step, x in enumerate(INPUTS):
        body(model, opt, x.to(device), step)
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        coarse = value.dtype == torch.bfloat16
        torch.testing.assert_close(found[name], value, rtol=2e-2 if coarse else 1e-4, atol=1e-2 if coarse else 1e-5)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("net", [NET, NET_16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [adam, sgd])
def test_one_worker_equals_one_process(device: str, make: Any, net: nn.Module, servers: int) -> None:
    expected = train(None, device, net, make, plain)
    with local_job(workers=1, servers=servers, **SMALL_SLICES) as jobs:
        (found,) = jobs.run(lambda job: train(job, device, net, make, plain))
    assert_close(found, expected)


BODIES = [
    sometimes_more,
    clipped,
    one_edited,
    two_backwards,
    accumulated,
    kept_gradients,
    scaled,
    unscaled,
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "at the step"])
@pytest.mark.parametrize("body", BODIES)
def test_what_scripts_do_to_gradients(device: str, body: Body, overlap: bool) -> None:
    expected = train(None, device, NET, sgd, body)
    with local_job(workers=1, **SMALL_SLICES) as jobs:
        (found,) = jobs.run(lambda job: train(job, device, NET, sgd, body, overlap=overlap))
    assert_close(found, expected)


def test_two_workers_make_the_same_rounds_as_on_a_cpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(job: Job, device: str) -> dict[str, torch.Tensor]:
        def body(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
            plain(model, opt, x * (1.0 + job.rank), step)

        return train(job, device, NET, adam, body)

    with local_job(workers=2, servers=2, **SMALL_SLICES) as jobs:
        found = jobs.run(lambda job: work(job, device))
    monkeypatch.undo()
    with local_job(workers=2) as jobs:
        expected = jobs.run(lambda job: work(job, "cpu"))
    for each in found:
        assert_close(each, expected[0])


def delayed(device: str, make: Any) -> dict[str, torch.Tensor]:
    """One process in which every gradient is one update old, as with a window of 1."""
    seen = copy.deepcopy(NET).to(device)
    newest = copy.deepcopy(NET).to(device)
    opt = make(newest.parameters())
    for x in INPUTS:
        seen.zero_grad()
        loss_of(seen, x.to(device)).backward()
        for mine, other in zip(newest.parameters(), seen.parameters(), strict=True):
            mine.grad = None if other.grad is None else other.grad.clone()
            other.data.copy_(mine.data)
        opt.step()
    return {name: value.cpu() for name, value in newest.state_dict().items()}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("policy", ["async", "bounded:2"])
def test_a_window_of_one_is_one_update_behind(device: str, policy: str, make: Any, servers: int) -> None:
    def work(job: Job) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(NET).to(device)
        opt = DistributedOptimizer(make(model.parameters()), model=model)
        for step, x in enumerate(INPUTS):
            plain(model, opt, x.to(device), step)
        job.barrier("all pushes are answered, and in the model")
        return {name: value.cpu().clone() for name, value in model.state_dict().items()}

    with local_job(workers=1, servers=servers, policy=policy, window=1, **SMALL_SLICES) as jobs:
        (found,) = jobs.run(work)
    assert_close(found, delayed(device, make))


def test_modules_that_use_parameters_of_others_or_from_lists(device: str) -> None:
    """MultiheadAttention reads its projection's weight, an LSTM a list of its own."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.lstm = nn.LSTM(6, 6, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[None]
            return self.lstm(self.attention(x, x, x)[0])[0]

    torch.manual_seed(3)
    net = Odd()
    expected = train(None, device, net, sgd, plain)
    with local_job(workers=1, **SMALL_SLICES) as jobs:
        (found,) = jobs.run(lambda job: train(job, device, net, sgd, plain))
    assert_close(found, expected)


def test_functional_calls(device: str) -> None:
    """Other parameters in the place of the model's own, and then its own again."""

    def body(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
        plain(model, opt, x, step)
        doubled = {name: 2 * value.detach() for name, value in model.named_parameters()}
        seen.append(torch.func.functional_call(model, doubled, (x,)).detach().cpu())

    seen: list[torch.Tensor] = []
    expected = train(None, device, NET, sgd, body)
    expected_seen, seen = seen, []
    with local_job(workers=1, **SMALL_SLICES) as jobs:
        (found,) = jobs.run(lambda job: train(job, device, NET, sgd, body))
    assert_close(found, expected)
    for mine, theirs in zip(seen, expected_seen, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["chief", "mean"])
def test_buffers_come_with_the_parameters(device: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 6))

    def work(job: Job, device: str) -> dict[str, torch.Tensor]:
        def body(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
            plain(model, opt, x + job.rank, step)

        return train(job, device, net, sgd, body, buffers=mode)

    with local_job(workers=2, **SMALL_SLICES) as jobs:
        found = jobs.run(lambda job: work(job, device))
    monkeypatch.undo()
    with local_job(workers=2) as jobs:
        expected = jobs.run(lambda job: work(job, "cpu"))
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs)


def test_the_order_of_the_first_reads_is_told_to_the_exchange(device: str) -> None:
    def work(job: Job) -> tuple[list[int], list[int]]:
        model = copy.deepcopy(NET).to(device)
        opt = DistributedOptimizer(sgd(model.parameters()), model=model)
        told: list[list[int]] = []
        job.exchange.prefer = told.append  # type: ignore[method-assign, assignment]
        for step, x in enumerate(INPUTS):
            sometimes_more(model, opt, x.to(device), step)
        segment = job.exchange.layout.segments[0]
        names = [p.name for p in segment.parameters]
        order = [
            part.id
            for name in ("one.weight", "one.bias", "two.weight", "two.bias", "never")
            for part in segment.slices
            if names.index(name) in {piece.parameter for piece in segment.pieces(part)}
        ]
        assert len(told) == 1
        return told[0], list(dict.fromkeys(order))

    with local_job(workers=1, **SMALL_SLICES) as jobs:
        ((told, expected),) = jobs.run(work)
    assert told[: len(expected) - 2] == expected[:-2]
    assert len(set(told)) == len(told)
