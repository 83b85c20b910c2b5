"""Read pins: what a reader falls back to when its optimistic copies are overtaken."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core.slice_state import SliceState
from syncline.core.wire.traffic import Pin, Unpin
from syncline.errors import ConnectionLost, ProtocolError
from syncline.server.slices import HostedSlice
from syncline.testing import LocalJob, local_job
from syncline.worker.job import Job


def registered(jobs: LocalJob) -> None:
    jobs.run(lambda job: job.kv.register({"x": np.zeros(8)}, Rule("SGD", lr=1.0)))


def server_of(job: Job) -> Any:
    return job.exchange.routes.endpoints["server-0"]


def push_in_thread(job: Job) -> threading.Thread:
    thread = threading.Thread(target=lambda: job.kv.push({"x": np.ones(8)}).wait(), daemon=True)
    thread.start()
    return thread


def test_a_pinned_slice_is_not_written_until_it_is_let_go() -> None:
    with local_job(workers=2, policy="async") as jobs:
        registered(jobs)
        assert server_of(jobs[1]).call(Pin([0])).wait(PATIENCE).versions == [0]
        writer = push_in_thread(jobs[0])
        time.sleep(0.1)
        assert writer.is_alive() and jobs[1].kv.pull()["x"].tolist() == [0.0] * 8
        server_of(jobs[1]).call(Unpin([0])).wait(PATIENCE)
        writer.join(PATIENCE)
        assert not writer.is_alive() and jobs[1].kv.pull()["x"].tolist() == [-1.0] * 8


def test_a_pin_ends_with_its_connection() -> None:
    """A reader that dies between pin and unpin must not hold up the writers for ever."""
    with local_job(workers=2, policy="async") as jobs:
        registered(jobs)
        server_of(jobs[1]).call(Pin([0, 0])).wait(PATIENCE)
        writer = push_in_thread(jobs[0])
        time.sleep(0.05)
        server_of(jobs[1]).close()
        writer.join(PATIENCE)
        assert not writer.is_alive()


def test_a_pin_that_comes_after_the_end_of_its_connection_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends while the pin is being made: nobody would let it go."""
    with local_job(workers=2, policy="async") as jobs:
        registered(jobs)
        pin = HostedSlice.pin

        def pinned_too_late(slot: HostedSlice) -> int:
            server_of(jobs[1]).close()
            return pin(slot)

        monkeypatch.setattr(HostedSlice, "pin", pinned_too_late)
        with contextlib.suppress(ConnectionLost):
            server_of(jobs[1]).call(Pin([0]))
        writer = push_in_thread(jobs[0])
        writer.join(PATIENCE)
        assert not writer.is_alive()


def test_nobody_lets_go_of_what_another_has_pinned() -> None:
    with local_job(workers=2, policy="async") as jobs:
        registered(jobs)
        server_of(jobs[1]).call(Pin([0])).wait(PATIENCE)
        with pytest.raises(ProtocolError, match="which it has not pinned"):
            server_of(jobs[0]).call(Unpin([0])).wait(PATIENCE)
        with pytest.raises(ProtocolError, match="slice 9 is not hosted here"):
            server_of(jobs[0]).call(Pin([9])).wait(PATIENCE)
        server_of(jobs[1]).call(Unpin([0])).wait(PATIENCE)


def test_after_two_copies_that_were_overtaken_the_third_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_job(workers=1, policy="async") as jobs:
        registered(jobs)
        asked = []

        def never(state: SliceState, version: int) -> bool:
            asked.append(version)
            return False

        monkeypatch.setattr(SliceState, "is_still", never)
        pulled = jobs[0].kv.pull()
        assert pulled["x"].tolist() == [0.0] * 8 and pulled.versions == {"x": 0}
        assert len(asked) == 2 and jobs[0].stats().servers[0].num_pins == 1


def test_while_it_is_written_no_copy_counts() -> None:
    """The version moves after the write: a copy taken in the middle of it must not pass for whole."""
    state = SliceState(version=3)
    assert state.is_still(3) and not state.is_still(2)
    state.writing = True
    assert not state.is_still(3)
