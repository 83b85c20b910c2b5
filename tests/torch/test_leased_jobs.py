"""Whole jobs whose workers lease their samples: rounds stay level, every sample counts once."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import syncline
from syncline.client.job import Job
from syncline.core.ledger import Suspect
from syncline.core.spans import Span
from syncline.roles.coordinator import handing
from syncline.testing import local_job
from syncline.torch import DataLoader


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


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

    If a wait in the middle of an epoch counted as its end, the one that waited would be in a later stretch from then
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
        coordinator = jobs._process.coordinator
        list(DataLoader(Numbers(7), 3, job=jobs[0], name="read"))
        iter(DataLoader(Numbers(12), 3, job=jobs[0], name="begun"))
        epoch = coordinator.handing.leasing.epoch("begun", 0)
        assert epoch is not None
        epoch.aside.append(Suspect(Span(3, 6), ["worker-0", "worker-1"]))
    assert list(coordinator.events)[-2:] == [
        "epoch 1 of 'read': 7 samples were read and used in no step",
        "epoch 1 of 'begun': the samples at positions 3 to 5 were set aside: worker-0, worker-1 died at them",
    ]


def test_a_job_inside_one_process_forgets_what_is_done(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks there now and then: who asks for more has what was used confirmed, and epochs forgotten."""
    monkeypatch.setattr(handing, "KEEP_SECONDS", 0.0)
    with local_job(workers=1, folder=str(tmp_path)) as jobs:
        jobs.run(lambda job: count_samples(job, 9, 20))
        kept = jobs._process.coordinator.handing
        assert len(kept.leasing.state.epochs["loader-0"]) < 5 and len(kept._desk._used) < 10


def test_the_end_of_an_epoch_is_no_long_wait(tmp_path: pathlib.Path) -> None:
    """What was used is asked for when somebody waits: nobody waits for the next beat of a server."""
    with local_job(workers=2, folder=str(tmp_path)) as jobs:
        began = time.monotonic()
        jobs.run(lambda job: count_samples(job, 9, 10))
        assert time.monotonic() - began < 5.0
