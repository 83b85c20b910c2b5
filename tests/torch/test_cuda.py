"""The same numbers with the model on a GPU: parameters, buffers, scaling, state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # what CUDA opens for itself is no leak of a test

torch.manual_seed(0)
NET = torch.nn.Sequential(
    torch.nn.Linear(16, 700, bias=False), torch.nn.BatchNorm1d(700), torch.nn.ReLU(), torch.nn.Linear(700, 5)
)
GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [[torch.randn(8, 16, generator=GENERATOR) for _ in range(2)] for _ in range(4)]


def train(job: Job | None, batches: list[torch.Tensor], device: str, scaled: bool) -> dict[str, Any]:
    model = copy.deepcopy(NET).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if job is not None:
        optimizer = DistributedOptimizer(optimizer, model=model)
    scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=256.0, enabled=scaled)
    for x in batches:
        optimizer.zero_grad()
        scaler.scale(model(x.to(device)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"model": {k: v.cpu() for k, v in model.state_dict().items()}, "state": optimizer.state_dict()["state"]}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("server_device", ["cpu", "cuda"])
@pytest.mark.parametrize("settings", [{}, {"servers": 2, "slice_bytes": 4096}], ids=["one", "two servers"])
def test_a_worker_on_the_gpu_equals_plain_torch(settings: dict[str, Any], server_device: str, scaled: bool) -> None:
    batches = [step[0] for step in BATCHES]
    expected = train(None, batches, "cuda:0", scaled)
    with local_job(workers=1, device="cuda:0", server_device=server_device, **settings) as jobs:
        assert jobs[0].device == torch.device("cuda:0")
        (found,) = jobs.run(lambda job: train(job, batches, "cuda:0", scaled))
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-4, atol=1e-5)
    for key, state in expected["state"].items():
        for inner, value in state.items():
            torch.testing.assert_close(found["state"][key][inner].cpu(), value.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("server_device", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_two_workers_on_one_gpu_and_on_the_cpu_agree(policy: str, server_device: str) -> None:
    """In sync, the GPU's rounds are the CPU's rounds; in async everyone ends with what the servers have."""

    def work(job: Job, device: str) -> dict[str, Any]:
        return train(job, [step[job.rank] for step in BATCHES], device, False)

    with local_job(workers=2, policy=policy, device="cuda:0", server_device=server_device) as jobs:
        on_gpu = jobs.run(lambda job: work(job, "cuda:0"))
    with local_job(workers=2, policy="sync") as jobs:
        on_cpu = jobs.run(lambda job: work(job, "cpu"))
    if policy == "sync":
        for name, value in on_cpu[0]["model"].items():
            for result in on_gpu:
                torch.testing.assert_close(result["model"][name], value, rtol=1e-3, atol=1e-4)
