"""A model trains on while servers and the chief die: in rounds, to the very numbers of a run in which nobody did."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE

from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

STEPS = 10


torch.manual_seed(3)
MODEL = torch.nn.Sequential(
    torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.ReLU(), torch.nn.Linear(12, 3)
)  # fmt: skip


def batch(rank: int, step: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 6, generator=generator).to(device)


def train(job: Job, device: str, at: Callable[[int], None], *, steps: int = STEPS) -> dict[str, torch.Tensor]:
    rank = int(job.name.rpartition("-")[2])
    model = copy.deepcopy(MODEL).to(device)
    opt = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), model=model, job=job)
    for step in range(steps):
        at(step) if rank == 0 else None
        model(batch(rank, step, device)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.wait()
    job.barrier("end")
    opt.pull()
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def run(device: str, at: Callable[[Any, int], None], **settings: Any) -> list[dict[str, torch.Tensor]]:
    with local_job(workers=2, servers=3, slice_bytes=128, wait_seconds=PATIENCE, **settings) as jobs:
        found: list[dict[str, torch.Tensor]] = jobs.run(lambda job: train(job, device, lambda step: at(jobs, step)))
        return found


def kill_at(name: str, when: int, seconds: float | None) -> Callable[[Any, int], None]:
    def at(jobs: Any, step: int) -> None:
        if step != when:
            return
        if seconds is None:
            jobs.kill(name)
            return
        timer = threading.Timer(seconds, lambda: jobs.kill(name))
        timer.name = "Thread-kill"
        timer.start()

    return at


@pytest.mark.parametrize("seconds", [None, 0.003])
def test_in_rounds_nothing_can_be_seen_of_a_servers_death(device: str, seconds: float | None) -> None:
    expected = run(device, lambda jobs, step: None, replicas=2)
    found = run(device, kill_at("server-1", STEPS // 2, seconds), replicas=2)
    for name, value in expected[0].items():
        for one in found:
            assert torch.equal(one[name], value), name


@pytest.mark.parametrize(("policy", "window"), [("bounded:2", 0), ("async", 0), ("async", 2)])
def test_it_goes_on_without_rounds_too(device: str, policy: str, window: int) -> None:
    found = run(device, kill_at("server-2", STEPS // 2, 0.002), replicas=2, policy=policy, window=window)
    for name, value in found[0].items():
        assert value.isfinite().all() and (torch.equal(value, found[1][name]) or "running" in name or "num_" in name)


def test_one_who_becomes_chief_speaks_for_all_from_then_on() -> None:
    """Its learning rate and its buffers count, which they did not before."""
    with local_job(workers=2, servers=1, wait_seconds=PATIENCE, least_workers=1) as jobs:
        begun, over = threading.Barrier(2), threading.Event()

        def work(job: Job) -> Any:
            model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.BatchNorm1d(1))
            torch.nn.init.zeros_(model[0].weight)
            sgd = torch.optim.SGD(model[0].parameters(), lr=1.0)
            opt = DistributedOptimizer(sgd, model=model, job=job)
            if job.name == "worker-1":
                sgd.param_groups[0]["lr"] = 0.25  # not the chief's
            model[0].weight.grad = torch.full((1, 2), -1.0)
            opt.step()
            assert model[0].weight.tolist() == [[1.0, 1.0]]
            begun.wait()
            if job.name == "worker-0":
                jobs.kill("worker-0")
                over.wait(PATIENCE)
                return None
            while not job.is_chief:
                threading.Event().wait(0.01)
            model[1].running_mean.fill_(7.0)
            model[0].weight.grad = torch.full((1, 2), -1.0)
            opt.step()
            over.set()
            return model[0].weight.tolist(), job.kv.pull(["1.running_mean"])["1.running_mean"].tolist()

        assert jobs.run(work)[1] == ([[1.25, 1.25]], [7.0])
