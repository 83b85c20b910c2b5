"""Gradients and parameters between a worker and servers of other processes on one GPU, without host memory.

The GPU is played by memory of this process. What must wait for what on a real one: `tests/launch/test_gpu_jobs.py`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import syncline.server.storage as storage
from syncline.core.layout import Slice
from syncline.core.wire.traffic import AttachDevice
from syncline.net.device_memory import HANDLE_BYTES, DeviceMemoryError
from syncline.server.storage import SliceStorage
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer, peer_channel
from syncline.worker.job import Job

from .conftest import go_the_slow_way

STEPS = 6
SMALL = {"slice_bytes": 256}


class OwnTwin:
    """The worker's arena."""

    numbers = itertools.count(1)
    by_handle: ClassVar[dict[bytes, OwnTwin]] = {}

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._num_bytes, self.handle = num_bytes, next(self.numbers).to_bytes(HANDLE_BYTES, "big")
        self.by_handle[self.handle] = self
        self.gradients, self.parameters = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        self.filled, self.answered = None, dict[str, Any]()

    def offer(self, segment: int, slot: int) -> tuple[AttachDevice, None]:
        return AttachDevice(segment, slot, self._num_bytes, "twin", "here", self.handle, b"", b""), None

    def close(self) -> None:
        """Memory of this process goes with its last user."""


class MappedTwin:
    """The server's view of it."""

    def __init__(self, offer: AttachDevice) -> None:
        self._own, self._views = OwnTwin.by_handle[offer.memory], dict[int, torch.Tensor]()

    def gradients(self, part: Slice) -> torch.Tensor:
        if part.id not in self._views:
            view = self._own.gradients[part.offset : part.offset + part.num_bytes]
            self._views[part.id] = view.view(getattr(torch, part.dtype))
        return self._views[part.id]

    def land(self, part: Slice, numbers: torch.Tensor) -> None:
        self._own.parameters[part.offset : part.offset + part.num_bytes] = numbers.view(torch.uint8)

    def answer(self) -> None:
        pass

    def close(self) -> None:
        """Memory of this process goes with its last user."""


class Twin(SliceStorage):
    """A server's GPU: memory of its own. Host memory is copied for those who ask."""

    def __init__(self, refuses: Callable[[], bool]) -> None:
        self._refuses = refuses
        self._stale: set[int] = set()
        self.num_refreshed = 0

    @property
    def is_lazy(self) -> bool:
        return True

    def open_arena(self, offer: AttachDevice) -> MappedTwin:
        if self._refuses():
            raise DeviceMemoryError("no room")
        return MappedTwin(offer)

    def numbers(self, host: torch.Tensor, part: Any = None) -> torch.Tensor:
        return host.clone()

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        numbers.copy_(host)
        self._stale.discard(host.data_ptr())

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        self._stale.add(host.data_ptr())

    def refresh(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        if host.data_ptr() in self._stale:
            self._stale.discard(host.data_ptr())
            host.copy_(numbers)
            self.num_refreshed += 1


class Peers:
    """The servers of a test."""

    def __init__(self) -> None:
        self.homes: list[Twin] = []
        self.refusing: set[int] = set()  # by their order

    def storage(self, name: str, say: Any) -> Twin:
        number = len(self.homes)
        self.homes.append(Twin(lambda: number in self.refusing))
        return self.homes[-1]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    found = Peers()
    monkeypatch.setattr(storage, "storage_of", found.storage)
    monkeypatch.setattr(peer_channel, "OwnArena", OwnTwin)
    monkeypatch.setattr("syncline.torch.optimizer.why_not", lambda config, is_embedded: "")
    go_the_slow_way(monkeypatch.setattr, 0.3)
    yield found
    OwnTwin.by_handle.clear()


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 6))
INPUTS = torch.randn(2, STEPS, 8, 6, generator=torch.Generator().manual_seed(1))


def trained(job: Job | None, inputs: torch.Tensor) -> list[torch.Tensor]:
    model = copy.deepcopy(NET)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if job is not None:
        opt = DistributedOptimizer(opt, model=model)
    for x in inputs:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    if job is not None:
        opt.wait()
    return [parameter.detach().clone() for parameter in model.parameters()]


def channel_of(job: Job) -> Any:
    return job.exchange.routes.device_channel


@pytest.mark.parametrize("settings", [{}, {"servers": 2, **SMALL}], ids=["one server", "two servers"])
def test_a_worker_equals_one_process_without_host_memory(peers: Peers, settings: dict[str, Any]) -> None:
    with local_job(workers=1, server_device="cuda", **settings) as jobs:
        (found,) = jobs.run(lambda job: trained(job, INPUTS[0]))
        assert channel_of(jobs[0]).segments == {0}
        assert jobs[0].exchange.pushed_bytes.socket == jobs[0].exchange.pushed_bytes.shared == 0
    for ours, theirs in zip(found, trained(None, INPUTS[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    if len(peers.homes) == 1:
        assert peers.homes[0].num_refreshed <= 2, "parameters are copied to the host in every step"


def test_two_workers_equal_two_workers_over_host_memory(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(job: Job) -> list[torch.Tensor]:
        return trained(job, INPUTS[job.rank])

    with local_job(workers=2, server_device="cuda", **SMALL) as jobs:
        here = jobs.run(work)
    monkeypatch.setattr("syncline.torch.optimizer.why_not", lambda config, is_embedded: "a reason")
    with local_job(workers=2, server_device="cuda", **SMALL) as jobs:
        there = jobs.run(work)
        assert channel_of(jobs[0]) is None
    for one, other in zip([*here[0], *here[1]], [*there[0], *there[1]], strict=True):
        assert torch.equal(one, other)


def ledger(job: Job) -> float:
    """Every step adds a whole number to the only parameter; what it is in the end."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    for step in range(40):
        opt.zero_grad()
        (model(torch.tensor([[-float(step + job.rank)]]))).sum().backward()
        opt.step()
    job.barrier("pushed")
    opt.wait()
    opt.pull()
    return model.weight.item()


@pytest.mark.parametrize("window", [0, 1, 2])
def test_every_push_counts_once_in_async(peers: Peers, window: int) -> None:
    with local_job(workers=2, policy="async", window=window, server_device="cuda") as jobs:
        assert jobs.run(ledger) == [2 * sum(range(40)) + 40.0] * 2
        assert channel_of(jobs[0]).segments == {0}


@pytest.mark.parametrize("refusing", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_server_that_cannot_map_gets_them_through_host_memory(
    peers: Peers, refusing: set[int], policy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    peers.refusing = refusing
    with local_job(workers=1, servers=2, policy=policy, server_device="cuda", **SMALL) as jobs:
        (found,) = jobs.run(lambda job: trained(job, INPUTS[0]))
        assert channel_of(jobs[0]).segments == frozenset()
    for ours, theirs in zip(found, trained(None, INPUTS[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert capfd.readouterr().err.count("through host memory: server-") == 1


def test_a_worker_over_host_memory_beside_one_without(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads mapped memory, which is brought up to date for it."""
    why_not = iter(["", "a reason"])
    monkeypatch.setattr("syncline.torch.optimizer.why_not", lambda config, is_embedded: next(why_not))

    def work(job: Job) -> list[torch.Tensor]:
        return trained(job, INPUTS[job.rank])

    with local_job(workers=2, server_device="cuda", **SMALL) as jobs:
        found = jobs.run(work)
        assert [channel_of(job) is None for job in jobs].count(True) == 1
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_that_is_not_finite_is_refused_by_name(peers: Peers, capfd: pytest.CaptureFixture[str]) -> None:
    def work(job: Job) -> list[torch.Tensor]:
        model = copy.deepcopy(NET)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for bad in (False, True):
            opt.zero_grad()
            model(INPUTS[0, 0]).square().mean().backward()
            if bad:
                model[0].weight.grad[3, 2] = torch.nan
            opt.step()
            opt.wait()
            if not bad:
                kept = [parameter.detach().clone() for parameter in model.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(kept, model.parameters(), strict=True))
        return kept

    with local_job(workers=1, server_device="cuda", **SMALL) as jobs:
        jobs.run(work)
    assert "step 2 was refused: '0.weight' is not finite" in capfd.readouterr().err


def test_a_state_that_is_read_is_the_newest(peers: Peers) -> None:
    """Whoever pulls reads host memory, which is older until it is asked for."""

    def work(job: Job) -> Any:
        found = trained(job, INPUTS[0])
        pulled = job.kv.pull()
        return found, [pulled[name] for name in sorted(pulled)], sorted(pulled)

    with local_job(workers=1, server_device="cuda", **SMALL) as jobs:
        ((found, pulled, names),) = jobs.run(work)
    by_name = dict(zip([name for name, _ in NET.named_parameters()], found, strict=True))
    for name, value in zip(names, pulled, strict=True):
        assert torch.equal(torch.as_tensor(value), next(v for k, v in by_name.items() if name.endswith(k)))
