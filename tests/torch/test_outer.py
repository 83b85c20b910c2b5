"""`--outer`: the mean of local steps is the gradient of a rule on the servers."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

torch.manual_seed(0)
LINEAR = torch.nn.Linear(3, 2)
EVERY = 3
NESTEROV = "SGD(lr=0.7, momentum=0.9, nesterov=True)"


def inputs_of(rank: int, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(num)]


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Sequence[torch.Tensor]) -> None:
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def wrapped(job: Job) -> tuple[torch.nn.Module, DistributedOptimizer]:
    model = copy.deepcopy(LINEAR)
    return model, DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model, job=job)


def trained(rounds: int, workers: int = 1, **settings: Any) -> list[list[torch.Tensor]]:
    """What each worker has after so many averages."""

    def train(job: Job) -> list[torch.Tensor]:
        model, optimizer = wrapped(job)
        steps(model, optimizer, inputs_of(job.rank, EVERY * rounds))
        return [p.detach().clone() for p in model.parameters()]

    with local_job(workers=workers, sync_every=EVERY, **settings) as jobs:
        return jobs.run(train)


def diloco(rounds: int, **outer: Any) -> list[torch.Tensor]:
    """By hand, for one worker: the outer optimizer steps on start - end, the inner one goes on."""
    model, start = copy.deepcopy(LINEAR), copy.deepcopy(LINEAR)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    rule = torch.optim.SGD(start.parameters(), **outer)
    inputs = inputs_of(0, EVERY * rounds)
    for k in range(rounds):
        steps(model, inner, inputs[EVERY * k : EVERY * (k + 1)])
        for own, base in zip(model.parameters(), start.parameters(), strict=True):
            base.grad = base.detach() - own.detach()
        rule.step()
        model.load_state_dict(start.state_dict())
    return [p.detach() for p in start.parameters()]


def test_one_worker_is_diloco_by_hand() -> None:
    (found,) = trained(4, outer=NESTEROV)
    expected = diloco(4, lr=0.7, momentum=0.9, nesterov=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found[0], trained(4)[0][0])


def test_plain_sgd_with_lr_1_is_the_mean() -> None:
    """start - (start - end) may round otherwise than start + (end - start): by less than a hair."""
    one, two = trained(2, workers=2, outer="SGD(lr=1)")
    plain, _ = trained(2, workers=2)
    for a, b, c in zip(one, two, plain, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-6, atol=1e-7)


def test_its_state_is_the_servers_and_the_wrapped_optimizers_its_own() -> None:
    with local_job(workers=1, sync_every=EVERY, outer=NESTEROV) as jobs:
        job = jobs[0]
        model, optimizer = wrapped(job)
        steps(model, optimizer, inputs_of(0, EVERY))
        state = optimizer.state_dict()["state"]
        assert set(state[0]) == {"step", "exp_avg", "exp_avg_sq"} and state[0]["step"] == EVERY
        found = {entry.key for entry, _ in job.exchange.read_state(list(job.exchange.layout.slices()))}
        assert found == {"momentum_buffer"}


def test_a_plateaus_factor_is_the_inner_optimizers_alone() -> None:
    """The rule's own numbers stay as given."""
    with local_job(workers=1, sync_every=2, outer="SGD(lr=0.5)") as jobs:
        job = jobs[0]
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)
        stop_rules = jobs.coordinator.stop_rules
        stop_rules.state.number, stop_rules.state.factor = 1, 0.5
        stop_rules.announce()
        assert job.lr_factor == 0.5
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        # Two steps of 0.5 each, of which the outer rule takes a half.
        torch.testing.assert_close(model.weight.detach(), LINEAR.weight.detach() - 0.5)


def test_momentum_goes_on_from_a_checkpoint(tmp_path: pathlib.Path) -> None:
    settings = {"sync_every": EVERY, "outer": NESTEROV, "checkpoint": str(tmp_path / "saved")}
    expected = diloco(3, lr=0.7, momentum=0.9, nesterov=True)
    inputs = inputs_of(0, 3 * EVERY)

    def first(job: Job) -> None:
        model, optimizer = wrapped(job)
        job.state["seen"] = 0
        steps(model, optimizer, inputs[: 2 * EVERY])
        assert job.save()

    def second(job: Job) -> list[torch.Tensor]:
        model, optimizer = wrapped(job)
        job.state["seen"] = 0
        assert job.save()  # it stands where it was saved
        steps(model, optimizer, inputs[2 * EVERY :])
        return [p.detach().clone() for p in model.parameters()]

    with local_job(workers=1, folder=str(tmp_path / "a"), **settings) as jobs:
        jobs.run(first)
    with local_job(workers=1, folder=str(tmp_path / "b"), **settings) as jobs:
        (found,) = jobs.run(second)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_it_needs_local_steps() -> None:
    with pytest.raises(ConfigError, match="needs --sync-every H"), local_job(outer="SGD(lr=1)"):
        pass


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_bytes_per_step_are_told_by_the_way_they_went(transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Two workers, two averages in six steps: each push is a slice of 128 bytes (two parameters, aligned)."""

    def train(job: Job) -> Any:
        model, optimizer = wrapped(job)
        steps(model, optimizer, inputs_of(0, 2 * EVERY))
        job.barrier("trained")
        job.reporting.report()
        job.barrier("told")
        return job.stats()

    with local_job(workers=2, sync_every=EVERY, transport=transport) as jobs:
        stats, _ = jobs.run(train)
    way = "shared" if transport == "auto" else "socket"
    assert (stats.step, getattr(stats.own_pushed, way), getattr(stats.pushed, way)) == (6, 256, 512)
    assert stats.pushed.socket + stats.pushed.shared == 512
    assert stats.bytes_per_step == (0 if transport == "auto" else 512 / 6)
    said, how = capfd.readouterr(), "through shared memory" if transport == "auto" else "over sockets"
    assert f"pushed per step, by all workers: 85 B {how}\n" in said.out + said.err
