"""Codecs under a training script: gradients that leave early, that are edited, that overflow; local steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

torch.manual_seed(0)
MODEL = torch.nn.Sequential(
    torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60), torch.nn.ReLU(), torch.nn.Linear(60, 5)
)
CODECS = ["bf16", "int8", "topk:0.05"]


def train(job: Job, *, overlap: bool, edit: str = "", steps: int = 6, lr: float = 0.1) -> list[torch.Tensor]:
    model = copy.deepcopy(MODEL)
    opt = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), model=model, job=job, overlap=overlap
    )
    generator = torch.Generator().manual_seed(job.rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if edit == "scaler" else None
    for step in range(steps):
        opt.zero_grad()
        loss = model(torch.randn(16, 40, generator=generator)).square().mean()
        (scaler.scale(loss) if scaler is not None else loss).backward()
        if edit == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (step + 1))
        if edit == "freeze" and step % 2:
            model[0].weight.grad = None
        if scaler is None:
            opt.step()
            continue
        if step == 3 and job.rank == 0:  # an overflow of one of them: nobody's step counts
            model[3].bias.grad[0] = torch.inf
        scaler.step(opt)
        scaler.update()
    opt.pull()
    return [value.detach().clone() for value in model.state_dict().values()]


def trained(*, overlap: bool, edit: str = "", **settings: Any) -> list[list[torch.Tensor]]:
    with local_job(workers=2, servers=2, transport="tcp", slice_bytes=2048, **settings) as jobs:
        return jobs.run(lambda job: train(job, overlap=overlap, edit=edit))


@pytest.mark.parametrize("edit", ["", "clip", "freeze", "scaler"])
@pytest.mark.parametrize("codec", CODECS)
def test_what_leaves_early_counts_as_what_leaves_at_the_step(codec: str, edit: str) -> None:
    """Bit by bit: what was encoded early and edited since is encoded again, from the residual before it. A gradient
    that is dropped after it has left was among those that topk chose from: nothing is lost, others wait longer."""
    early, late = (trained(overlap=overlap, edit=edit, codec=codec)[0] for overlap in (True, False))
    if (codec, edit) != ("topk:0.05", "freeze"):
        assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
    assert all(torch.isfinite(a).all() for a in early)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_it_comes_near_to_what_it_would_be_without(codec: str) -> None:
    plain, encoded = trained(overlap=True)[0], trained(overlap=True, codec=codec, pull_codec="bf16")[0]
    for a, b in zip(plain, encoded, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("outer", ["", "SGD(lr=0.7, momentum=0.9, nesterov=True)"])
def test_deltas_of_local_steps_are_encoded(outer: str) -> None:
    found = {}
    for codec in ("", "int8"):
        settings = {"sync_every": 3, "outer": outer, "codec": codec, "pull_codec": codec}
        with local_job(workers=2, transport="tcp", **settings) as jobs:
            one, _ = jobs.run(lambda job: train(job, overlap=True))
            found[codec] = (one, jobs[0].exchange.pushed_bytes.socket)
    assert 0 < found["int8"][1] < 0.35 * found[""][1]  # buffers go as they are
    for a, b in zip(found[""][0], found["int8"][0], strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.03)
