"""The inside of a member's process: reads its plan from standard input and plays its role."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import msgspec

from syncline import config as configuration
from syncline import faults
from syncline.core.cores import own_cores, why_shared
from syncline.errors import ConfigError, ConnectionLost, FencedError, JobFailed, SynclineError
from syncline.extensions import see_beside
from syncline.launch import lifeline, threads
from syncline.launch.membership import say
from syncline.launch.processes import MemberPlan
from syncline.launch.restarts import EVICTED, LEFT
from syncline.launch.ringing import OwnServer
from syncline.launch.start import Invitation, invite
from syncline.launch.tracebacks import describe
from syncline.worker.current import current_job, has_current_job
from syncline.worker.stages import StagePlace, StageProcesses, fork_stages
from syncline.worker.steps import MISUSED

if TYPE_CHECKING:
    from syncline.worker.job import Job

#: What torchrun counts processes by, and a stage process has its own.
_RANKS = ("RANK", "LOCAL_RANK")


def member() -> int:
    """A member's process from its plan to its end; a worker's exit code. Any other role ends the process itself."""
    plan = _read_plan()
    stages = _fork_stages(plan)
    if isinstance(stages, StagePlace):
        stages.begin(plan.name)
    else:
        lifeline.hold()
    if plan.role == "worker":
        _die_with_parent()
    if plan.folder and os.path.isdir(plan.folder):
        os.chdir(plan.folder)
    num_sharing = plan.num_local_workers
    if keep_to_own_cores(plan):
        num_sharing = configuration.resolve(plan.file.given).stages if stages is not None else 1
    environment = dict(plan.environment)
    if isinstance(stages, StagePlace):
        environment.update(
            {name: str(int(environment[name]) + stages.number) for name in _RANKS if name in environment}
        )
    configuration.add_to_environment({**_threads(num_sharing), **environment})
    threads.settle()
    code = play(plan, stages)
    if plan.role == "worker":
        return code  # it ends as any script does: its threads are waited for, its exit handlers run
    sys.stdout.flush()
    sys.stderr.flush()
    # The pool's threads may be in C code; the end of a server does not wait for them.
    os._exit(code)


def keep_to_own_cores(plan: MemberPlan) -> bool:
    """`--cores auto`: whether this process has cores of its own from now on."""
    if plan.place is None:
        return False
    number, servers, workers = plan.place
    cores = configuration.cores_here()
    why = why_shared(len(cores), servers, workers)
    if why and plan.tells_cores and not plan.starts_again:
        say(plan.name)(f"host {plan.host}: {why}")
    return configuration.keep_to_cores(own_cores(cores, number, servers, workers))


def _threads(num_workers: int) -> dict[str, str]:
    """Workers on one host share its cores, unless the user has said how many threads each may have."""
    if not num_workers or configuration.environment_names(("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, configuration.num_cores() // num_workers))}


def _fork_stages(plan: MemberPlan) -> StageProcesses | StagePlace | None:
    """With `--stages`: the other processes of this worker's pipeline; in one of them, its place."""
    config = configuration.resolve(plan.file.given)
    if plan.role != "worker" or config.stages == 1:
        return None
    return fork_stages(config, say(plan.name or "worker"))


def play(plan: MemberPlan, stages: StageProcesses | StagePlace | None = None) -> int:
    """Plays the role until it ends; the exit code."""
    try:
        if plan.role == "coordinator":
            from syncline.launch.coordinating import PagePlan, run_coordinator

            page = None
            if plan.page_fd is not None:
                # A code works once: the coordinator that comes back does not take the first one again.
                page = PagePlan(socket.socket(fileno=plan.page_fd), "" if plan.resumes else plan.page_code)
            return run_coordinator(plan.file, plan.listen_fd, resumes=plan.resumes, page=page)
        if plan.role == "server":
            from syncline.launch.serving import run_server

            see_beside(plan.script, is_module=plan.is_module)
            return run_server(plan.file, plan.name, plan.host)
        if isinstance(stages, StagePlace):
            return _play_stage(plan, stages)
        return run_worker(plan, stages)
    except SynclineError as error:
        sys.stderr.write(f"syncline: {plan.name}: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def run_worker(plan: MemberPlan, stages: StageProcesses | None = None) -> int:
    """Runs the user's script as a worker; its exit code is the process's. In a ring a server is in it too."""
    if not configuration.resolve(plan.file.given).is_ring:
        return _run_as_worker(plan, None, stages)
    own_server = OwnServer(plan.file, plan.name, plan.host)
    return own_server.finish(_run_as_worker(plan, own_server, stages))


def _play_stage(plan: MemberPlan, place: StagePlace) -> NoReturn:
    """Runs the user's script up to its Pipeline, which does not return: it serves the leader."""
    invite(Invitation(plan.file, plan.name, plan.host, stages=place))
    try:
        _run_script(plan)
    except BaseException as caught:
        if not (isinstance(caught, SystemExit) and caught.code in (None, 0)):
            place.fail(caught, "" if isinstance(caught, SynclineError) else describe(caught, plan.script))
    place.fail(
        ConfigError(
            "the script has ended without a syncline.torch.Pipeline; with --stages, give DistributedOptimizer "
            "model=Pipeline(...), or leave out --stages"
        )
    )


def _run_script(plan: MemberPlan) -> None:
    sys.argv = [plan.script, *plan.arguments]
    see_beside(plan.script, is_module=plan.is_module)
    if plan.is_module:
        runpy.run_module(plan.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(plan.script, run_name="__main__")


def _run_as_worker(plan: MemberPlan, own_server: OwnServer | None, stages: StageProcesses | None) -> int:
    invite(Invitation(plan.file, plan.name, plan.host, own_server, stages))
    faults.arm(plan.name, plan.file.folder)
    left = leave_on_sigterm(saves=bool(plan.file.given.get("checkpoint")), comes_back=plan.comes_back)
    try:
        _run_script(plan)
        code = 0
    except SystemExit as stop:
        code = exit_code(stop)
    except BaseException as caught:
        code = _failed(plan, caught)
    known = [*left, *([current_job()] if has_current_job() else [])]
    code = _finish(plan, code)
    if plan.comes_back and (
        any(job.has_lost_coordinator for job in known) or (code == 0 and any(job.has_retired for job in left))
    ):
        return LEFT
    return code


def _failed(plan: MemberPlan, error: BaseException) -> int:
    """The script ended with an error: said in words, or with its traceback; the exit code."""
    job = current_job() if has_current_job() else None
    if isinstance(error, ConnectionLost) and job is not None:
        error = job.explain(error)
    if isinstance(error, SynclineError) and job is not None and job.evicted is not None:
        error = job.evicted
    if isinstance(error, FencedError):
        name = job.name if job is not None else plan.name or "this worker"
        sys.stderr.write(f"syncline: {name} was evicted: {error}; a new process may join under its name\n")
        code = EVICTED
    elif isinstance(error, JobFailed):
        sys.stderr.write(describe(error))
        code = 1
    else:
        sys.stderr.write(f"{plan.name or 'worker'} failed:\n{describe(error, plan.script)}")
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, ConfigError) and job is not None:
            code = MISUSED
    sys.stderr.flush()
    return code


def leave_on_sigterm(*, saves: bool = False, comes_back: bool = False) -> list[Job]:
    """SIGTERM: finish the step and leave the job; again: end at once. A script may do otherwise.

    `saves`: where it went to the whole job, that is saved first. `comes_back`: another process takes this one's
    place; then the result is the job that was asked to let this worker go, if any.
    """
    left: list[Job] = []
    if threading.current_thread() is not threading.main_thread():
        return left

    def leave() -> None:
        if has_current_job():
            left[:] = [current_job()] if comes_back else []
            current_job().retire(comes_back=comes_back)
        else:
            os.kill(os.getpid(), signal.SIGTERM)  # the second SIGTERM ends the process at once

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        seconds = lifeline.POD_WORD_SECONDS if comes_back else lifeline.WORD_SECONDS
        signal.signal(signal.SIGTERM, lifeline.ToldToEnd(leave, saves=saves, word_seconds=seconds))
    return left


def exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _finish(plan: MemberPlan, code: int) -> int:
    """A clean end leaves the job; any other is for the launcher to tell."""
    if not has_current_job():
        return code
    if code:
        current_job().abandon()
        return code
    job = current_job()
    try:
        job.close()
    except SynclineError as error:
        if job.evicted is not None:
            return _failed(plan, job.evicted)
        sys.stderr.write(f"{plan.name or 'worker'}: {describe(error)}")
        return 1
    return 0


def _read_plan() -> MemberPlan:
    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            raise SystemExit("this is started by syncline run; see syncline worker --help")
        data += chunk
    return msgspec.json.decode(data, type=MemberPlan)


def _die_with_parent() -> None:
    """On Linux the kernel ends us with our parent, even while a library call holds Python's lock."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        return


if __name__ == "__main__":
    sys.exit(member())
