"""`syncline.init()`: joins the job that launched this process; alone, starts an embedded one."""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.client.current import current_job, has_current_job, make_current
from syncline.client.job import Job
from syncline.errors import ConfigError, SynclineError
from syncline.launch.compiler import leave_out_the_compiler
from syncline.launch.jobfile import JobFile
from syncline.launch.ringing import OwnServer


class Invitation(msgspec.Struct, frozen=True):
    """What a process that runs a worker's script was given before the script began."""

    file: JobFile
    name: str
    host: str
    own_server: OwnServer | None = None  # in a ring


_invitation: Invitation | None = None


def invite(invitation: Invitation) -> None:
    """The script that runs next in this process is a worker of this job."""
    global _invitation
    _invitation = invitation


def init(**defaults: Any) -> Job:
    """Joins the job. What was said at launch or in syncline.toml wins over what is passed here.

    Called again, it returns the same job. Without a launcher the job is embedded: server and coordinator live in
    this process and cost next to nothing.
    """
    if has_current_job():
        return current_job()
    known = configuration.check_known(defaults, "init()")
    for key in configuration.LAUNCH_ONLY.intersection(known):
        raise ConfigError(f"init({key}=…): this is said at launch, e.g. syncline run -w 2 -s 1, or in syncline.toml")
    leave_out_the_compiler()
    if _invitation is not None:
        from syncline.launch.working import join_as_worker

        _join_once()
        job = join_as_worker(_invitation.file, _invitation.name, _invitation.host, known, _invitation.own_server)
    else:
        from syncline.launch.embedded import start_embedded
        from syncline.launch.tracebacks import shorten_tracebacks

        shorten_tracebacks()
        job = start_embedded(known)
        atexit.register(_close, job)
    return make_current(job)


_has_joined = False


def _join_once() -> None:
    global _has_joined
    if _has_joined:
        raise ConfigError("this worker has closed its job; under syncline run a process joins it once")
    _has_joined = True


def _close(job: Job) -> None:
    with contextlib.suppress(SynclineError):
        job.close()
