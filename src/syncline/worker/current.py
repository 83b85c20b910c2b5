"""The current job: of this process, or of a thread where several workers are in one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.worker.job import Job
    from syncline.worker.stages import StageJob, StagePlace

_current: Job | None = None
_of_stage: StageJob | None = None  # in a stage process
_of_thread = threading.local()  # several workers in one process: each thread has its own


def current_job() -> Job:
    """The job that `syncline.init()` joined or started in this process."""
    job: Job | None = getattr(_of_thread, "job", None) or _current
    if job is None and _of_stage is not None:
        raise ConfigError(
            "with --stages, every process of a pipeline runs the script up to syncline.torch.Pipeline(...): make it "
            "right after the model, before anything that trains"
        )
    if job is None:
        raise ConfigError("there is no job yet; call syncline.init() first")
    return job


def has_current_job() -> bool:
    return getattr(_of_thread, "job", None) is not None or _current is not None


def make_current(job: Job) -> Job:
    """Makes this the process's job."""
    global _current
    _current = job
    return job


def make_stage_job(place: StagePlace) -> StageJob:
    """In a stage process: what it knows of the job."""
    global _of_stage
    if _of_stage is None:
        from syncline.worker.stages import StageJob

        _of_stage = StageJob(place)
    return _of_stage


def stage_job() -> StageJob | None:
    """In a stage process, what it knows of the job; else None."""
    return _of_stage


def forget(job: Job) -> None:
    """The process has no job any more."""
    global _current
    if _current is job:
        _current = None


@contextlib.contextmanager
def current_in_thread(job: Job) -> Iterator[None]:
    """Makes this the job of the calling thread within the context."""
    _of_thread.job = job
    try:
        yield
    finally:
        _of_thread.job = None
