"""Every rule, several ways: rings, servers, and one process that has the whole batch come to the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.server.rings import check_all_equal

from syncline.core.rule import KERAS, OPTIONS, PLAIN
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer

STEPS, WORKERS = 4, 3
Making = Callable[[Any], torch.optim.Optimizer]
RULES: dict[str, Making] = {
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.05, t0=2),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.05),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
}


def test_no_rule_is_left_out() -> None:
    assert set(RULES) == set(OPTIONS) - PLAIN - KERAS


def net() -> torch.nn.Sequential:
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))
    return made


def batch(step: int, rank: int) -> torch.Tensor:
    """Of another size at every rank."""
    return torch.randn(3 + 2 * rank, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), x[:, :3] ** 2)


def numbers(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def alone(make: Making) -> torch.Tensor:
    model = net()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, torch.cat([batch(step, rank) for rank in range(WORKERS)])).backward()
        optimizer.step()
    return numbers(model)


def together(job: Any) -> dict[str, torch.Tensor]:
    """One model after the other, each with its rule."""
    found = {}
    for name, make in RULES.items():
        model = net()
        optimizer = DistributedOptimizer(make(model.parameters()), model=model)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(step, job.rank)
            loss(model, x).backward()
            optimizer.step(weight=len(x))
        found[name] = numbers(model)
    return found


#: By exchange: the hosts of the workers.
EXCHANGES: dict[str, list[str]] = {"servers": [], "ring": [], "ring of hosts": ["a", "b", "b"]}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_ring_servers_and_one_process_come_to_the_same(exchange: str) -> None:
    """With every rule; also in a ring in which one host has several workers. All rules are tried in one job."""
    kind, on = exchange.partition(" ")[0], EXCHANGES[exchange]
    with local_job(workers=WORKERS, exchange=kind, slice_bytes=256, on=on) as jobs:
        ranks = jobs.run(together)
        if kind == "ring":
            check_all_equal(jobs)
    for rule, make in RULES.items():
        expected = alone(make)
        assert not torch.equal(expected, numbers(net())), rule
        torch.testing.assert_close(ranks[0][rule], expected, msg=lambda text, rule=rule: f"{rule}: {text}")
        for rank in ranks[1:]:
            assert torch.equal(rank[rule], ranks[0][rule]), f"{rule}: all ranks have the same, bit by bit"
