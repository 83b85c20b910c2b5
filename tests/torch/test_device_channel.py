"""A ring on a GPU: worker and server of one process hand each other gradients and parameters on the device.

Over a GPU where there is one, and over its twin; several ranks with gloo in the place of nccl.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch.test_device import (
    BODIES,
    INPUTS,
    NET,
    NET_16,
    Body,
    adam,
    assert_close,
    loss_of,
    plain,
    sgd,
    train,
)
from torch import nn

import syncline
from syncline.reduce import process_group
from syncline.server.device_storage import ChannelStorage
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.exchange.routes import Arenas
from syncline.worker.job import Job

NCCL: dict[str, Any] = {"exchange": "ring", "sums": "nccl", "slice_bytes": 256}


@pytest.fixture(autouse=True)
def past_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fails a test in which gradients have gone through an arena, or parameters through host memory, unasked."""
    went: list[str] = []
    array, refresh = Arenas.array, ChannelStorage.refresh

    def made(self: Any, segment: Any, slot: int) -> Any:
        went.append(f"arena of segment {segment.index}")
        return array(self, segment, slot)

    def copied(self: Any, numbers: Any, host: Any) -> None:
        if host.data_ptr() in self._stale:
            went.append("host memory")
        refresh(self, numbers, host)

    monkeypatch.setattr(Arenas, "array", made)
    monkeypatch.setattr(ChannelStorage, "refresh", copied)
    yield went


@pytest.mark.parametrize("net", [NET, NET_16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [adam, sgd])
def test_one_worker_equals_one_process(device: str, make: Any, net: nn.Module, past_the_host: list[str]) -> None:
    expected = train(None, device, net, make, plain)
    with local_job(workers=1, **NCCL) as jobs:
        (found,) = jobs.run(lambda job: train(job, device, net, make, plain))
        assert not past_the_host
    assert_close(found, expected)


@pytest.mark.parametrize("body", BODIES)
def test_what_scripts_do_to_gradients(device: str, body: Body, past_the_host: list[str]) -> None:
    expected = train(None, device, NET, sgd, body)
    with local_job(workers=1, **NCCL) as jobs:
        (found,) = jobs.run(lambda job: train(job, device, NET, sgd, body))
        assert not past_the_host
    assert_close(found, expected)


def test_the_rounds_mean_is_clipped(device: str) -> None:
    def clipped(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
        opt.zero_grad()
        loss_of(model, x).backward()
        if not isinstance(opt, DistributedOptimizer):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()

    expected = train(None, device, NET, sgd, clipped)
    with local_job(workers=1, **NCCL) as jobs:
        (found,) = jobs.run(lambda job: train(job, device, NET, sgd, clipped, clip_norm=0.05))
    assert_close(found, expected)


def test_whoever_reads_host_memory_finds_the_newest_there(device: str, past_the_host: list[str]) -> None:
    """A pull in the middle of training, also of the rule's state; and a push of somebody who lands on the host."""
    with local_job(workers=1, **NCCL) as jobs:

        def work(job: Job) -> None:
            model = copy.deepcopy(NET).to(device)
            opt = DistributedOptimizer(adam(model.parameters()), model=model)
            for step, x in enumerate(INPUTS):
                plain(model, opt, x.to(device), step)
                opt.wait()
                assert not past_the_host
                pulled = job.kv.pull(["one.weight", "never"])
                assert torch.equal(torch.as_tensor(pulled["one.weight"]), model.one.weight.detach().cpu())
                assert past_the_host
                past_the_host.clear()
            state = opt.state_dict()["state"]
            assert state and all(float(entry["step"]) == len(INPUTS) for entry in state.values() if "step" in entry)
            out = {"one.weight": np.zeros(NET.one.weight.shape, np.float32)}
            job.kv.push_pull({"one.weight": np.zeros(NET.one.weight.shape, np.float32)}, out=out).wait()
            opt.pull()
            assert np.array_equal(out["one.weight"], model.one.weight.detach().cpu().numpy())

        jobs.run(work)


def test_what_is_not_finite_is_refused_by_name(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with local_job(workers=1, bad_pushes=9, **NCCL) as jobs:

        def bad(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
            opt.zero_grad()
            loss_of(model, x).backward()
            if step == 2 and isinstance(opt, DistributedOptimizer):
                model.two.weight.grad[3, 3] = float("nan")
            if step != 2 or isinstance(opt, DistributedOptimizer):
                opt.step()

        (found,) = jobs.run(lambda job: train(job, device, NET, sgd, bad))
    assert "'two.weight' is not finite" in capsys.readouterr().err
    assert_close(found, train(None, device, NET, sgd, bad))


def weighted(job: Job, device: str, **how: Any) -> dict[str, torch.Tensor]:
    def body(model: nn.Module, opt: Any, x: torch.Tensor, step: int) -> None:
        opt.zero_grad()
        loss_of(model, x * (1.0 + job.rank), extra=bool(step % 2)).backward()
        opt.step(weight=2.0 + job.rank)

    return train(job, device, NET, adam, body, **how)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_several_ranks_come_to_what_servers_come_to(
    device: str, clip: float | None, monkeypatch: pytest.MonkeyPatch, past_the_host: list[str]
) -> None:
    """nccl wants a GPU for each rank; gloo, in its place, adds up on one."""
    monkeypatch.setitem(process_group.GROUPS, "nccl", process_group.gloo_group)
    monkeypatch.setitem(process_group.LIMITS, "nccl", process_group.LIMITS["gloo"])
    with local_job(workers=3, **NCCL) as jobs:
        found = jobs.run(lambda job: weighted(job, device, clip_norm=clip))
        assert not [what for what in past_the_host if what.startswith("arena")]
    with local_job(workers=3, slice_bytes=256) as jobs:
        expected = jobs.run(lambda job: weighted(job, device, clip_norm=clip))
    for each in found:
        assert_close(each, expected[0])
        assert all(torch.equal(each[name], found[0][name]) for name in each), "bit by bit"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nccl_adds_up_what_one_rank_has() -> None:
    """A process group of one, which a job would not make: that nccl is spoken to as it wants. What nccl opens for
    itself stays open, so it has a process of its own."""
    script = """
import torch
from syncline.reduce import process_group
from syncline.reduce.process_group import GroupStore, StoreKeys
store = GroupStore(1, StoreKeys(), lambda key, value: None, 60.0)
group = process_group.nccl_group(store, 0, 1, 60.0, "")
numbers = torch.arange(5.0, device="cuda:0")
group.allreduce([numbers], torch.distributed.AllreduceOptions()).wait()
torch.cuda.synchronize()
assert numbers.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
group.abort()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_saves_have_what_is_on_the_device(device: str, tmp_path: Any) -> None:
    with local_job(workers=1, checkpoint=str(tmp_path / "saves"), **NCCL) as jobs:

        def work(job: Job) -> dict[str, torch.Tensor]:
            model = copy.deepcopy(NET).to(device)
            opt = DistributedOptimizer(sgd(model.parameters()), model=model)
            for step, x in enumerate(INPUTS):
                plain(model, opt, x.to(device), step)
            opt.wait()
            job.save()
            return {name: value.cpu().clone() for name, value in model.state_dict().items()}

        (found,) = jobs.run(work)
    saved = syncline.load_state_dict(str(tmp_path / "saves"))
    for name, value in found.items():
        assert torch.equal(torch.as_tensor(saved[name]), value), name
