"""Saves that are late, given up, or end before they begin: what a worker notes for them, and what it costs."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.worker.test_saves import SECONDS, Counter, begin, step, until

from syncline.core.wire.checkpoints import Noted
from syncline.core.wire.control import Report
from syncline.core.wire.leases import AskLeaseAcks, GivenLeaseAcks
from syncline.errors import StoreError
from syncline.worker.checkpoint import saves


def test_the_end_of_a_save_may_come_before_its_beginning(house):
    """A worker that stood still reads both at once: nothing is noted for a save that nobody ends again."""
    _, job, asker = begin(house)
    asker.end(3)
    step(job)
    with pytest.raises(StoreError, match="save 3 is over"):
        asker.expect(3).wait(SECONDS)
    step(job)
    assert not job.debug_state().is_boundary_watched and job.debug_state().num_save_notes == 0
    with job.boundary.waiting():
        assert isinstance(asker.expect(4).wait(SECONDS), Noted)


def test_a_save_that_begins_while_the_one_before_is_let_go_is_noted(house, monkeypatch):
    _, job, asker = begin(house)
    first, unwatch = asker.expect(1), job.boundary.unwatch
    begins, is_gone = threading.Event(), threading.Event()
    until(lambda: job.debug_state().is_boundary_watched)

    def late(watcher: Any) -> None:
        begins.set()
        until(lambda: job.debug_state().save_number == 2)
        time.sleep(0.2)
        unwatch(watcher)
        is_gone.set()

    monkeypatch.setattr(job.boundary, "unwatch", late)
    asker.end(1)
    with pytest.raises(StoreError, match="save 1 is over"):
        first.wait(SECONDS)
    assert begins.wait(SECONDS)  # else the second comes before it, and there is nothing to let go
    second = asker.expect(2)
    assert is_gone.wait(SECONDS)
    until(lambda: job.debug_state().is_boundary_watched)
    step(job)
    step(job)
    assert isinstance(second.wait(SECONDS), Noted)


def test_while_a_large_state_is_noted_the_coordinator_is_heard(house):
    """The end of a save that was given up must not wait for what is copied for it: beats would go unanswered."""
    _, job, asker = begin(house)
    step(job)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Counter):
        def state_dict(self) -> dict[str, int]:
            if threading.current_thread().name == "save":
                inside.set()
                assert go_on.wait(SECONDS)
            return super().state_dict()

    job.state["slow"] = Slow()
    try:
        waiting = job.boundary.waiting()
        waiting.__enter__()
        told = asker.expect()
        assert inside.wait(SECONDS)
        asker.end()
        assert isinstance(asker.endpoint.call(AskLeaseAcks()).wait(SECONDS / 4), GivenLeaseAcks)
        with pytest.raises(StoreError, match="save 1 is over"):
            told.wait(SECONDS / 4)
    finally:
        go_on.set()
        waiting.__exit__(None, None, None)
    until(lambda: not job.debug_state().is_boundary_watched)
    assert job.debug_state().num_save_notes == 0, "what was noted for a save that is over is let go"


def test_notes_do_not_grow_without_end(house, tmp_path, monkeypatch):
    """A large state, and a cut that takes its time: the script waits at its boundary, and goes on with the cut."""
    monkeypatch.setattr(saves, "MOST_NOTED_BYTES", 4000)
    monkeypatch.setattr(saves, "HELD_SECONDS", SECONDS)
    _, job, asker = begin(house)
    job.state["large"] = np.zeros(300)
    told = asker.expect()
    done: list[int] = []
    script = threading.Thread(target=lambda: [(step(job), done.append(n)) for n in range(6)], daemon=True)
    script.start()
    assert isinstance(told.wait(SECONDS), Noted)
    until(lambda: job.debug_state().num_save_notes > 1)
    noted = job.debug_state().num_save_notes
    assert noted < 5
    assert asker.written(tmp_path, 1).clock == 1
    script.join(SECONDS)
    assert len(done) == 6


def test_a_save_that_is_late_costs_a_script_one_wait_and_not_its_memory(house, tmp_path, monkeypatch):
    """Another worker is at no boundary for minutes: this one goes on, and has its newest states for the cut."""
    monkeypatch.setattr(saves, "MOST_NOTED_BYTES", 60_000)
    monkeypatch.setattr(saves, "HELD_SECONDS", 0.3)
    _, job, asker = begin(house)
    job.state["large"] = np.zeros(2500)
    told = asker.expect()
    until(lambda: job.debug_state().is_boundary_watched)
    kept = []
    for _ in range(40):
        step(job)
        kept.append(job.debug_state().num_save_notes)
    assert isinstance(told.wait(SECONDS), Noted)
    assert max(kept) <= 3 and job.debug_state().save_patience_seconds == 0.0
    with pytest.raises(StoreError, match="keeps its state of step 5 no more"):
        asker.written(tmp_path, 5)
    assert asker.written(tmp_path, 40).clock == 40


def test_a_worker_tells_the_steps_of_the_job_also_of_those_before_it_was_taken_up(house):
    twin, job, _ = begin(house, sync_every=4)
    job.checkpoints.resume.own_step = 100_000
    job.stepped()
    job.reporting.report()
    until(lambda: any(isinstance(message, Report) and message.step for message in twin.coordinator.heard))
    told = [message for message in twin.coordinator.heard if isinstance(message, Report)][-1]
    assert (told.step, told.job_step) == (1, 100_001)
