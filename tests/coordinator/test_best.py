"""Readings of a validation get into the checkpoint that was taken for it, and so `--best` sees them."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tests.coordinator.played import SECONDS, Disk, jobs, until
from tests.coordinator.saves import begun, folder, manifest

from syncline.core.wire.validation import WEIGHTS, AskValidationShard, Attend, Begin, Begun, Come
from syncline.store import checkpoints
from syncline.store.disk import MANIFEST
from syncline.store.folders import open_folder

__all__ = ["folder", "jobs"]

#: The thread of a save looks at its validation about twice in this time.
SLOW_SECONDS = 1.2


class SlowDisk(Disk):
    """Takes long for the write with which a validation ends, if no checkpoint is written meanwhile."""

    def __init__(self, saves: pathlib.Path) -> None:
        super().__init__()
        self.saves, self.was_slow = saves, False

    def save(self, state: bytes, segments: Mapping[int, bytes] = {}, drop: Collection[int] = ()) -> None:
        was_going_on = bool(self.states) and self.last.validations.now is not None
        super().save(state, segments, drop)
        if was_going_on and self.last.validations.now is None:
            self.was_slow, deadline = True, time.monotonic() + SLOW_SECONDS
            while not list(self.saves.glob(f"*/{MANIFEST}")) and time.monotonic() < deadline:
                time.sleep(0.01)


def test_a_save_waits_for_readings_that_a_slow_disk_holds_up(jobs: Callable[..., Any], folder: pathlib.Path) -> None:
    """A validation that has ended is kept before its readings are handed on. A save that looked at it in between took
    it for given up: its checkpoint got no readings, and the best model of the run was not found.
    """
    disk = SlowDisk(folder)
    job = begun(jobs, folder, disk=disk, best="score")
    workers = [job["worker-0"], job["worker-1"]]
    called = workers[0].ask(Come(7, {"": 7}))
    for call in [worker.endpoint.call(Attend(called.turn)) for worker in workers]:
        call.wait(SECONDS)
    for call in [worker.endpoint.call(Begin(called.turn, 7)) for worker in workers]:
        assert isinstance(call.wait(SECONDS), Begun)
    given = workers[0].ask(AskValidationShard(called.turn, "", WEIGHTS, 1, 1))
    until(lambda: len(list(folder.glob("*/*.safetensors"))) == 4, "servers and scripts are not in the save")
    workers[0].ask(
        AskValidationShard(called.turn, "", WEIGHTS, 1, 1, given.validation_shard, {"score": 5.0}, {"score": 0.0})
    )
    until(lambda: any(line.startswith("saved ") for line in job.log), "no save")
    assert disk.was_slow
    assert manifest(folder).metrics == {"score": 5.0}
    best = checkpoints.pointed(open_folder(str(folder)), "best")
    assert best is not None and best["value"] == 5.0
