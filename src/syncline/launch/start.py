"""`syncline.init()`: joins the job that launched this process; alone, starts an embedded one."""

from __future__ import annotations

import atexit
import contextlib
import shlex
import sys
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.errors import ConfigError, SynclineError, WrongLauncher
from syncline.launch import threads
from syncline.launch.compiler import leave_out_the_compiler
from syncline.launch.jobfile import JobFile
from syncline.launch.ringing import OwnServer
from syncline.worker.current import current_job, has_current_job, make_current
from syncline.worker.job import Job


class Invitation(msgspec.Struct, frozen=True):
    """What the process of a worker's script was given before the script began."""

    file: JobFile
    name: str
    host: str
    own_server: OwnServer | None = None  # in a ring


_invitation: Invitation | None = None


def invite(invitation: Invitation) -> None:
    """The next script in this process is a worker of this job."""
    global _invitation
    _invitation = invitation


def init(*, embedded: bool = False, **defaults: Any) -> Job:
    """Joins the job. What was said at launch or in syncline.toml wins over what is passed here.

    Called again, it returns the same job. Without a launcher the job is embedded: server and coordinator live in
    this process and cost next to nothing. In a process of torchrun, mpirun or srun that is an error, because each
    process would train alone; `embedded=True` says that this is meant.
    """
    if has_current_job():
        return current_job()
    known = configuration.check_known(defaults, "init()")
    for key in configuration.LAUNCH_ONLY.intersection(known):
        raise ConfigError(f"init({key}=…): this is set at launch, e.g. syncline run -w 2 -s 1, or in syncline.toml")
    leave_out_the_compiler()
    threads.settle_again()
    if _invitation is not None:
        from syncline.launch.working import join_as_worker

        _join_once()
        job = join_as_worker(_invitation.file, _invitation.name, _invitation.host, known, _invitation.own_server)
    else:
        from syncline.launch.embedded import start_embedded
        from syncline.launch.tracebacks import shorten_tracebacks

        shorten_tracebacks()
        if not embedded:
            _refuse_other_launchers()
        job = start_embedded(known)
        atexit.register(_close, job)
    return make_current(job)


def _refuse_other_launchers() -> None:
    """Refuses other launchers: each process would silently train its own model."""
    other = configuration.other_launcher()
    if other is None:
        return
    several = 0 < other.num_here < other.num_processes
    hosts = f" (on several hosts with -H HOST:{other.num_here},HOST:… in place of -w)" if several else ""
    raise WrongLauncher(
        f"{other.name} started this process as one of {other.num_processes} ({other.found}), and each would train a "
        f"model of its own; start the script with `{_own_command(other.num_processes)}`{hosts}; if you want a "
        "separate training in each process, call syncline.init(embedded=True)"
    )


def _own_command(num_workers: int) -> str:
    """`syncline run` with this process's script and arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        script = ["-m", str(spec.name).removesuffix(".__main__")]
    else:
        script = [sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "SCRIPT.py"]
    return shlex.join(["syncline", "run", "-w", str(num_workers), *script, *sys.argv[1:]])


_has_joined = False


def _join_once() -> None:
    global _has_joined
    if _has_joined:
        raise ConfigError("this worker has closed its job; under syncline run a process joins it once")
    _has_joined = True


def _close(job: Job) -> None:
    with contextlib.suppress(SynclineError):
        job.close()
