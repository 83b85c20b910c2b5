"""What the coordinator tells of the job as a whole: its step, who has which share, whose process is whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.coordinator.played import ask, jobs

from syncline.cli.standing import show_status
from syncline.core.wire.control import AskStatus, Heartbeat, Join, Leave, Report, Watch
from syncline.stats import StepTimes

from .conftest import WAIT, House

__all__ = ["jobs"]


def report(job: Any, name: str, step: int, samples: int) -> None:
    job[name].ask(Report(step, samples, 1.0, 0, 0, 0))


@pytest.mark.parametrize(("sync_every", "step"), [(1, 1300), (8, 700)])
def test_the_step_of_the_job_is_no_workers_own(jobs: Any, sync_every: int, step: int) -> None:
    """Updates of the slice that has had the most, as `job.step`; where steps are local, the most of any worker."""
    job = jobs(policy="sync" if sync_every > 1 else "async", sync_every=sync_every).begin()
    job["server-0"].ask(Heartbeat(num_updates=1299))
    job["server-1"].ask(Heartbeat(num_updates=1300))
    for name, own in (("worker-0", 600), ("worker-1", 700)):
        report(job, name, own, 10)
    assert ask(job, Watch()).step == step


@pytest.mark.parametrize(("policy", "sync_every"), [("sync", 8), ("async", 1)])
def test_steps_before_a_job_was_taken_up_are_steps_of_the_job(jobs: Any, policy: str, sync_every: int) -> None:
    """A worker has made few steps of its own since; the next save is due by the step of the job."""
    job = jobs(policy=policy, sync_every=sync_every).begin()
    for name, steps in (("worker-0", 1600), ("worker-1", 1700)):
        job[name].ask(Report(3, 10, 1.0, 0, 0, 0, job_step=steps))
    assert ask(job, Watch()).step == 1700


@pytest.mark.parametrize(
    ("retired", "shares"), [(True, {"worker-0": 1.0}), (False, {"worker-0": 0.75, "worker-1": 0.25})]
)
def test_who_was_asked_to_leave_has_no_share_any_more(jobs: Any, retired: bool, shares: dict[str, float]) -> None:
    """Who has finished has one: what it has read is its part of the whole."""
    job = jobs().begin()
    report(job, "worker-0", 3, 30)
    report(job, "worker-1", 1, 10)
    job["worker-1"].ask(Leave(retired))
    status = {member.name: member.share for member in ask(job, AskStatus()).status.members}
    assert status == {"server-0": 0.0, "server-1": 0.0, "worker-0": shares["worker-0"]}
    assert job.coordinator.status.worker_shares() == shares


def test_status_has_the_local_steps_of_each_worker(jobs: Any) -> None:
    """With `--sync-every auto` each has chosen its own."""
    job = jobs(policy="async", sync_every="auto").begin()
    for name, steps in (("worker-0", 8), ("worker-1", 1)):
        job[name].ask(Report(3, 10, 1.0, 0, 0, 0, StepTimes(steps_per_push=steps)))
    status = ask(job, AskStatus()).status
    assert {m.name: m.steps_per_push for m in status.members if m.role == "worker"} == {"worker-0": 8, "worker-1": 1}
    assert "local steps for a push: worker-0 8, worker-1 1" in show_status(status)


def test_status_has_the_number_of_each_process(jobs: Any) -> None:
    job = jobs()
    for role, count in (("server", 2), ("worker", 2)):
        for k in range(count):
            job.play(role, f"{role}-{k}")
    calls = [
        member.endpoint.call(Join(member.role, name, "a", 4000 + k, None, {}, member.process, "cpu"))
        for k, (name, member) in enumerate(job.members.items())
    ]
    for member, call in zip(job.members.values(), calls, strict=True):
        member.joined(call)
    pids = {member.name: member.pid for member in ask(job, AskStatus()).status.members}
    assert pids == {"server-0": 4000, "server-1": 4001, "worker-0": 4002, "worker-1": 4003}


def test_a_server_says_how_often_its_slices_were_updated(make_house: Callable[..., House]) -> None:
    """In `async` each push of anybody is one: no worker's clock says how many."""
    house = make_house(1, 2, policy="async")
    house.register({"x": np.zeros(48, np.float32)}, "SGD", "mean")
    for worker in house.workers.values():
        worker.commit("server-0", 1, {"x": np.ones(48, np.float32)}).wait(WAIT)
    beat = house.servers["server-0"].beat()
    assert beat.clocks == {"worker-0": 1, "worker-1": 1} and beat.num_updates == 2
