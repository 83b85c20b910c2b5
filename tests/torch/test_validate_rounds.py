"""A validation in `sync`: nobody leaves the rounds for it, unless one of them waits for a worker that has come."""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Any

import pytest
import torch
from tests.torch.test_validate import Counting, Numbers

from syncline.coordinator.saves import SaveService
from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker import validation
from syncline.worker.job import Job


def counting(job: Job) -> tuple[Counting, DistributedOptimizer]:
    model = Counting()
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)


def step(model: Counting, opt: DistributedOptimizer) -> None:
    model.count.grad = -torch.ones(1)
    opt.step()


def test_rounds_are_whole_however_long_a_save_takes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who left them while the cut of a save was awaited was in other rounds afterwards than the others, by chance: on
    a starved machine the same samples made more steps."""
    monkeypatch.setattr(validation, "ASK_ROUND_SECONDS", 0.0)
    asked: list[bool] = []

    def work(job: Job) -> float:
        model, opt = counting(job)
        routes: Any = job.exchange.routes
        is_awaited = routes.is_awaited
        monkeypatch.setattr(routes, "is_awaited", lambda seconds: asked.append(is_awaited(seconds)) or asked[-1])
        job.validate(lambda batch: {"count": float(model.count)}, Numbers(4), 2, batch_size=2)
        for _ in DataLoader(Numbers(24), 2, job=job):
            step(model, opt)
        return model.count.item()

    save = SaveService.save_for_validation
    monkeypatch.setattr(SaveService, "save_for_validation", lambda *of: threading.Timer(0.4, save, of).start())
    with local_job(2, 2, folder=str(tmp_path), checkpoint=str(tmp_path / "saves"), best="max:count") as job:
        assert job.run(work) == [6.0, 6.0]
        events = list(job.coordinator.job.events)
    told = [line.split(":")[0] for line in events if line.startswith("validation at step")]
    assert told == [f"validation at step {number}" for number in (2, 4, 6)]
    assert asked and not any(asked)


def test_who_is_waited_for_in_a_round_stands_aside(tmp_path: pathlib.Path) -> None:
    """worker-0 has come to the validation, worker-1 comes behind a round that waits for worker-0."""

    def work(job: Job) -> float:
        model, opt = counting(job)
        validated = job.validate(lambda batch: {"count": float(model.count)}, Numbers(4), 100, batch_size=2)
        if job.name == "worker-1":
            step(model, opt)
        while job.name == "worker-0" and not any(list(rounds.open_commits()) for rounds in all_rounds):
            time.sleep(0.01)
        return validated.now()["count"]

    with local_job(2, 2, folder=str(tmp_path)) as job:
        all_rounds = [server.commits.rounds for server in job.servers.values()]
        assert job.run(work) == [1.0, 1.0]
