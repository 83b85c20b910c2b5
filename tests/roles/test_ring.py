"""A ring inside one process: every server has every slice, and a round counts when all have voted for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE
from tests.roles.conftest import eventually

from syncline import Rule
from syncline.core.control import Retire
from syncline.errors import ConnectionLost
from syncline.roles.server import hosting
from syncline.roles.server.backups import Backups
from syncline.roles.server.voting import Voting
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer

STEPS = 12


def copies(jobs: Any) -> dict[str, dict[int, Any]]:
    """Every server's slots, its own and those of others, by number."""
    found = {}
    for name, server in jobs._process._servers.items():
        others = {n: backup.slot for n, backup in server._hosting.backups.backups.items()}
        found[name] = {**others, **server._slices}
    return found


def check_all_equal(jobs: Any) -> None:
    """All have all slices, bit by bit the same, at the same version and with the same clocks."""
    (_, first), *others = copies(jobs).items()
    for name, slots in others:
        assert slots.keys() == first.keys(), name
        for number, slot in slots.items():
            assert np.array_equal(slot.memory, first[number].memory), f"slice {number} on {name}"
            assert slot.state.version == first[number].state.version
            assert slot.state.clocks == first[number].state.clocks


def push_cells(job: Any, count: int, acknowledged: dict[str, int], width: int = 64) -> None:
    """A one-hot ledger, twice: what counts of a step counts in both, on whatever slices and servers they are."""
    rank, zeros = int(job.name.rpartition("-")[2]), np.zeros((4, width), np.float32)
    job.kv.register({"here": zeros, "there": zeros}, Rule("Add"), reduce="sum")
    for number in range(count):
        cell = zeros.copy()
        cell[rank, number] = 1.0
        job.kv.push({"here": cell, "there": cell}).wait()
        acknowledged[job.name] = number + 1


def check_ledger(job: Any, acknowledged: dict[str, int]) -> list[int]:
    """The first steps of every worker, and no others, whole; all that were acknowledged. How many there are."""
    found = job.kv.pull(["here", "there"])
    here, there = np.asarray(found["here"]), np.asarray(found["there"])
    assert np.array_equal(here, there), "a step counts on all slices or on none"
    counts = [int(row.sum()) for row in here]
    for rank, (row, count) in enumerate(zip(here, counts, strict=True)):
        assert (row == (np.arange(row.size) < count)).all(), f"worker-{rank}"
        assert count >= acknowledged.get(f"worker-{rank}", 0), f"an acknowledged step of worker-{rank} is lost"
    return counts


def start(jobs: Any, work: Callable[[Any], None], gone: set[str]) -> list[threading.Thread]:
    """Every worker in a thread of its own; whoever is killed may fail as it likes."""
    errors: list[Exception] = []

    def run(job: Any) -> None:
        try:
            work(job)
        except Exception as error:
            if job.name not in gone:
                errors.append(error)
                raise

    threads = [threading.Thread(target=run, args=(job,), name=job.name, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    return threads


def kill(jobs: Any, number: int, gone: set[str]) -> None:
    """A process of a ring, with its worker and its server."""
    gone.add(f"worker-{number}")
    jobs.kill(f"worker-{number}")


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("workers", [2, 3])
def test_every_server_has_every_slice_bit_by_bit(workers: int, transport: str) -> None:
    with local_job(workers=workers, exchange="ring", slice_bytes=64, transport=transport) as jobs:
        acknowledged: dict[str, int] = {}
        jobs.run(lambda job: (push_cells(job, STEPS, acknowledged), job.barrier("all")))
        check_all_equal(jobs)
        assert check_ledger(jobs[0], acknowledged)[:workers] == [STEPS] * workers
        servers = jobs._process._servers.values()
        assert all(len(server._slices) for server in servers), "all sum up a part"


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
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "Adadelta": torch.optim.Adadelta,
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


MANY = [pytest.param(rule, None, marks=pytest.mark.proof) for rule in RULES if rule != "Adam"]


@pytest.mark.parametrize(("rule", "clip"), [("Adam", None), ("SGD", 0.1), *MANY])
def test_a_ring_and_servers_come_to_the_same(rule: str, clip: float | None) -> None:
    """Also where the round's mean is clipped, and where a worker has fewer steps."""
    found = {}
    for exchange in ("servers", "ring"):
        with local_job(workers=3, exchange=exchange, slice_bytes=128) as jobs:
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
    with local_job(workers=2, exchange="ring", slice_bytes=64) as jobs:
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
        numbers = {n for server in jobs._process._servers.values() for n in server._slices}
        held_everywhere = lambda: all(  # noqa: E731
            len(server._hosting.backups.numbers())
            == len([1 for b in server._hosting.backups.backups.values() if b.held])
            for server in jobs._process._servers.values()
        )
        eventually(held_everywhere)
        versions = {slot.state.version for slots in copies(jobs).values() for slot in slots.values()}
        assert versions == {1} and numbers and not acknowledged

        def named() -> set[str]:
            return {name for wait in jobs._process._servers["server-0"].beat().waits for name in wait.for_whom}

        eventually(lambda: named() == {"server-1"})  # whose vote it is
        is_kept.clear()
        kept[0]()
        for thread in threads:
            thread.join(PATIENCE)
        assert acknowledged == {"worker-0": 2, "worker-1": 2}
        check_all_equal(jobs)


@pytest.mark.parametrize("at", ["everyone holds it", "one does not hold it"])
def test_after_a_death_a_round_counts_where_all_survivors_hold_it(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Held by all who are left it counts, with what the dead one brought; else those who are there make it anew."""
    stops = threading.Event()
    vote, hold = Voting.held, Backups._hold

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
    monkeypatch.setattr(Backups, "_hold", holds)
    with local_job(workers=3, exchange="ring", slice_bytes=64) as jobs:
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
        servers = jobs._process._servers

        def is_there() -> bool:
            wanted = {"server-0", "server-1", "server-2"} if at == "everyone holds it" else {"server-1"}
            return all(
                all(backup.held for backup in servers[name]._hosting.backups.backups.values()) for name in wanted
            )

        eventually(is_there)
        kill(jobs, 2, gone)
        stops.clear()
        for thread in threads[:2]:
            thread.join(PATIENCE)
        counts = check_ledger(jobs[0], acknowledged)
        assert counts == ([4, 4, 4, 0] if at == "everyone holds it" else [4, 4, 3, 0])
        check_all_equal(jobs)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_dies_costs_nobody_a_step(victim: int, transport: str) -> None:
    """The others go on without it; all that was acknowledged counts, every step on all slices or on none."""
    with local_job(workers=3, exchange="ring", slice_bytes=64, transport=transport) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 50, acknowledged), gone)
        eventually(lambda: acknowledged.get(f"worker-{victim}", 0) >= 7)
        kill(jobs, victim, gone)
        left = [rank for rank in range(3) if rank != victim]
        for rank in left:
            threads[rank].join(PATIENCE)
        counts = check_ledger(jobs[left[0]], acknowledged)
        assert [counts[rank] for rank in left] == [50, 50]
        check_all_equal(jobs)
        lone = jobs._process._servers.values()
        assert {name for server in lone for name in server._voting.votes.voters} == {f"server-{r}" for r in left}


def test_one_that_comes_gets_everything_and_takes_part() -> None:
    with local_job(workers=2, exchange="ring", slice_bytes=64, most_workers=3) as jobs:
        acknowledged: dict[str, int] = {}

        def work(job: Any) -> None:
            push_cells(job, 60 if job.name != "worker-2" else 20, acknowledged)
            job.barrier("all")

        first = start(jobs, work, set())
        eventually(lambda: acknowledged.get("worker-0", 0) >= 5)
        late = jobs.add_worker("worker-2")
        threads = start([late], work, set())
        for thread in [*first, *threads]:
            thread.join(PATIENCE)
        assert check_ledger(late, acknowledged)[:3] == [60, 60, 20]
        eventually(lambda: "server-2" in jobs._process._servers["server-0"]._voting.votes.voters)
        check_all_equal(jobs)


@pytest.mark.parametrize("slice_bytes", [64, 1 << 20])
def test_one_that_died_comes_back(slice_bytes: int) -> None:
    """Also where there are fewer slices than servers: it is nobody's primary then, and has its vote all the same."""
    with local_job(workers=3, exchange="ring", slice_bytes=slice_bytes) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()

        def work(job: Any) -> None:
            push_cells(job, 60 if job.name != "worker-1" else 20, acknowledged)
            job.barrier("all")

        threads = start(jobs, work, gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 3)
        kill(jobs, 1, gone)
        before = dict(acknowledged)
        eventually(lambda: acknowledged["worker-0"] > before["worker-0"] + 1)
        back = jobs.add_worker("worker-1")
        second: dict[str, int] = {}

        def again(job: Any) -> None:
            zeros = np.zeros((4, 64), np.float32)
            job.kv.register({"here": zeros, "there": zeros}, Rule("Add"), reduce="sum")
            for number in range(20, 30):
                cell = zeros.copy()
                cell[1, number] = 1.0
                job.kv.push({"here": cell, "there": cell}).wait()
            second[job.name] = 10
            job.barrier("all")

        threads += start([back], again, set())
        for thread in (threads[0], threads[2], threads[3]):
            thread.join(PATIENCE)
        found = back.kv.pull(["here", "there"])
        assert np.array_equal(found["here"], found["there"]) and second
        assert list(np.asarray(found["here"])[[0, 2]].sum(axis=1)) == [60, 60]
        assert np.asarray(found["here"])[1, 20:].sum() == 10
        eventually(lambda: "server-1" in jobs._process._servers["server-0"]._voting.votes.voters)
        check_all_equal(jobs)


@pytest.mark.parametrize("victim", [0, 2])
def test_who_dies_before_a_joiner_has_everything(monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    """A joiner is named as a backup of all, and lacks what this primary was to give it: it is none of that. Nor does
    it matter when the joiner itself is gone again."""
    begun, is_over = threading.Event(), threading.Event()
    original = hosting.supply

    def supplies(partner: Any, slots: Any, goes_on: Callable[[], bool]) -> None:
        if partner.name == "server-2" and any(slot.part.id == 0 for slot in slots) and not is_over.is_set():
            begun.set()
            is_over.wait(PATIENCE)
            raise ConnectionLost("it is dead")
        original(partner, slots, goes_on)

    monkeypatch.setattr(hosting, "supply", supplies)
    with local_job(workers=2, exchange="ring", slice_bytes=64, most_workers=3) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        first = "server-0" if victim == 0 else ""

        def work(job: Any) -> None:
            push_cells(job, 40 if job.name != "worker-2" else 10, acknowledged)
            job.barrier("all")

        threads = start(jobs, work, gone)
        eventually(lambda: acknowledged.get("worker-0", 0) >= 5)
        assert not first or 0 in jobs._process._servers[first]._slices
        late = jobs.add_worker("worker-2")
        eventually(begun.is_set)
        kill(jobs, victim, gone)
        is_over.set()
        if victim == 0:
            threads += start([late], work, gone)
        left = [1, 2] if victim == 0 else [0, 1]
        for rank in left:
            threads[rank].join(PATIENCE)
            assert not threads[rank].is_alive(), f"worker-{rank} stands still"
        counts = check_ledger(jobs[1], acknowledged)
        assert [counts[rank] for rank in left] == ([40, 10] if victim == 0 else [40, 40])
        check_all_equal(jobs)


def test_one_that_leaves_has_its_say_until_it_is_out(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It does not hold a sum when it is released from its seat: the primary must not take that for a vote, and apply
    what the others then drop."""
    stops, hold = threading.Event(), Backups._hold

    def holds(self: Any, backup: Any, request: Any, message: Any, ballot: Any, voting: Any) -> bool:
        if stops.is_set() and (voting._name, request.peer.name) == ("server-1", "server-2"):
            return False  # it has come, and is not looked at yet
        return hold(self, backup, request, message, ballot, voting)

    release = hosting.Hosting.release_backups
    asked: list[Any] = []  # the others, which have answered before that one lets go of anybody

    def releases(self: Any, seats: Any) -> None:
        if stops.is_set() and self.name == "server-2":
            eventually(lambda: all((hold := one._generations._hold) and hold.is_answered for one in asked))
        release(self, seats)
        if stops.is_set() and self.name == "server-2":
            threading.Event().wait(0.1)  # whatever that has let loose comes to its end

    monkeypatch.setattr(Backups, "_hold", holds)
    monkeypatch.setattr(hosting.Hosting, "release_backups", releases)
    with local_job(workers=3, exchange="ring", slice_bytes=64) as jobs:
        acknowledged: dict[str, int] = {}
        passed, go = threading.Barrier(4), threading.Event()

        def work(job: Any) -> None:
            push_cells(job, 3, acknowledged)
            passed.wait(PATIENCE)
            go.wait(PATIENCE)
            cell = np.zeros((4, 64), np.float32)
            cell[int(job.name[-1]), 3] = 1.0
            job.kv.push({"here": cell, "there": cell}).wait()
            acknowledged[job.name] = 4
            job.barrier("all")

        threads = start(jobs, work, set())
        passed.wait(PATIENCE)
        stops.set()
        go.set()
        servers = jobs._process._servers
        asked += [servers["server-0"], servers["server-1"]]
        eventually(lambda: {name for w in servers["server-0"].beat().waits for name in w.for_whom} == {"server-2"})
        jobs._process._links["server-1"].call(Retire(), PATIENCE)
        stops.clear()
        for thread in threads:
            thread.join(PATIENCE)
        assert check_ledger(jobs[0], acknowledged) == [4, 4, 4, 0]
        staying = {name: slots for name, slots in copies(jobs).items() if name != "server-1"}
        for number, slot in staying["server-0"].items():
            assert np.array_equal(slot.memory, staying["server-2"][number].memory), f"slice {number}"
            assert slot.state.version == staying["server-2"][number].state.version == 4
        assert "refused an update" not in capsys.readouterr().err, "copies were apart"


def test_two_that_die_at_once_cost_no_step() -> None:
    with local_job(workers=4, exchange="ring", slice_bytes=64) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 40, acknowledged), gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 5)
        kill(jobs, 0, gone)
        kill(jobs, 1, gone)
        for thread in threads[2:]:
            thread.join(PATIENCE)
        assert check_ledger(jobs[2], acknowledged)[2:] == [40, 40]
        check_all_equal(jobs)


def test_the_last_one_goes_on_alone() -> None:
    with local_job(workers=2, exchange="ring", slice_bytes=64) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 40, acknowledged), gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 5)
        kill(jobs, 1, gone)
        threads[0].join(PATIENCE)
        assert check_ledger(jobs[0], acknowledged)[0] == 40


def test_what_a_rule_remembers_is_everywhere_too() -> None:
    with local_job(workers=2, exchange="ring", slice_bytes=64) as jobs:

        def work(job: Any) -> None:
            job.kv.register({"x": np.ones(80, np.float32)}, Rule("Adam", lr=0.1))
            for _ in range(3):
                job.kv.push({"x": np.full(80, 1.0 + job.rank, np.float32)}).wait()
            job.barrier("all")

        jobs.run(work)
        (_, first), (_, second) = copies(jobs).items()
        for number, slot in first.items():
            one = {(e.piece, e.key): t for e, t in slot.rules.state()}
            two = {(e.piece, e.key): t for e, t in second[number].rules.state()}
            assert one.keys() == two.keys() and one
            assert all(torch.equal(one[key], two[key]) for key in one)
