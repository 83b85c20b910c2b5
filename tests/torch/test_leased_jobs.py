"""Whole jobs whose workers lease their samples: rounds stay level, every sample counts once."""

from __future__ import annotations

import contextlib
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

import syncline
from syncline.coordinator import leases
from syncline.core.leasing.ledger import SuspectBatch
from syncline.core.leasing.ranges import Span
from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def look_at(kept: leases.LeaseService, stop: threading.Event) -> None:
    """As the coordinator of a job of several processes does, now and then."""
    while not stop.wait(0.05):
        kept.tick(time.monotonic())


def count_samples(job: Job, num_samples: int, num_epochs: int, **options: Any) -> list[tuple[int, int]]:
    """Each push adds 1 to the cells of its samples; the round in which each step was, by epoch."""
    job.kv.register({"counts": np.zeros(num_samples)}, syncline.Rule("Add"), reduce="sum")
    job.kv.register({"rounds": np.zeros(1)}, syncline.Rule("Add"), reduce="mean")
    loader = DataLoader(Numbers(num_samples), 2, job=job, **options)
    found = []
    for epoch in range(num_epochs):
        for batch in loader:
            ones = np.zeros(num_samples)
            ones[batch.numpy()] = 1
            values = job.kv.push_pull({"counts": ones, "rounds": np.ones(1)}).wait()
            found.append((epoch, int(values["rounds"][0])))
    return found


@pytest.mark.parametrize("policy", ["sync", "bounded:2", "async"])
def test_every_sample_counts_once_in_every_epoch(policy: str, tmp_path: pathlib.Path) -> None:
    with local_job(workers=3, policy=policy, folder=str(tmp_path)) as jobs:
        jobs.run(lambda job: count_samples(job, 47, 3, shuffle=True))
        assert jobs[0].kv.pull(["counts"])["counts"].tolist() == [3.0] * 47


def test_uneven_ends_leave_the_next_epoch_in_whole_rounds(tmp_path: pathlib.Path) -> None:
    """9 samples, batches of 2: one worker has a batch more, the other waits for the end. Then both are level again.

    If a wait in the middle of an epoch counted as its end, the one that waited would be in a later phase from then
    on, and each would step alone.
    """
    with local_job(workers=2, folder=str(tmp_path)) as jobs:
        world = jobs.run(lambda job: count_samples(job, 9, 3))
        few, many = sorted(world, key=len)
        assert [len(few), len(many)] == [6, 9]
        assert set(few) <= set(many), "each of its steps was in a round with the other's"


def test_a_loop_without_steps_leaves_the_next_epoch_in_whole_rounds(tmp_path: pathlib.Path) -> None:
    """An evaluation with gradients on: some wait for its end and some do not. Behind it all are level."""

    def work(job: Job) -> list[tuple[int, int]]:
        list(DataLoader(Numbers(7), 3, job=job))
        found = count_samples(job, 12, 1)
        list(DataLoader(Numbers(7), 3, job=job))
        return found

    with local_job(workers=2, folder=str(tmp_path)) as jobs:
        one, two = jobs.run(work)
        assert one == two == [(0, 1), (0, 2), (0, 3)]


def test_the_end_of_a_job_names_what_was_passed_over_and_set_aside(tmp_path: pathlib.Path) -> None:
    with local_job(workers=1, folder=str(tmp_path)) as jobs:
        coordinator = jobs.coordinator
        list(DataLoader(Numbers(7), 3, job=jobs[0], name="read"))
        iter(DataLoader(Numbers(12), 3, job=jobs[0], name="begun"))
        epoch = coordinator.leases.leasing.epoch("begun", 0)
        assert epoch is not None
        epoch.quarantined.append(SuspectBatch(Span(3, 6), ["worker-0", "worker-1"]))
    assert list(coordinator.job.events)[-2:] == [
        "epoch 1 of 'read': 7 samples were read and used in no step",
        "epoch 1 of 'begun': the samples at positions 3 to 5 were quarantined: worker-0, worker-1 died at them; "
        "syncline.data.samples_at says which they are",
    ]


def test_a_job_inside_one_process_forgets_what_is_done(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks there now and then: who asks for more has what was used confirmed, and epochs forgotten."""
    monkeypatch.setattr(leases, "KEEP_SECONDS", 0.0)
    with local_job(workers=1, folder=str(tmp_path)) as jobs:
        jobs.run(lambda job: count_samples(job, 9, 20))
        kept = jobs.coordinator.leases
        assert len(kept.leasing.state.epochs["loader-0"]) < 5 and jobs.coordinator.debug_state().num_unsaved_uses < 10


def test_the_end_of_an_epoch_waits_for_no_beat(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used is asked for when somebody waits: here no beat of a server ever says it."""
    monkeypatch.setattr(leases.LeaseService, "note_heartbeat", lambda *_: None)
    with local_job(workers=2, folder=str(tmp_path)) as jobs:
        jobs.run(lambda job: count_samples(job, 9, 10))
        assert jobs[0].kv.pull(["counts"])["counts"].tolist() == [10.0] * 9


@pytest.mark.parametrize("settings", [{}, {"servers": 2, "slice_bytes": 64}], ids=["one", "two servers"])
def test_who_waits_for_the_end_of_an_epoch_has_its_parameters_behind_it(
    settings: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """The others' last rounds were without it: its next gradients must not be of parameters from before them."""

    def work(job: Job) -> list[list[float]]:
        weight = torch.nn.Parameter(torch.zeros(40))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), job=job)
        loader, found = DataLoader(Numbers(9), 2, job=job), []
        for _ in range(3):
            for batch in loader:
                optimizer.zero_grad()
                (weight * batch.sum()).sum().backward()
                optimizer.step()
            found.append(weight.detach().tolist())
            job.barrier("seen")
        return found

    with local_job(workers=2, folder=str(tmp_path), **settings) as jobs:
        one, two = jobs.run(work)
    assert one == two


def test_one_that_gets_what_is_left_does_not_wait_for_those_who_got_nothing(tmp_path: pathlib.Path) -> None:
    """Two have nothing to do and pause; then a third gives one sample back. Whoever gets it steps in a phase of its
    own, and the other, which waits for the end of the epoch, steps no more: waited for, it would wait for ever."""
    with local_job(workers=3, folder=str(tmp_path)) as jobs:
        asking = jobs.coordinator.leases.queue.asking

        def work(job: Job) -> None:
            job.kv.register({"counts": np.zeros(6)}, syncline.Rule("Add"), reduce="sum")
            for batch in DataLoader(Numbers(6), 1, job=job):
                ones = np.zeros(6)
                ones[batch.numpy()] = 1
                job.kv.push_pull({"counts": ones}).wait()
                if job.rank == 2:
                    job.rest()
                    until(lambda: sum(asked.message.waits for asked in list(asking.values())) == 2)
                    break

        jobs.run(work)
        assert jobs[0].kv.pull()["counts"].tolist() == [1.0] * 6


def test_an_evaluation_of_the_chief_alone_with_gradients_on_stops_nobody(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of it are dealt to the others, which never come to it: it gets them too, and stays level with them."""
    monkeypatch.setattr(leases, "RECLAIM_SECONDS", 0.1)

    def work(job: Job) -> tuple[list[int], list[int]]:
        job.kv.register({"counts": np.zeros(24)}, syncline.Rule("Add"), reduce="sum")
        loader, tests = DataLoader(Numbers(24), 2, job=job), DataLoader(Numbers(9), 2, job=job, name="tests")
        steps, seen = [], []
        for epoch in range(3):
            steps.append(0)
            for batch in loader:
                ones = np.zeros(24)
                ones[batch.numpy()] = 1
                job.kv.push_pull({"counts": ones}).wait()
                steps[-1] += 1
                if epoch and not job.is_chief:
                    time.sleep(0.1)
            seen += [x for batch in tests for x in batch.tolist()] if job.is_chief else []
            job.barrier("evaluated")
        return steps, seen

    with local_job(workers=2, folder=str(tmp_path)) as jobs:
        stop = threading.Event()
        looking = threading.Thread(target=look_at, args=(jobs.coordinator.leases, stop))
        looking.start()
        (chief, seen), (other, _) = jobs.run(work)
        stop.set()
        looking.join()
        assert sorted(seen) == sorted([*range(9)] * 3)
        assert chief == other == [6, 6, 6]
        assert jobs[0].kv.pull()["counts"].tolist() == [3.0] * 24


@pytest.mark.parametrize("how", ["break", "error", "break before the step"])
@pytest.mark.parametrize("policy", ["sync", "bounded:2", "async", "sync:spare=1"])
def test_one_that_leaves_a_loop_early_is_level_in_the_next(how: str, policy: str, tmp_path: pathlib.Path) -> None:
    """What it has made no step with is passed over and told; what it has not got is others'."""
    passed_over: list[int] = []  # samples; of the end of an epoch a batch may have only one
    left = threading.Event()  # where nobody waits for anybody, the other one could read everything before it has come
    if policy.startswith("sync"):
        left.set()

    def work(job: Job) -> None:
        job.kv.register({"counts": np.zeros(24)}, syncline.Rule("Add"), reduce="sum")
        loader = DataLoader(Numbers(24), 2, job=job)
        for epoch in range(3):
            with contextlib.suppress(ZeroDivisionError):
                for batch in loader:
                    leaves = epoch == 0 and job.rank == 1
                    assert leaves or left.wait(PATIENCE)
                    if leaves and how != "break":
                        passed_over.append(len(batch))
                    if leaves and how == "error":
                        raise ZeroDivisionError
                    if leaves and how == "break before the step":
                        break
                    ones = np.zeros(24)
                    ones[batch.numpy()] = 1
                    job.kv.push_pull({"counts": ones}).wait()
                    if leaves:
                        break
            if job.rank == 1:
                left.set()

    with local_job(workers=2, policy=policy, folder=str(tmp_path), wait_seconds=PATIENCE) as jobs:
        jobs.run(work)
        counts = jobs[0].kv.pull()["counts"]
    assert counts.sum() == 3 * 24 - sum(passed_over) and set(counts) <= {2.0, 3.0}


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_quarantined_worker_reads_nothing_that_others_could(policy: str, tmp_path: pathlib.Path) -> None:
    """Its pushes count for nothing: what it has read is passed over and said, the rest is read by the others."""

    def work(job: Job) -> int:
        job.kv.register({"counts": np.zeros(400)}, syncline.Rule("SGD", lr=1.0), reduce="sum")
        mine = 0
        for batch in DataLoader(Numbers(400), 2, job=job):
            ones = np.zeros(400)
            ones[batch.numpy()] = np.nan if job.rank == 1 else 1
            job.kv.push_pull({"counts": ones}).wait()
            mine += len(batch)
            time.sleep(0.002)
        return mine

    with local_job(workers=2, policy=policy, folder=str(tmp_path), bad_pushes=3, wait_seconds=PATIENCE) as jobs:
        stop = threading.Event()
        looking = threading.Thread(target=beat_for, args=(jobs, stop))
        looking.start()
        _, read = jobs.run(work)
        stop.set()
        looking.join()
        counts = jobs[0].kv.pull()["counts"]
        (epoch,) = jobs[0].stats().epochs or [None]
        state = jobs.coordinator.leases.leasing.state
        told = [e.num_passed_over for epochs in state.epochs.values() for e in epochs.values()]
    assert (counts == -1).sum() == 400 - read and (counts == 0).sum() == read
    assert read < 300 and (epoch is None or epoch.num_passed_over == read or sum(told) == read)


def beat_for(jobs: Any, stop: threading.Event) -> None:
    """What heartbeats do between processes."""
    while not stop.wait(0.01):
        coordinator = jobs.coordinator
        for job in jobs:
            with coordinator.job.lock:
                coordinator.leases.note_heartbeat(job.name, job.reporting.beat())
