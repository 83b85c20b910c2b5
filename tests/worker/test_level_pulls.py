"""Pulls of one round, by a worker that rests while others go on: never some slices before a round and some after."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from syncline.core.rule import Rule
from syncline.testing import local_job
from syncline.worker.exchange.commit import Push
from syncline.worker.exchange.targets import FlatTarget
from syncline.worker.host_memory import HostMemory
from syncline.worker.job import Job

SLICE, NUM_SLICES, NUM_PULLS = 4096, 64, 20


@pytest.mark.parametrize("settings", [{"servers": 2}, {"exchange": "ring"}])
def test_a_level_pull_holds_one_round(settings: dict[str, Any]) -> None:
    """Every round makes all numbers equal to its own; whoever reads them slice by slice sees two rounds often."""
    has_moved, enough = threading.Event(), threading.Event()

    def train(job: Job) -> list[set[float]]:
        zeros = {"a": np.zeros(NUM_SLICES * SLICE // 8)}
        memory = HostMemory(job, zeros, Rule("Assign"))
        if job.rank:
            job.rest()
            return read(job, memory)
        for number in range(1, 100_000):
            memory.fill({"a": zeros["a"] + number})
            job.exchange.commit(Push(pushed=memory.ids), None).wait()
            if enough.wait(0.001 if has_moved.is_set() else 0.0):  # rounds leave time for pulls on a slow machine
                break
        return []

    def read(job: Job, memory: HostMemory) -> list[set[float]]:
        target, seen = FlatTarget({memory.segment.index: memory.flat}), []
        slices = [part for part in job.exchange.layout.slices() if target.wants(part)]
        assert len(slices) >= NUM_SLICES
        try:
            for _ in range(500 * NUM_PULLS):
                if job.exchange.pull_level(slices, target, 1.0):
                    seen.append(set(memory.values["a"].tolist()))
                    if len(set.union(*seen)) > 1:
                        has_moved.set()
                if len(seen) >= NUM_PULLS and has_moved.is_set():
                    return seen
            raise AssertionError(f"only {len(seen)} of so many pulls were of one round")
        finally:
            enough.set()

    with local_job(workers=2, slice_bytes=SLICE, **settings) as jobs:
        seen = jobs.run(train)[1]
    assert [len(numbers) for numbers in seen] == [1] * len(seen)
    assert len(set.union(*seen)) > 1  # the other one went on


@pytest.mark.parametrize("settings", [{"servers": 2}, {"exchange": "ring"}])
def test_a_worker_that_waited_pulls_after_the_round_before_its_own(settings: dict[str, Any]) -> None:
    """It pulled first and entered with its push: a round in between made its gradient one of older parameters."""
    is_over = threading.Event()

    def train(job: Job) -> list[tuple[float, float]]:
        job.kv.register({"a": np.zeros(NUM_SLICES * SLICE // 8)}, Rule("SGD", lr=1.0))
        ones = {"a": np.ones(NUM_SLICES * SLICE // 8)}
        job.kv.push_pull(ones).wait()
        seen = []
        if job.rank:
            for _ in range(5):
                job.pause()
                others_went_on(job)
                job.catch_up(enters=True)
                before = job.kv.pull()["a"][0]
                others_went_on(job)
                seen.append((before, job.kv.push_pull(ones).wait()["a"][0]))
            job.pause()
            is_over.set()
        while not is_over.is_set():
            job.kv.push_pull(ones).wait()
        job.pause()
        return seen

    def others_went_on(job: Job) -> None:
        """Two rounds without this worker, or one that waits for it."""
        known = job.kv.pull()["a"][0]
        while not job.exchange.routes.is_awaited(5.0) and job.kv.pull()["a"][0] > known - 2:
            is_over.wait(0.001)

    with local_job(workers=2, slice_bytes=SLICE, **settings) as jobs:
        seen = jobs.run(train)[1]
    assert [after - before for before, after in seen] == [-1.0] * 5
