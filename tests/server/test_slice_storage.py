"""Slices whose numbers live elsewhere, and whose host memory is what workers read: the same numbers as on a CPU.

Without a GPU a twin plays the device: its numbers are other memory, and nothing is seen until it is published.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import syncline.server.storage as homes
from syncline import ConfigError, Rule
from syncline.server.storage import SliceStorage
from syncline.testing import local_job
from syncline.worker.job import Job


class Twin(SliceStorage):
    """A device that is memory of its own."""

    def numbers(self, host: torch.Tensor, part: Any = None) -> torch.Tensor:
        return host.clone()

    def bring(self, staged: torch.Tensor) -> torch.Tensor:
        return staged.clone()

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        numbers.copy_(host)

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(numbers)


@pytest.fixture(params=["twin", "cuda"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "twin":
        monkeypatch.setattr(homes, "storage_of", lambda name, say: Twin())
        return {}
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return {"server_device": "cuda"}


def trained(rule: Rule, policy: str, num_workers: int, dtype: torch.dtype, **settings: Any) -> list[torch.Tensor]:
    """Some pushes of whole numbers, some of them of one parameter only; what everyone has in the end."""

    def work(job: Job) -> Any:
        chance = np.random.default_rng(job.rank)
        values = {"a": torch.arange(300, dtype=dtype).reshape(20, 15), "b": torch.ones(7, dtype=dtype)}
        job.kv.register(values, rule)
        for number in range(4):
            names = ("a", "b") if number != 2 else ("b",)
            grads = {n: torch.from_numpy(chance.integers(-3, 4, values[n].shape)).to(dtype) for n in names}
            job.kv.push_pull(grads, weight=1.0 + (policy == "sync") * job.rank).wait()
        job.barrier("pushed")
        pulled = job.kv.pull()
        return torch.cat([pulled[name].reshape(-1).float() for name in ("a", "b")])

    with local_job(workers=num_workers, servers=2, policy=policy, slice_bytes=256, **settings) as jobs:
        return list(jobs.run(work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rule", "policy", "num_workers"),
    [
        (Rule("SGD", lr=0.5), "sync", 2),
        (Rule("SGD", lr=0.5, momentum=0.5), "async", 1),
        (Rule("Adam", lr=0.1), "sync", 3),
        (Rule("Adafactor", lr=0.1), "sync", 2),
        (Rule("Add"), "async", 1),  # of several, the order of roundings would be a matter of timing
    ],
    ids=["sgd", "momentum", "adam", "adafactor", "add"],
)
def test_it_does_not_matter_where_the_numbers_live(
    elsewhere: dict[str, Any], rule: Rule, policy: str, num_workers: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    there = trained(rule, policy, num_workers, dtype, **elsewhere)
    monkeypatch.undo()
    here = trained(rule, policy, num_workers, dtype)
    for one, two in zip(there, here, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)


def test_state_goes_out_and_comes_back(elsewhere: dict[str, Any]) -> None:
    def work(job: Job) -> Any:
        job.kv.register({"x": torch.zeros(10)}, Rule("Adam", lr=0.1))
        job.kv.push({"x": torch.ones(10)}).wait()
        parts = list(job.exchange.layout.slices())
        state = job.exchange.read_state(parts)
        job.kv.push({"x": torch.ones(10)}).wait()
        second = job.kv.pull()["x"].clone()
        job.exchange.write_state(parts, state)
        again = {entry.key: bytes(data) for entry, data in job.exchange.read_state(parts)}
        return second, {entry.key: bytes(data) for entry, data in state} == again

    with local_job(workers=1, **elsewhere) as jobs:
        second, same = jobs.run(work)[0]
    assert same and (second < -0.15).all()


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="--server-device cuda: torch sees no GPUs on the server's host"):
        homes.storage_of("cuda", print)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--server-device cuda:2: torch sees 2 GPUs"):
        homes.storage_of("cuda:2", print)
    assert type(homes.storage_of("cpu", print)) is SliceStorage
