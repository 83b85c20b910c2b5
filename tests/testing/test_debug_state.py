"""`debug_state()`: what a member is at, as plain data."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline import Rule
from syncline.testing import local_job
from syncline.worker.job import Job


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_after_two_steps_nothing_is_open() -> None:
    def work(job: Job) -> None:
        job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
        for _ in range(2):
            job.kv.push_pull({"x": np.ones(4)}).wait()
        job.notice("hello", is_own=True)

    with local_job(workers=2, servers=1) as local:
        local.run(work)
        worker, server = local[1].debug_state(), local.servers["server-0"].debug_state()
        job = local.coordinator.debug_state()
    assert (worker.name, worker.generation) == ("worker-1", 1)
    assert (worker.step, worker.clock, worker.open_clocks) == (2, 2, ())
    assert worker.servers == ("server-0",) and set(worker.primaries.values()) == {"server-0"}
    assert worker.waits_for == "" and not worker.has_leased and not worker.is_paused and "hello" in worker.notices
    assert (server.name, server.generation, server.backups) == ("server-0", 1, ())
    assert server.versions == dict.fromkeys(worker.primaries, 2) and server.clocks == {"worker-0": 2, "worker-1": 2}
    assert server.arena_bytes >= 2 * 32 and server.held["under way"] == server.held["parked"] == 0
    assert job.members == ("server-0", "worker-0", "worker-1") and (job.save, job.lease_requests) == ("", ())
    for state in (worker, server, job):
        assert msgspec.json.decode(msgspec.json.encode(state))["threads"]
        with pytest.raises(AttributeError):
            state.generation = 7  # type: ignore[misc]


def test_it_says_what_the_script_waits_for() -> None:
    """Asked by another thread, while the worker's own waits."""
    with local_job(workers=2) as local:
        thread = threading.Thread(target=lambda: local[0].barrier("one"), daemon=True)
        thread.start()
        until(lambda: local[0].debug_state().waits_for == "barrier")
        local[1].barrier("one")
        thread.join(PATIENCE)
        assert local[0].debug_state().waits_for == ""
