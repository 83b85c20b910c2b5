"""Rings whose servers add up gradients while backward goes on: whatever a script does, nothing else comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE
from tests.server.conftest import eventually
from tests.server.rings import check_all_equal, kill, start

from syncline.reduce import process_group
from syncline.reduce.host_round import ActiveRound
from syncline.reduce.process_group import GroupRound
from syncline.server import pool
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer, carriers, channel_carrier
from syncline.worker.exchange import finite, routes

STEPS = 8
#: Two hosts with two workers each, whose sums go by host leaders; one host; and four workers whose sums gloo makes.
KINDS: dict[str, dict[str, Any]] = {
    "two hosts": {"on": ["a", "a", "b", "b"]},
    "one host": {"num_cores": 64},
    "process_group": {"sums": "gloo"},
}
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
Body = Callable[["Script", int], None]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are large enough for digests of several pieces, biases are compared."""
    monkeypatch.setattr(routes, "EARLY_BYTES", 1)
    monkeypatch.setattr(carriers, "SMALL_BYTES", 512)
    monkeypatch.setattr(finite, "PIECE_BYTES", 512)


class Script:
    """A worker's."""

    def __init__(self, job: Any, overlap: bool, device: str = "cpu") -> None:
        self.job, self.rank, self.device = job, job.rank, device
        layers = [torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8)]
        self.model = torch.nn.Sequential(*layers).to(device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.opt = DistributedOptimizer(sgd, model=self.model, job=job, overlap=overlap)

    def backward(self, step: int, size: int = 4) -> None:
        x = torch.randn(size, 16, generator=torch.Generator().manual_seed(100 * step + self.rank))
        (self.model(x.to(self.device)) ** 2).mean().backward()

    def step(self, number: int, **given: Any) -> None:
        self.backward(number)
        self.opt.step(**given)
        self.opt.zero_grad()

    def numbers(self) -> torch.Tensor:
        self.opt.wait()
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()]).cpu()


def plain(script: Script, number: int) -> None:
    script.step(number)


def edited(script: Script, number: int) -> None:
    """In a way that torch does not notice, of one parameter, on one rank, in some steps."""
    script.backward(number)
    if script.rank == 2 and number % 2:
        next(script.model.parameters()).grad.data[0, 0] += 1.0  # type: ignore[union-attr]
    script.opt.step()
    script.opt.zero_grad()


def clipped(script: Script, number: int) -> None:
    """All of it changes, at all ranks."""
    script.backward(number)
    torch.nn.utils.clip_grad_norm_(script.model.parameters(), 0.1)
    script.opt.step()
    script.opt.zero_grad()


def accumulated(script: Script, number: int) -> None:
    script.backward(number)
    script.backward(number + 1000)
    script.opt.step()
    script.opt.zero_grad()


def thrown_away(script: Script, number: int) -> None:
    """A backward whose gradients are not used."""
    if number % 2 and script.rank < 2:
        script.backward(number + 1000)
        script.opt.zero_grad()
    script.step(number)


def weighted(script: Script, number: int) -> None:
    script.step(number, weight=1.0 + script.rank + (number == 5))


def left_out(script: Script, number: int) -> None:
    """A parameter that has a gradient in some steps only, on some ranks only."""
    script.backward(number)
    if script.rank == 1 and number in (3, 4):
        next(script.model.parameters()).grad = None
    script.opt.step()
    script.opt.zero_grad()


def overflowing(script: Script, number: int) -> None:
    script.backward(number)
    script.opt._push(1.0, None, overflow=script.rank == 3 and number == 4)
    script.opt.zero_grad()


def uneven(script: Script, number: int) -> None:
    """Some come to the end of their data before others."""
    if number < STEPS - 2 * script.rank:
        script.step(number)
    elif number == STEPS - 2 * script.rank:
        script.backward(number)  # which is used for nothing
        script.job.exchange.rest()


def leaving(script: Script, number: int) -> None:
    """One ends in the middle, with a backward that is used for nothing."""
    if script.rank != 1 or number < 4:
        script.step(number)
    elif number == 4:
        script.backward(number)
        script.job.exchange.leave()


def pushed_by_hand(script: Script, number: int) -> None:
    """What backward has staged is not what is pushed."""
    script.backward(number)
    if number % 2:
        name = next(name for name in script.job.exchange.layout.where if name.endswith("0.weight"))
        script.job.kv.push({name: torch.full((24, 16), 0.1 * script.rank)}).wait()
    script.opt.step()
    script.opt.zero_grad()


BODIES = [
    plain,
    edited,
    clipped,
    accumulated,
    thrown_away,
    weighted,
    left_out,
    overflowing,
    uneven,
    leaving,
    pushed_by_hand,
]


#: Of these, those that `make test` plays.
QUICK = (plain, edited, weighted, leaving, overflowing)


def trained(body: Body, overlap: bool, kind: str, device: str = "cpu") -> torch.Tensor:
    def work(job: Any) -> torch.Tensor:
        script = Script(job, overlap, device)
        for number in range(STEPS):
            body(script, number)
        if body is not leaving:
            job.barrier("all")
        return script.numbers()

    with local_job(workers=4, exchange="ring", slice_bytes=256, **KINDS[kind]) as jobs:
        found: list[torch.Tensor] = jobs.run(work)
        check_all_equal(jobs)
    return found[0]  # of the one that goes on longest


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(
            body,
            kind,
            id=f"{body.__name__}-{kind}",
            marks=() if kind == "process_group" and body in QUICK else pytest.mark.proof,
        )
        for body in BODIES
        for kind in KINDS
    ],
)
def test_early_or_late_it_comes_to_the_same(body: Body, kind: str) -> None:
    assert torch.equal(trained(body, True, kind), trained(body, False, kind))


@pytest.mark.proof
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "body", [body for body in BODIES if body is not pushed_by_hand], ids=lambda body: body.__name__
)
def test_so_it_does_where_gradients_stay_on_their_device(
    body: Body, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nccl wants a GPU for each rank: gloo stands in for it."""
    monkeypatch.setitem(process_group.GROUPS, "nccl", process_group.gloo_group)
    monkeypatch.setitem(process_group.LIMITS, "nccl", process_group.LIMITS["gloo"])
    monkeypatch.setattr(channel_carrier, "BUCKET_BYTES", 512)
    monkeypatch.setitem(KINDS, "device_channel", {"sums": "nccl"})
    assert torch.equal(trained(body, True, "device_channel", device), trained(body, False, "device_channel", device))


@pytest.mark.parametrize("kind", ["two hosts", "one host"])
def test_host_leaders_begin_all_slices_before_their_round_is_complete(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, again, original = dict[int, int](), list[bool](), ActiveRound.complete

    def complete(self: ActiveRound, found: Any) -> None:
        begun[self.number] = begun.get(self.number, 0) + len(self.begun)
        again.append(self.is_again)
        original(self, found)

    monkeypatch.setattr(ActiveRound, "complete", complete)
    trained(plain, True, kind)
    last = begun[STEPS - 1]
    assert begun == dict.fromkeys(range(STEPS), last) | {0: 0, 1: 0}, "after two rounds that are alike"
    assert last > 0 and again and not any(again)


def test_a_process_group_begins_all_buckets_before_their_round_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, original = list[tuple[int, int]](), GroupRound.finish
    monkeypatch.setattr(process_group, "BUCKET_BYTES", 512)

    def finish(self: GroupRound, complete: Any, holds: bool) -> Any:
        if complete.contributions[0].clock > 3:
            assert holds
            begun.append((self.num_begun, self.num_expected))
        return original(self, complete, holds)

    monkeypatch.setattr(GroupRound, "finish", finish)
    trained(plain, True, "process_group")
    assert len(begun) == 4 * (STEPS - 3) and begun[0][0] == begun[0][1] > 1
    assert set(begun) == {begun[0]}


def test_buffers_that_are_there_at_the_step_do_not_hold_up_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a parameter that a worker has no gradient for."""
    begun, original = dict[str, set[tuple[int, int]]](), GroupRound.finish
    monkeypatch.setattr(process_group, "BUCKET_BYTES", 256)

    def finish(self: GroupRound, complete: Any, holds: bool) -> Any:
        if holds:
            begun.setdefault(self.own_worker, set()).add((self.num_begun, self.num_expected))
        return original(self, complete, holds)

    def work(job: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
        if job.rank == 1:
            model[2].weight.requires_grad_(False)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, job=job)
        for _ in range(5):
            model(torch.randn(4, 8)).sum().backward()
            opt.step()
            opt.zero_grad()

    monkeypatch.setattr(GroupRound, "finish", finish)
    with local_job(workers=2, exchange="ring", slice_bytes=256, sums="gloo") as jobs:
        jobs.run(work)
    assert len(begun) == 2
    for found in begun.values():
        ((early, whole),) = found
        assert whole - 2 <= early, "all but the buffers"


class Ledger(torch.nn.Module):
    """A cell for each step of each worker, twice: what counts of a step counts in both, on whatever slices."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.here, self.there = (torch.nn.Parameter(torch.zeros(4, num_steps)) for _ in range(2))

    def check(self, acknowledged: Sequence[int]) -> list[int]:
        here, there = self.here.detach(), self.there.detach()
        assert torch.equal(here, there), "a step counts on all slices or on none"
        for rank, row in enumerate(here):
            count = int((row > 0).sum())  # each by its share of the round
            assert torch.equal(row > 0, torch.arange(len(row)) < count), f"worker-{rank}: {row}"
            assert count >= acknowledged[rank], f"an acknowledged step of worker-{rank} is lost"
        return [int((row > 0).sum()) for row in here]


@pytest.mark.parametrize(
    "victim", [pytest.param(0, marks=pytest.mark.proof), 1, pytest.param(3, marks=pytest.mark.proof)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_while_sums_are_early(kind: str, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have threads of their own. One worker changes its gradients now and then: some sums are made again."""
    broken, steps, acknowledged = list[Exception](), 30, [0, 0, 0, 0]
    monkeypatch.setattr(pool, "InlinePool", lambda: pool.ThreadPool(broken.append, 2))
    with local_job(workers=4, exchange="ring", slice_bytes=256, **KINDS[kind]) as jobs:
        gone, found = set[str](), dict[str, Ledger]()

        def work(job: Any) -> None:
            rank, model = int(job.name[-1]), Ledger(steps)
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            opt = DistributedOptimizer(sgd, model=model, job=job)
            for number in range(steps):
                opt.zero_grad()
                factor = 0.5 if rank == 2 and number % 3 == 0 else 1.0
                (-factor * (model.here[rank, number] + model.there[rank, number])).backward()
                if factor != 1.0:
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.data.div_(factor)
                opt.step()
                opt.wait()
                acknowledged[rank] = number + 1
            found[job.name] = model

        threads = start(jobs, work, gone)
        eventually(lambda: acknowledged[victim] >= 5)
        kill(jobs, victim, gone)
        left = [rank for rank in range(4) if rank != victim]
        for rank in left:
            threads[rank].join(PATIENCE)
        counts = found[f"worker-{left[0]}"].check(acknowledged)
        assert [counts[rank] for rank in left] == [steps] * 3 and not broken
        check_all_equal(jobs)


@pytest.mark.parametrize(("num_cores", "is_early"), [(7, False), (8, True)])
def test_on_one_host_it_needs_cores_to_spare(num_cores: int, is_early: bool) -> None:
    with local_job(workers=4, exchange="ring", slice_bytes=256, num_cores=num_cores) as jobs:
        bytes_of = jobs.run(lambda job: (Script(job, True).step(0), job.exchange.early_bytes)[1])
    assert bytes_of == [1 if is_early else math.inf] * 4
