"""The newest look at a job, for those who look from outside."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from tests.coordinator.played import Job, ask, jobs

from syncline.coordinator.recording import Recorder
from syncline.core.wire.control import AskLook, AskStatus, GivenLook

__all__ = ["jobs"]


def test_the_newest_look(jobs: Callable[..., Job], tmp_path: pathlib.Path) -> None:
    job = jobs().begin()
    assert ask(job, AskLook()) == GivenLook(None)
    recorder = Recorder(job.coordinator.job, job.coordinator.status, tmp_path)
    recorder.look()
    look = ask(job, AskLook()).look
    assert look is not None and look == recorder.latest
    assert {member.name for member in look.figures.members} >= {"worker-0", "worker-1", "server-0"}


def test_the_status_of_a_job_that_starts_names_who_is_missing(jobs: Callable[..., Job]) -> None:
    job = jobs()
    assert ask(job, AskStatus()).status.missing == ["server-0", "server-1", "worker-0", "worker-1"]
    job.begin()
    assert ask(job, AskStatus()).status.missing == []
