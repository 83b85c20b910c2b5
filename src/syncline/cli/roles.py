"""`syncline coordinator|server|worker`: one role by hand, by the job file."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import sys
import time
from typing import Annotated, Any

import typer

from syncline import config as configuration
from syncline.cli.options import settings_of, takes_job_options
from syncline.cli.run import chosen_script
from syncline.core.ring import protection_of
from syncline.errors import ConfigError
from syncline.extensions import see_beside
from syncline.launch import jobfile
from syncline.launch.folder import JOURNAL, hold
from syncline.launch.hosts import parse_workers
from syncline.launch.member import run_worker
from syncline.launch.membership import await_coordinator, say
from syncline.launch.processes import MemberPlan
from syncline.launch.running import (
    Script,
    check_script,
    listen,
    page_socket,
    server_hosts,
    settle_here,
    settle_name,
)
from syncline.net import tcp
from syncline.page import serving

JobOption = Annotated[
    pathlib.Path, typer.Option("--job", metavar="FILE", help="The job file: address and token, mode 0600.")
]
HostOption = Annotated[str, typer.Option("--host", help="Name of this host; workers on one host share its GPUs.")]
ComesBackOption = Annotated[
    bool,
    typer.Option(
        "--comes-back",
        help="What starts this process starts it again, as Kubernetes does: SIGTERM makes it leave for now, with "
        "exit code 143, and it waits for a coordinator that is not there yet as long as for a start.",
    ),
]
#: What to do about a coordinator that does not come.
PENDING = "look whether its pod runs: kubectl get pods, and kubectl describe pod for one that is Pending"
#: A role may be started before the coordinator has written the job file.
FILE_SECONDS = 20.0


@takes_job_options
def coordinator(
    job: JobOption,
    workers: Annotated[
        str | None,
        typer.Option(
            "-w", "--workers", metavar="N|MIN:MAX", help="Number of workers, or the least and most. [default: 1]"
        ),
    ] = None,
    made: Annotated[
        bool,
        typer.Option(
            "--made",
            help="The job file is one that syncline manifest has made: begin its job, or resume it. SIGTERM saves "
            "the job, where it has a --checkpoint, and ends it, with exit code 143.",
        ),
    ] = False,
    **said: Any,
) -> None:
    """Starts a job's coordinator by hand.

    Writes the job file that the other roles are started with. If the file is there already, and the job has not
    ended, this coordinator takes that job up again, under the next term, with the settings that it has; its members
    go on.

    Example:  syncline coordinator --job job.json -w 2 -s 1
    """
    if made:
        raise typer.Exit(_begin_made(job, str(said.get("bind") or "")))
    if job.exists():
        raise typer.Exit(_resume(job))
    launch = settings_of(said) | (parse_workers(workers) if workers is not None else {})
    if "least_workers" in launch:
        launch["workers"] = launch["workers"] or launch["least_workers"]  # workers started by hand are not known yet
    given, config = settle_here(launch)
    if config.bind.rpartition(":")[0].strip("[]") in ("0.0.0.0", "::") or config.bind in ("0.0.0.0", "::"):
        raise ConfigError(f"--bind {config.bind}: members must know where to connect; give an address of this host")
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen(config))
        given, config = settle_name(given, config, Script(path=job.stem))
        stack.enter_context(hold(config))
        file = jobfile.new(str(sock.getsockname()[0]), sock.getsockname()[1], given)
        jobfile.write(job, file)
        sys.stderr.write(f"syncline: coordinator: {protection_of(config, server_hosts(config))}\n")
        raise typer.Exit(coordinate(job, file, sock, resumes=False))


def _resume(job: pathlib.Path) -> int:
    """Resumes the job of this file with a new coordinator; the journal decides whether it can."""
    file = jobfile.read(job)
    config = configuration.resolve(file.given)
    if not (file.folder / JOURNAL).exists():
        raise ConfigError(
            f"{job} exists, but the journal of its job ({file.folder / JOURNAL}) does not, so the job cannot resume; "
            f"remove {job} to start a new one"
        )
    with hold(config, keeps=True):
        sock = tcp.bind(file.host, file.port)
        sock.listen(128)
        with sock:
            return coordinate(job, file, sock, resumes=True)


def _begin_made(job: pathlib.Path, bind: str) -> int:
    """Begins the job of a file that was made before, at its port; or resumes it, where it has begun."""
    file = jobfile.read(job)
    config = configuration.resolve(file.given)
    resumes = (file.folder / JOURNAL).exists()
    with hold(config, keeps=resumes), tcp.bind(bind or file.host, file.port) as sock:
        sys.stderr.write(f"syncline: coordinator: {protection_of(config, server_hosts(config))}\n")
        return coordinate(job, file, sock, resumes=resumes, ends_job=True)


def coordinate(
    job: pathlib.Path, file: jobfile.JobFile, sock: socket.socket, *, resumes: bool, ends_job: bool = False
) -> int:
    from syncline.launch.coordinating import PagePlan, run_coordinator

    what = "takes the job up again and listens" if resumes else "listens"
    sys.stderr.write(f"syncline: coordinator: {what} on {file.host}:{file.port}; the job file is {job}\n")
    page, page_plan = page_socket(configuration.resolve(file.given)), None
    if page is not None:
        page_plan = PagePlan(page, serving.new_code())
        sys.stderr.write(f"syncline: coordinator: the page: {serving.link_of(page, page_plan.code)}\n")
    try:
        code = run_coordinator(file, None, sock, resumes=resumes, page=page_plan, ends_job=ends_job)
    except KeyboardInterrupt:
        code = 130
    job.unlink(missing_ok=True)  # the job has ended; otherwise it can be resumed with this file
    return code


def server(
    job: JobOption,
    name: Annotated[str, typer.Option(help="e.g. server-0. [default: the next free one]")] = "",
    host: HostOption = "",
    comes_back: ComesBackOption = False,
) -> None:
    """Starts one server of a job, also one that runs already: it takes over slices of the others.

    Example:  syncline server --job job.json
    """
    from syncline.launch.serving import run_server

    file = _read(job)
    if configuration.resolve(file.given).is_ring:
        raise ConfigError(
            f"{job} is the job of a ring: its servers are in its workers' processes; use syncline worker --job {job}"
        )
    see_beside("", is_module=True)
    sys.stderr.write(f"syncline: {name or 'server'}: joins the job at {file.host}:{file.port}\n")
    if comes_back:
        await_coordinator(file, say(name or "server"), PENDING)
    raise typer.Exit(run_server(file, name, host or socket.gethostname(), comes_back=comes_back))


def worker(
    job: JobOption,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="Python script to run.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead.")] = None,
    name: Annotated[str, typer.Option(help="e.g. worker-0. [default: the next free one]")] = "",
    host: HostOption = "",
    comes_back: ComesBackOption = False,
) -> None:
    """Starts one worker of a job, also one that runs already, on any host that reaches its coordinator.

    Runs the script, whose init() joins the job. The job file of `syncline run` is runs/NAME/job.json.

    Example:  syncline worker --job job.json train.py --epochs 3
    """
    target = chosen_script(script, module, arguments or [])
    check_script(target)
    plan = MemberPlan(
        role="worker",
        name=name,
        host=host or socket.gethostname(),
        file=_read(job),
        script=target.path,
        is_module=target.is_module,
        arguments=target.arguments,
        comes_back=comes_back,
    )
    if comes_back:
        await_coordinator(plan.file, say(name or "worker"), PENDING)
    raise typer.Exit(run_worker(plan))


def _read(path: pathlib.Path) -> jobfile.JobFile:
    deadline = time.monotonic() + FILE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise ConfigError(f"there is no job file {path}; start syncline coordinator --job {path} first")
        time.sleep(0.1)
    return jobfile.read(path)
