"""A ring inside one process: every server has every slice, and a round counts when all have voted for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE
from tests.server.conftest import eventually
from tests.server.rings import WAYS, check_all_equal, check_ledger, check_way, copies, kill, push_cells, start

from syncline import Rule
from syncline.server.backups import Backups
from syncline.server.ring import Voting
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer

STEPS = 12


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [2, 3])
def test_every_server_has_every_slice_bit_by_bit(workers: int, way: str) -> None:
    with local_job(workers=workers, exchange="ring", slice_bytes=64, **WAYS[way]) as jobs:
        acknowledged: dict[str, int] = {}
        jobs.run(lambda job: (push_cells(job, STEPS, acknowledged), job.barrier("all")))
        check_all_equal(jobs)
        assert check_ledger(jobs[0], acknowledged)[:workers] == [STEPS] * workers
        check_way(jobs, way, workers)
        servers = jobs.servers.values()
        assert all(len(server.slices) for server in servers), "all sum up a part"


class Net(torch.nn.Module):
    """Begins the same in every process, whatever others draw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 20), torch.nn.Linear(20, 3)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def train(job: Any, rule: str, clip: float | None) -> torch.Tensor:
    """Batches of different sizes, which weigh by their samples; the last rank has fewer steps than the others."""
    model = Net()
    optimizer = DistributedOptimizer(RULES[rule](model.parameters()), model=model, clip_norm=clip)
    draw = torch.Generator().manual_seed(job.rank)
    for _ in range(STEPS - 4 * (job.rank == 2)):
        x = torch.randn(4 + job.rank, 6, generator=draw)
        torch.nn.functional.mse_loss(model(x), x[:, :3] ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.barrier("all")
    optimizer.pull()
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


@pytest.mark.parametrize(("rule", "clip"), [("Adam", None), ("SGD", 0.1)])
def test_a_ring_and_servers_come_to_the_same(rule: str, clip: float | None) -> None:
    """Also where the round's mean is clipped, and where a worker has fewer steps."""
    found = {}
    for exchange in ("servers", "ring"):
        with local_job(workers=3, exchange=exchange, slice_bytes=128, **WAYS["by host leaders"]) as jobs:
            found[exchange] = jobs.run(lambda job: train(job, rule, clip))
            if exchange == "ring":
                check_all_equal(jobs)
    for one, two in zip(found["servers"], found["ring"], strict=True):
        torch.testing.assert_close(one, two)
        assert torch.equal(two, found["ring"][0]), "all ranks have the same, bit by bit"
    assert not torch.equal(found["ring"][0], torch.cat([p.detach().reshape(-1) for p in Net().parameters()]))


def test_nobody_applies_a_round_before_all_have_voted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server's vote is kept back: all hold the round, and nobody has it."""
    kept: list[Callable[[], None]] = []
    is_kept = threading.Event()
    original = Voting.held

    def held(self: Any, work: Any) -> None:
        if is_kept.is_set() and self._name == "server-1":
            kept.append(lambda: original(self, work))
        else:
            original(self, work)

    monkeypatch.setattr(Voting, "held", held)
    with local_job(workers=2, exchange="ring", slice_bytes=64, **WAYS["by host leaders"]) as jobs:
        acknowledged: dict[str, int] = {}
        go, passed = threading.Event(), threading.Barrier(3)

        def work(job: Any) -> None:
            zeros = np.zeros(64, np.float32)
            job.kv.register({"x": zeros}, Rule("Add"), reduce="sum")
            job.kv.push({"x": zeros + 1}).wait()
            passed.wait(PATIENCE)
            go.wait(PATIENCE)
            job.kv.push({"x": zeros + 1}).wait()
            acknowledged[job.name] = 2

        threads = start(jobs, work, set())
        passed.wait(PATIENCE)
        is_kept.set()
        go.set()
        eventually(lambda: kept)
        numbers = {n for server in jobs.servers.values() for n in server.slices}
        held_everywhere = lambda: all(  # noqa: E731
            len(server.hosting.backups.numbers())
            == len([1 for b in server.hosting.backups.backups.values() if b.held])
            for server in jobs.servers.values()
        )
        eventually(held_everywhere)
        versions = {slot.state.version for slots in copies(jobs).values() for slot in slots.values()}
        assert versions == {1} and numbers and not acknowledged

        def named() -> set[str]:
            return {name for wait in jobs.servers["server-0"].beat().waits for name in wait.for_whom}

        eventually(lambda: named() == {"server-1"})  # whose vote it is
        is_kept.clear()
        kept[0]()
        for thread in threads:
            thread.join(PATIENCE)
        assert acknowledged == {"worker-0": 2, "worker-1": 2}
        check_all_equal(jobs)


@pytest.mark.parametrize("at", ["everyone holds it", "one does not hold it"])
def test_after_a_death_a_round_counts_where_all_survivors_hold_it(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Held by all who are left it counts, with what the dead one brought; else those who are there make it again."""
    stops = threading.Event()
    vote, hold = Voting.held, Backups.hold

    def held(self: Any, work: Any) -> None:
        if stops.is_set() and at == "everyone holds it":
            return  # nobody votes any more
        vote(self, work)

    def holds(self: Any, backup: Any, request: Any, message: Any, ballot: Any, voting: Any) -> bool:
        is_the_one = voting._name == "server-0" and request.peer.name == "server-2"
        if stops.is_set() and at == "one does not hold it" and is_the_one:
            return False  # it has come, and is not looked at yet
        return hold(self, backup, request, message, ballot, voting)

    monkeypatch.setattr(Voting, "held", held)
    monkeypatch.setattr(Backups, "hold", holds)
    with local_job(workers=3, exchange="ring", slice_bytes=64, **WAYS["straight"]) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        passed, go = threading.Barrier(4), threading.Event()

        def work(job: Any) -> None:
            push_cells(job, 3, acknowledged)
            passed.wait(PATIENCE)
            go.wait(PATIENCE)
            rank, cell = int(job.name[-1]), np.zeros((4, 64), np.float32)
            cell[rank, 3] = 1.0
            job.kv.push({"here": cell, "there": cell}).wait()
            acknowledged[job.name] = 4

        threads = start(jobs, work, gone)
        passed.wait(PATIENCE)
        stops.set()
        go.set()
        servers = jobs.servers

        def is_there() -> bool:
            wanted = {"server-0", "server-1", "server-2"} if at == "everyone holds it" else {"server-1"}
            return all(
                all(backup.held for backup in servers[name].hosting.backups.backups.values()) for name in wanted
            )

        eventually(is_there)
        kill(jobs, 2, gone)
        stops.clear()
        for thread in threads[:2]:
            thread.join(PATIENCE)
        counts = check_ledger(jobs[0], acknowledged)
        assert counts == ([4, 4, 4, 0] if at == "everyone holds it" else [4, 4, 3, 0])
        check_all_equal(jobs)


@pytest.mark.parametrize("way", ["by host leaders", "straight"])
@pytest.mark.parametrize("workers", [2, 3])
def test_parameters_may_be_registered_after_steps(workers: int, way: str) -> None:
    """Also where a server has no primaries yet: it has counted the steps before."""

    def work(job: Any) -> dict[str, list[float]]:
        for name in "abcd":  # each is one slice
            job.kv.register({name: np.zeros(4, np.float32)}, Rule("Add"), reduce="sum")
            for _ in range(3):
                job.kv.push({name: np.ones(4, np.float32)}).wait()
        return {name: np.asarray(value).tolist() for name, value in job.kv.pull().items()}

    with local_job(workers=workers, exchange="ring", wait_seconds=PATIENCE, **WAYS[way]) as jobs:
        assert jobs.run(work) == [{name: [3.0 * workers] * 4 for name in "abcd"}] * workers
        check_all_equal(jobs)
