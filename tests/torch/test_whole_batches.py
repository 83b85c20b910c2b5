"""Scripts with several optimizers: a save has a batch in all of its commits, or in none."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE

from syncline.coordinator import saves
from syncline.core.wire.checkpoints import Save
from syncline.store.checkpoints import choose
from syncline.store.folders import open_folder
from syncline.testing.local import LocalJob, local_job
from syncline.torch.data import DataLoader
from syncline.torch.optimizer import DistributedOptimizer

SECONDS = PATIENCE


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index / len(self)])


class Between:
    """The cut begins when every worker has made the first commit of a batch, and not the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
        self._begins, self.is_over = threading.Event(), threading.Event()
        self._stands = False
        self._workers = threading.Barrier(num_workers, action=self._decide)
        self._all_there = threading.Barrier(num_workers + 1)
        monkeypatch.setattr(saves, "SNAPSHOT_SECONDS", SECONDS)  # after that any level place would do
        take_snapshot = saves.take_snapshot

        def late(*args: Any) -> Any:
            self._begins.set()
            if not self.is_over.is_set():
                self._all_there.wait(SECONDS)
                self.is_over.set()
            return take_snapshot(*args)

        monkeypatch.setattr(saves, "take_snapshot", late)

    def _decide(self) -> None:
        self._stands = self._begins.is_set()

    def stand(self, number: int) -> None:
        """Called by a script between its two steps of a batch: all stand in the same one, the first after the cut
        has begun. It begins when they have come to a boundary."""
        if number < 2 or self._stands:
            return
        self._begins.wait(min(0.1 * number, 1.0))
        self._workers.wait(SECONDS)
        if self._stands:
            self._all_there.wait(SECONDS)
            time.sleep(0.2)


def work(jobs: LocalJob, job: Any, between: Between) -> None:
    torch.manual_seed(1)
    models = torch.nn.ModuleList([torch.nn.Linear(1, 40), torch.nn.Linear(1, 40)])
    opts = []
    for model in models:
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        opts.append(DistributedOptimizer(inner, model=models, job=job))
    for number, batch in enumerate(DataLoader(Numbers(), batch_size=2, job=job)):
        if number == 2 and job.rank == 0:
            jobs.process.links[job.name].try_call(Save("a test"))
        for opt, model in zip(opts, models, strict=True):
            opt.zero_grad()
            model(batch).square().mean().backward()
            opt.step()
            if opt is opts[0]:
                between.stand(number)
        if not between.is_over.is_set():
            time.sleep(0.01)


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_two_commits_of_a_batch_are_both_in_a_save_or_neither(policy, tmp_path, monkeypatch):
    between = Between(monkeypatch, 2)
    with local_job(workers=2, servers=2, policy=policy, checkpoint=str(tmp_path), slice_bytes=64, keep=9) as jobs:
        jobs.run(lambda job: work(jobs, job, between), SECONDS)
        assert between.is_over.is_set()
        found, until = None, time.monotonic() + SECONDS
        while found is None and time.monotonic() < until:  # it may still be written
            found = choose(open_folder(str(tmp_path)), print)
            time.sleep(0.02)
        assert found is not None
    manifest = found.manifest
    assert len({part.file for part in manifest.slices}) == 2
    clocks = {clock for part in manifest.slices for _, _, clock in part.clocks}
    assert clocks and all(clock % 2 == 0 for clock in clocks), clocks
    assert [script.worker for script in manifest.scripts] == ["worker-0", "worker-1"]
    assert all(script.clock in clocks for script in manifest.scripts)
