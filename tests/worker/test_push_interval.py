"""`--sync-every auto` in rounds: all workers make as many steps for a push as the chief decides."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from syncline import Rule
from syncline.core.sync_interval import SyncInterval
from syncline.store import weights
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker import push_interval
from syncline.worker.host_optimizer import HostOptimizer
from syncline.worker.job import Job

SETTINGS: list[dict[str, Any]] = [{"servers": 2}, {"transport": "tcp"}, {"exchange": "ring"}, {"codec": "int8"}]


class Decided(SyncInterval):
    """After its fifth push the chief would make 3 steps for a push, the other worker 7."""

    def pushed(self, *_: Any) -> None:
        self.count = getattr(self, "count", 0) + 1
        if self.count >= 5:
            self.steps = {"worker-0": 3, "worker-1": 7}.get(threading.current_thread().name, 1)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_interval, "SyncInterval", Decided)


def torch_step(job: Job) -> Callable[[], object]:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), job=job)

    def step() -> None:
        weight.grad = -torch.ones(4)
        optimizer.step()

    return step


def host_step(job: Job) -> Callable[[], object]:
    own = {"w": np.zeros(4, np.float32)}
    optimizer = HostOptimizer(job, own, None)

    def step() -> None:
        given = optimizer.local_step({"w": own["w"] + 1})
        own["w"] = (own["w"] + 1) if given is None else given["w"].copy()

    return step


def lengths(job: Job, make: Callable[[Job], Callable[[], object]]) -> list[int]:
    """H after each of 14 steps."""
    step, found = make(job), []
    for _ in range(14):
        step()
        found.append(job.stats().times.steps_per_push)
    return found


@pytest.mark.usefixtures("decided")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("make", [torch_step, host_step])
def test_all_workers_take_the_number_of_the_chief_at_the_same_push(
    make: Callable[[Job], Callable[[], object]], settings: dict[str, Any]
) -> None:
    """The chief decides after five pushes; its number comes with the answer to the sixth."""
    with local_job(workers=2, sync_every="auto", **settings) as jobs:
        assert jobs.run(lambda job: lengths(job, make)) == [[1] * 5 + [3] * 9] * 2


@pytest.mark.usefixtures("decided")
def test_without_rounds_each_worker_decides_for_itself() -> None:
    with local_job(workers=2, sync_every="auto", policy="async") as jobs:
        assert jobs.run(lambda job: lengths(job, torch_step)) == [[1] * 4 + [3] * 10, [1] * 4 + [7] * 10]


@pytest.mark.usefixtures("decided")
def test_a_worker_begins_with_the_number_of_the_job() -> None:
    """As one that joins does: the number is on the servers."""

    def train(job: Job) -> list[int]:
        job.kv.register([("syncline.sync_every", np.array([2]))], Rule("Assign"))
        step = torch_step(job)
        found = [job.stats().times.steps_per_push]
        for _ in range(4):
            step()
        return [*found, job.committed.commits]

    with local_job(workers=2, sync_every="auto") as jobs:
        assert jobs.run(train) == [[2, 2], [2, 2]]


def test_the_number_is_not_among_a_models_weights(tmp_path: pathlib.Path) -> None:
    def train(job: Job) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        job.save()

    with local_job(workers=2, sync_every="auto", checkpoint=str(tmp_path)) as jobs:
        jobs.run(train)
    assert sorted(weights.load(tmp_path)) == ["bias", "weight"]
