"""Exact ledgers of `--sync-every` and `--pull-every` in `bounded` and `async`: every step counts once, in full."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core import sync_interval
from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.torch.local_steps import LocalSteps
from syncline.worker.job import Job

LR = 0.5  #: with gradients of -1, a step adds exactly this
NUM_WORKERS, NUM_STEPS = 3, 11
#: servers, replicas, transport
PLACES = [(1, 1, "auto"), (2, 1, "auto"), (2, 2, "auto"), (1, 1, "tcp"), (2, 1, "tcp"), (2, 2, "tcp")]
POLICIES = ["async", "bounded:2"]


class Cells(torch.nn.Module):
    """A cell for everything that is counted."""

    def __init__(self, num_cells: int) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(num_cells))
        self.two = torch.nn.Parameter(torch.zeros(num_cells))

    def mark(self, cells: Any) -> None:
        for cell in (self.one, self.two):
            cell.grad = torch.zeros_like(cell)
            cell.grad[cells] = -1.0


def wrapped(job: Job, num_cells: int) -> tuple[Cells, DistributedOptimizer]:
    model = Cells(num_cells)
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model, job=job)


def settings_of(place: tuple[int, int, str], **more: Any) -> dict[str, Any]:
    servers, replicas, transport = place
    return {
        "servers": servers, "replicas": replicas, "transport": transport, "slice_bytes": 128,
        "wait_seconds": PATIENCE, **more,
    }  # fmt: skip


def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- local steps ------------------------------------------------------------------------------------------


def walk(job: Job, at: Callable[[Job, int], None] = lambda job, step: None) -> tuple[Any, Any, int]:
    """Every step of every worker has a cell of its own. What the servers have, and what this worker's model has."""
    rank = int(job.name.rpartition("-")[2])
    model, optimizer = wrapped(job, NUM_WORKERS * NUM_STEPS)
    for step in range(NUM_STEPS):
        at(job, step)
        model.mark(rank * NUM_STEPS + step)
        optimizer.step()
    job.barrier("end")  # what is left of H steps is pushed before it
    optimizer.pull()
    return job.kv.pull(["one", "two"]), [model.one.detach().clone(), model.two.detach().clone()], job.step


def assert_each_once(found: list[tuple[Any, Any, int]], num_cells: int = NUM_WORKERS * NUM_STEPS) -> None:
    for values, own, _ in found:
        for each in (*values.values(), *own):
            assert each.tolist() == [LR] * num_cells


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_local_step_counts_once_and_in_full(policy: str, place: tuple[int, int, str]) -> None:
    """In any order of arrival the parameters change by the sum of all workers' deltas: a mean, a delta from another
    base or a push that is repeated would all show in some cell.
    """
    with local_job(workers=NUM_WORKERS, policy=policy, sync_every=3, **settings_of(place)) as jobs:
        found = jobs.run(walk)
        pushes = sum(server.debug_state().clocks.get("worker-0", 0) for server in jobs.servers.values())
    assert_each_once(found)
    assert [steps for _, _, steps in found] == [NUM_STEPS] * NUM_WORKERS
    assert pushes == place[0] * 4, "three of 3 steps, one of the 2 that were left at the barrier"


@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_goes_on_from_what_the_others_have_pushed(policy: str) -> None:
    """The answer to a push has the deltas of the others, and is the base of the next one."""
    with local_job(workers=2, policy=policy, sync_every=2) as jobs:
        (one, opt_one), (two, opt_two) = both(jobs, lambda job: wrapped(job, 4))
        for cell in (0, 1):
            one.mark(cell)
            opt_one.step()
        assert one.one.tolist() == [0.5, 0.5, 0, 0] and two.one.tolist() == [0, 0, 0, 0]
        two.mark(2)
        opt_two.step()
        assert two.one.tolist() == [0, 0, 0.5, 0], "its own step, not pushed yet"
        two.mark(3)
        opt_two.step()
        assert two.one.tolist() == [0.5] * 4 and one.one.tolist() == [0.5, 0.5, 0, 0]
        opt_one.pull()
        assert one.one.tolist() == [0.5] * 4


def both(jobs: Any, made: Callable[[Job], Any]) -> list[Any]:
    found: list[Any] = jobs.run(made)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_an_outer_rule_takes_each_delta_as_its_gradient(policy: str) -> None:
    """SGD(lr=0.5) adds half of each worker's delta, on arrival."""
    with local_job(workers=NUM_WORKERS, policy=policy, sync_every=4, outer="SGD(lr=0.5)") as jobs:
        for values, _, _ in jobs.run(walk):
            assert values["one"].tolist() == values["two"].tolist() == [LR / 2] * NUM_WORKERS * NUM_STEPS


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


def numbers(job: Job, num_samples: int) -> DataLoader[Any]:
    return DataLoader(Numbers(num_samples), 2, job=job, name="numbers", shuffle=True, seed=1)


def read(
    job: Job, num_samples: int, num_epochs: int = 2, made: tuple[Cells, DistributedOptimizer] | None = None
) -> tuple[Any, Any, int]:
    """Every sample has a cell."""
    model, optimizer = made or wrapped(job, num_samples)
    loader = numbers(job, num_samples)
    for _ in range(num_epochs):
        for batch in loader:
            model.mark(batch)
            optimizer.step()
    job.barrier("end")
    optimizer.pull()
    return job.kv.pull(["one", "two"]), [model.one.detach().clone(), model.two.detach().clone()], job.step


@pytest.mark.parametrize("sync_every", [3, "auto"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_left_at_the_end_of_an_epoch_is_pushed(policy: str, sync_every: Any, tmp_path: pathlib.Path) -> None:
    with local_job(workers=2, policy=policy, sync_every=sync_every, folder=str(tmp_path)) as jobs:
        for values, own, _ in jobs.run(lambda job: read(job, 31)):
            for each in (*values.values(), *own):
                assert each.tolist() == [2 * LR] * 31


@pytest.mark.parametrize("place", [(2, 2, "auto"), (2, 2, "tcp")], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_dies(policy: str, place: tuple[int, int, str]) -> None:
    """Its backup takes over in the middle of it; a delta that is sent again counts once."""
    with local_job(workers=NUM_WORKERS, policy=policy, sync_every=2, **settings_of(place)) as jobs:

        def at(job: Job, step: int) -> None:
            if job.name == "worker-0" and step == NUM_STEPS // 2:
                jobs.kill("server-1")

        assert_each_once(jobs.run(lambda job: walk(job, at)))


MORE_DEATHS = [("async", 4), ("bounded:9", "auto")]


@pytest.mark.parametrize(
    ("policy", "sync_every"),  # the other one pushes nothing until it has died
    [("bounded:9", 4), ("async", "auto"), *(pytest.param(*way, marks=pytest.mark.proof) for way in MORE_DEATHS)],
)
def test_a_worker_dies_between_two_pushes_and_comes_back(
    policy: str, sync_every: Any, tmp_path: pathlib.Path
) -> None:
    """Its local steps since its last push are lost with it: their samples are read again, by whom it may be. It
    counts its own steps on from those that its pushes contained.
    """
    num_samples = 60
    with local_job(workers=2, policy=policy, sync_every=sync_every, folder=str(tmp_path), least_workers=1) as jobs:
        chief, (model, optimizer) = both(jobs, lambda job: wrapped(job, num_samples))
        victim, found, made = jobs[1], dict[str, Any](), {"worker-0": chief}
        reading = iter(numbers(victim, num_samples))
        steps = 0
        while steps < 6:
            model.mark(next(reading))
            optimizer.step()
            steps += 1
        pushed = victim.committed
        victim.reporting.report()
        eventually(lambda: jobs.coordinator.job.committed.get("worker-1") == pushed)
        jobs.kill("worker-1")
        back = jobs.add_worker("worker-1")
        assert back.life.number == 2 and back.own_step == pushed.steps
        assert sync_every == "auto" or (pushed.commits, pushed.steps) == (1, 4)

        def go_on(job: Job) -> None:
            found[job.name] = read(job, num_samples, 1, made.get(job.name))

        threads = [threading.Thread(target=go_on, args=(job,), name="Thread-go") for job in (jobs[0], back)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        for values, _, _ in found.values():
            assert values["one"].tolist() == values["two"].tolist() == [LR] * num_samples


@pytest.mark.parametrize("policy", ["async", "bounded:9"])  # the other one pushes nothing until it has died
def test_a_worker_dies_when_it_pushes_the_last_local_steps_of_an_epoch(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch is not over before that push counts: the other worker reads the samples of these steps again."""
    with local_job(workers=2, policy=policy, sync_every=4, least_workers=1) as jobs:
        flush, found = LocalSteps.flush, list[Any]()

        def flushes(local: LocalSteps) -> None:
            if threading.current_thread() is threading.main_thread() and jobs[1].own_step == 5:
                jobs.kill("worker-1")
                raise KeyboardInterrupt
            flush(local)

        monkeypatch.setattr(LocalSteps, "flush", flushes)
        chief, (model, optimizer) = both(jobs, lambda job: wrapped(job, 10))
        other = threading.Thread(target=lambda: found.append(read(jobs[0], 10, 1, chief)), name="Thread-other")
        with pytest.raises(KeyboardInterrupt):
            for batch in numbers(jobs[1], 10):  # of two samples each
                if jobs[1].own_step == 4:  # all of it is leased, and the other one waits for what is left
                    other.start()
                    eventually(lambda: [epoch.num_done for epoch in jobs[1].stats().epochs] == [8])
                model.mark(batch)
                optimizer.step()
        other.join(PATIENCE)
        values, _, _ = found[0]
        assert values["one"].tolist() == values["two"].tolist() == [LR] * 10


@pytest.mark.parametrize("policy", ["sync", *POLICIES])
def test_a_checkpoint_counts_the_steps_that_were_made(policy: str, tmp_path: pathlib.Path) -> None:
    """Not pushes times H: the last one before the barrier has one step. A job that resumes goes on from there, and
    local steps that were in no push when it was saved are in neither.
    """
    place = {"checkpoint": str(tmp_path / "saved"), "policy": policy, "sync_every": 3}

    def train(job: Job, begin: int, end: int) -> tuple[str, int, Any]:
        model, optimizer = wrapped(job, 12)
        job.state["at"] = begin
        if begin:
            job.put_back()
        for step in range(begin, end):
            model.mark(step)
            optimizer.step()
        optimizer.pull()  # pushes what is left
        return job.save(), job.step, job.kv.pull(["one"])["one"].tolist()

    with local_job(workers=1, folder=str(tmp_path / "a"), **place) as jobs:
        name, step, values = jobs.run(lambda job: train(job, 0, 7))[0]
        assert step == 7 and name.endswith("-7"), name
        assert values == [LR] * 7 + [0.0] * 5
        assert jobs.coordinator.status.save_counts().step == 7
    with local_job(workers=1, folder=str(tmp_path / "b"), **place) as jobs:
        _, step, values = jobs.run(lambda job: train(job, 7, 12))[0]
        assert step == 12 and values == [LR] * 12


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_validate_the_parameters_of_the_servers(policy: str, tmp_path: pathlib.Path) -> None:
    """What is in no push yet is pushed first; then both see the same."""

    def train(job: Job) -> list[float]:
        model, optimizer = wrapped(job, 2 * NUM_STEPS)
        seen: list[float] = []

        def measure(batch: Any) -> dict[str, float]:
            seen.append(model.one.sum().item())
            return {"done": model.one.sum().item()}

        validated = job.validate(measure, Numbers(8), "100steps", batch_size=2)
        for step in range(NUM_STEPS):
            model.mark(job.rank * NUM_STEPS + step)
            optimizer.step()
        job.barrier("trained")
        validated.now()
        return seen

    with local_job(workers=2, policy=policy, sync_every=4, folder=str(tmp_path)) as jobs:
        seen = [value for each in jobs.run(train) for value in each]
    assert len(seen) == 4 and set(seen) == {NUM_STEPS}, "four batches, by whom it may be"


def test_a_job_tells_how_many_steps_it_makes_for_a_push(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """In `job.stats()`, whose times also go to the coordinator; with `auto`, what each worker has chosen."""
    monkeypatch.setattr(sync_interval, "share_of", lambda *_: 1.0)  # everything takes too long

    def train(job: Job) -> int:
        model, optimizer = wrapped(job, 4)
        for _ in range(4 + 4 * 8 + 1):
            model.mark([0])
            optimizer.step()
        job.barrier("trained")
        return job.stats().times.steps_per_push

    with local_job(workers=2, policy="async", sync_every="auto", folder=str(tmp_path)) as jobs:
        monkeypatch.setattr(sync_interval, "NO_GAIN", 1e9)
        assert jobs.run(train) == [64, 64]


def test_in_a_round_changes_of_different_numbers_of_steps_are_weighted_by_samples() -> None:
    """Three steps of one worker and one of the other, as at the end of its data, twice. A sample counts the same."""

    def train(job: Job) -> tuple[list[float], int]:
        model, optimizer = wrapped(job, 2)
        for _ in range(6 if job.rank == 0 else 2):
            model.mark(job.rank)
            optimizer.step(weight=1.0)
            if job.rank == 1:
                optimizer.pull()  # pushes the step
        return model.one.tolist(), job.committed.steps

    with local_job(workers=2, sync_every=3) as jobs:
        one, two = jobs.run(train)
    assert one == ([2 * 1.5 * 3 / 4, 2 * 0.5 * 1 / 4], 6) and two == (one[0], 2)


# -- pulls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    ("policy", "window"),
    [("async", 0), pytest.param("async", 2, marks=pytest.mark.proof), ("bounded:2", 1)],
)
def test_every_push_counts_once_however_seldom_parameters_are_taken(
    policy: str, window: int, place: tuple[int, int, str]
) -> None:
    with local_job(
        workers=NUM_WORKERS, policy=policy, window=window, pull_every=4, **settings_of(place)
    ) as jobs:  # fmt: skip
        assert_each_once(jobs.run(walk))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_parameters_come_in_every_third_step_and_at_a_rest(device: str, servers: int, transport: str) -> None:
    """In between the model stays as it was, also of its own pushes."""
    with local_job(workers=1, policy="async", pull_every=3, servers=servers, transport=transport) as jobs:
        model = Cells(4).to(device)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model, job=jobs[0])
        seen = []
        for _ in range(8):
            model.mark([0, 1, 2, 3])
            opt.step()
            opt.wait()
            seen.append((model.one[0].item(), model.two[3].item()))
        assert [one for one, _ in seen] == [two for _, two in seen] == [0, 0, 1.5, 1.5, 1.5, 3.0, 3.0, 3.0]
        jobs[0].rest()
        assert model.one.tolist() == model.two.tolist() == [4.0] * 4
        model.mark([0])
        opt.step()
        opt.pull()
        assert model.one.tolist() == [4.5, 4.0, 4.0, 4.0]
        for number in range(3):  # counted from the last pull, not from the last push that brought some
            model.mark([1])
            opt.step()
            opt.wait()
            assert model.one[1].item() == (5.5 if number == 2 else 4.0)


def test_bytes_are_saved() -> None:
    """Twelve pushes of 1 MiB over a socket: all of them go out, every fourth answer comes back with as much."""

    def train(job: Job) -> tuple[int, int]:
        model, optimizer = wrapped(job, 1 << 17)
        before = job.exchange.stats()
        for _ in range(12):
            model.mark([0])
            optimizer.step()
        after = job.exchange.stats()
        return after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received

    for every, num_pulls in ((1, 12), (4, 3)):
        with local_job(workers=1, policy="async", pull_every=every, transport="tcp") as jobs:
            ((sent, received),) = jobs.run(train)
        assert 12 << 20 <= sent < 13 << 20
        assert num_pulls << 20 <= received < (num_pulls << 20) + (1 << 18)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("policy", ["async", "bounded:20"])
def test_staleness_is_that_of_the_parameters_not_of_the_last_answer(policy: str, transport: str) -> None:
    """Eight pushes, parameters with every fourth: each gradient is of parameters that lack 0, 1, 2, 3 updates."""
    with local_job(workers=1, policy=policy, pull_every=4, transport=transport) as jobs:
        model, optimizer = wrapped(jobs[0], 4)
        for _ in range(8):
            model.mark([0])
            optimizer.step()
        stats = jobs[0].stats()
    assert (stats.staleness_max, stats.staleness_mean) == (3, 1.5)


def test_a_push_without_a_pull_is_the_same_by_hand() -> None:
    """`kv.push` takes no parameters: what it is pushed from gets staler, until a pull."""
    with local_job(workers=1, policy="async,damped") as jobs:
        job = jobs[0]
        job.kv.register({"x": torch.zeros(4)}, Rule("SGD", lr=1.0))
        for _ in range(2):
            job.kv.push({"x": torch.full((4,), -1.0)}).wait()
        assert job.kv.pull()["x"].tolist() == [1.5] * 4, "the second counts a half"
        job.kv.push({"x": torch.full((4,), -1.0)}).wait()
        assert job.kv.pull()["x"].tolist() == [2.5] * 4


def test_a_server_dies_between_two_pulls() -> None:
    with local_job(workers=NUM_WORKERS, policy="async", pull_every=5, **settings_of((2, 2, "tcp"))) as jobs:

        def at(job: Job, step: int) -> None:
            if job.name == "worker-0" and step == NUM_STEPS // 2:
                jobs.kill("server-1")

        assert_each_once(jobs.run(lambda job: walk(job, at)))


@pytest.mark.parametrize("every", [4, "auto"])
def test_gradients_of_kv_are_not_gathered_and_that_is_said_once(
    every: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deltas are meant as they are: nothing is said of them."""
    with local_job(workers=1, sync_every=every) as jobs:
        jobs[0].kv.register({"count": np.zeros(2, np.float32)}, Rule("Add"))
        jobs[0].kv.push_pull({"count": np.ones(2, np.float32)}).wait()
        assert "does not apply" not in capsys.readouterr().err
        jobs[0].kv.register({"x": np.zeros(2, np.float32)}, Rule("SGD", lr=1.0))
        for _ in range(3):
            jobs[0].kv.push_pull({"x": np.ones(2, np.float32)}).wait()
        said = capsys.readouterr().err
        assert said.count(f"--sync-every {every} does not apply to gradients that job.kv pushes") == 1, said
