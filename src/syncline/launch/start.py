"""`syncline.init()`: joins the job that launched this process; alone, starts an embedded one."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Any, cast

import msgspec

from syncline import config as configuration
from syncline.errors import ConfigError, SynclineError
from syncline.launch import threads
from syncline.launch.compiler import leave_out_the_compiler
from syncline.launch.jobfile import JobFile
from syncline.launch.ringing import OwnServer
from syncline.launch.world import StartedRanks, world_of
from syncline.worker.current import current_job, has_current_job, make_current, make_stage_job
from syncline.worker.job import Job
from syncline.worker.stages import StagePlace, StageProcesses


class Invitation(msgspec.Struct, frozen=True):
    """What the process of a worker's script was given before the script began."""

    file: JobFile
    name: str
    host: str
    own_server: OwnServer | None = None  # in a ring
    stages: StageProcesses | StagePlace | None = None  # with --stages


_invitation: Invitation | None = None


def invite(invitation: Invitation) -> None:
    """The next script in this process is a worker of this job."""
    global _invitation
    _invitation = invitation


def init(*, embedded: bool = False, **defaults: Any) -> Job:
    """Joins the job. What was said at launch or in syncline.toml wins over what is passed here.

    Called again, it returns the same job. In a process of torchrun, mpirun or srun, rank k joins as worker-k, and
    rank 0 also starts the coordinator and the servers. Without a launcher the job is embedded: server and coordinator
    live in this process and cost next to nothing; `embedded=True` says so where a launcher has started several
    processes, and each is to train alone.
    """
    if has_current_job():
        return current_job()
    known = configuration.check_known(defaults, "init()")
    for key in configuration.LAUNCH_ONLY.intersection(known):
        raise ConfigError(f"init({key}=…): this is set at launch, e.g. syncline run -w 2 -s 1, or in syncline.toml")
    leave_out_the_compiler()
    threads.settle_again()
    stages = _invitation.stages if _invitation is not None else None
    if isinstance(stages, StagePlace):
        return cast(Job, make_stage_job(stages))
    if _invitation is not None:
        from syncline.launch.working import join_as_worker

        _join_once()
        job = join_as_worker(
            _invitation.file, _invitation.name, _invitation.host, known, _invitation.own_server, stages
        )
    else:
        job = _start(known, None if embedded else own_world())
    return make_current(job)


def own_world() -> StartedRanks | None:
    """The ranks that another launcher has started, this process among them."""
    return world_of(configuration.inherited_environment({}), os.getppid())


def _start(known: dict[str, Any], world: StartedRanks | None) -> Job:
    """A job without `syncline run`: that of the ranks that another launcher has started, or one of this process."""
    if world is not None:
        from syncline.launch.ranks import join_world

        _join_once()
        return join_world(world, known)
    from syncline.launch.embedded import start_embedded
    from syncline.launch.tracebacks import shorten_tracebacks

    shorten_tracebacks()
    job = start_embedded(known)
    atexit.register(_close, job)
    return job


_has_joined = False


def _join_once() -> None:
    global _has_joined
    if _has_joined:
        raise ConfigError("this worker has closed its job; a process that a launcher started joins it once")
    _has_joined = True


def _close(job: Job) -> None:
    with contextlib.suppress(SynclineError):
        job.close()
