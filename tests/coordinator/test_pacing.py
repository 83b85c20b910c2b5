"""Workers that are slowed or held by hand: kept, told to every life, shown, and not taken for stuck."""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.coordinator.played import SECONDS, Played, ask, jobs, until

from syncline import Rule
from syncline.core.wire.control import AskStatus, AskWhy, Barrier, Leave, Rejoin
from syncline.core.wire.pace import Pace
from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.worker.job import Job

__all__ = ["jobs"]


def paces(member: Played) -> list[tuple[float, bool]]:
    return [(pace.delay_seconds, pace.is_paused) for pace in member.all(Pace)]


def states(job: Any) -> dict[str, str]:
    return {member.name: member.state for member in ask(job, AskStatus()).status.members}


def test_the_worker_hears_it_and_status_and_why_show_it(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.coordinator.status.FRESH_SECONDS", SECONDS)  # nobody beats here
    job = jobs(workers=2, servers=1).begin()
    ask(job, Pace("worker-1", 0.2))
    until(lambda: paces(job["worker-1"]) == [(0.2, False)], "told")
    assert states(job)["worker-1"] == "paced: 200 ms" and states(job)["worker-0"] == "working"
    ask(job, Pace("worker-1", is_paused=True))
    until(lambda: paces(job["worker-1"])[-1] == (0.0, True), "held")
    assert states(job)["worker-1"] == "paused"
    reason = ask(job, AskWhy()).reason
    assert re.fullmatch(r"no member waits for another; worker-1 is paused by hand since \d+ s", reason)
    job["worker-0"].endpoint.call(Barrier("b", 1, 0))
    until(lambda: "barrier" in ask(job, AskWhy()).reason, "waits")
    reason = ask(job, AskWhy()).reason
    assert re.search(r"worker-1 on host a \(it is paused by hand since \d+ s\)", reason)
    assert reason.count("paused") == 1
    ask(job, Pace("worker-1"))
    until(lambda: paces(job["worker-1"])[-1] == (0.0, False), "released")
    assert states(job)["worker-1"] == "working" and "paused" not in ask(job, AskWhy()).reason
    assert not job["worker-0"].all(Pace)
    assert job.disk.last.paces == {}


def test_it_is_kept_through_the_coordinators_death_and_for_the_next_life(jobs: Any) -> None:
    first = jobs(workers=2, servers=1).begin()
    ask(first, Pace("worker-1", is_paused=True))
    since = first.disk.last.paces["worker-1"].since
    second = jobs(disk=first.disk, workers=2, servers=1)
    worker = second.members["worker-1"] = Played(second, "worker", "worker-1")
    worker.incarnation = worker.stamp.incarnation = first["worker-1"].incarnation
    worker.ask(Rejoin("worker-1", worker.incarnation))
    until(lambda: paces(worker) == [(0.0, True)], "the same life hears it over its new connection")
    assert second.coordinator.pace.paces["worker-1"].since == since
    second.coordinator.members.evict("worker-1", "was killed")
    again = second.play("worker", "worker-1")
    assert again.joined(again.ask_to_join()).late
    until(lambda: paces(again) == [(0.0, True)], "and so does the next one")
    time.sleep(0.2)
    assert len(paces(again)) == 1, "once is enough"


def test_who_is_held_is_not_stuck(jobs: Any) -> None:
    """Others wait for it longer than for one that does not advance. Released, it has as long as everybody."""
    job = jobs(workers=3, servers=1, stuck_seconds=1.0).begin()
    ask(job, Pace("worker-1", is_paused=True))
    job.beat_before_looks({"worker-1": itertools.repeat(1), "worker-2": itertools.count(1)})
    job["worker-0"].endpoint.call(Barrier("b", 1, 0))
    members = job.coordinator.membership.state.members
    time.sleep(1.5)
    assert "worker-1" in members
    released = time.monotonic()
    ask(job, Pace("worker-1"))
    until(lambda: "worker-1" not in members, "it is stuck like anybody else after that")
    assert time.monotonic() - released >= 1.0, "and it could not advance before"


def test_who_is_slowed_has_that_much_longer(jobs: Any) -> None:
    job = jobs(workers=2, servers=1).begin()
    assert job.coordinator.pace.patience("worker-1") == 0.0
    ask(job, Pace("worker-1", 0.7))
    assert job.coordinator.pace.patience("worker-1") == 0.7
    ask(job, Pace("worker-1", is_paused=True))
    assert job.coordinator.pace.patience("worker-1") == math.inf


@pytest.mark.parametrize(
    ("pace", "message"),
    [
        (Pace("worker-9", 1.0), "there is no 'worker-9' in this job; its workers are: worker-0, worker-1"),
        (Pace("server-0", 1.0), "server-0 is no worker; its workers are: worker-0, worker-1"),
        (Pace("worker-1", -1.0), "a delay of -1 s: it must be from 0 to"),
        (Pace("worker-1", math.nan), "a delay of nan s"),
        (Pace("worker-1", 1e9), "to hold a worker, --pause"),
    ],
)
def test_bad_input(jobs: Any, pace: Pace, message: str) -> None:
    job = jobs(workers=2, servers=1).begin()
    with pytest.raises(ConfigError) as caught:
        ask(job, pace)
    assert message in str(caught.value)
    assert not job.coordinator.pace.paces


def test_a_worker_that_leaves_takes_its_pace_along(jobs: Any) -> None:
    job = jobs(workers=2, servers=1).begin()
    ask(job, Pace("worker-1", 0.2))
    job["worker-1"].ask(Leave())
    assert not job.coordinator.pace.paces


def test_a_disk_that_is_full_changes_nothing(jobs: Any) -> None:
    job = jobs(workers=2, servers=1).begin()
    job.disk.full = True
    with pytest.raises(Exception, match="the disk is full"):
        ask(job, Pace("worker-1", 0.2))
    assert not job.coordinator.pace.paces and not job["worker-1"].all(Pace)


def test_a_whole_job_waits_for_the_one_that_is_held() -> None:
    """In sync: two steps, worker-1 is held, nobody goes on; it is released, and all steps are made."""
    steps = [0, 0]
    with local_job(workers=2) as local:
        pace = local.coordinator.pace
        held, seen = threading.Event(), []

        def work(job: Job) -> float:
            job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
            job.barrier("begin")
            for number in range(8):
                job.kv.push({"x": np.ones(4)}).wait()
                steps[job.rank] = number + 1
                if job.rank == 0 and number == 1:
                    until(lambda: min(steps) == 2, "both have made two steps")
                    pace.set_pace(Pace("worker-1", is_paused=True))
                    held.set()
            return float(job.kv.pull()["x"][0])

        def release() -> None:
            held.wait(SECONDS)
            time.sleep(0.4)
            seen.extend(steps)
            pace.set_pace(Pace("worker-1"))

        thread = threading.Thread(target=release)
        thread.start()
        assert local.run(work) == [-8.0, -8.0]
        thread.join()
    assert max(seen) <= 4 and min(seen) >= 2, seen


def test_a_whole_job_in_which_one_is_slowed() -> None:
    """In async nobody waits: the others are through before; what the delay takes is its own time of work."""
    delay, steps = 0.05, [0, 0]
    with local_job(workers=2, policy="async") as local:
        pace = local.coordinator.pace

        def work(job: Job) -> int:
            job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
            if job.is_chief:
                pace.set_pace(Pace("worker-1", SECONDS / 2))
            job.barrier("begin")
            for _ in range(6):
                job.kv.push({"x": np.ones(4)}).wait()
                steps[job.rank] += 1
            if job.is_chief:
                seen.append(steps[1])
                pace.set_pace(Pace("worker-1", delay))
            return steps[job.rank]

        seen: list[int] = []
        assert local.run(work) == [6, 6] and seen[0] <= 1
        assert local[1].exchange.times.times().compute >= 4 * delay


def test_who_is_held_can_be_asked_to_leave() -> None:
    with local_job(workers=2, policy="async") as local:
        pace = local.coordinator.pace
        pace.set_pace(Pace("worker-1", is_paused=True))

        def work(job: Job) -> str:
            try:
                if job.rank == 1:
                    until(lambda: job.debug_state().is_paused, "told")
                    threading.Timer(0.1, job.retire).start()
                job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
                return "registered"
            except SystemExit:
                return "left"

        assert local.run(work) == ["registered", "left"]
