"""`syncline coordinator|server|worker`: one role by hand, by the job file."""

from __future__ import annotations

import pathlib
import socket
import sys
import time
from typing import Annotated, Any

import typer

from syncline.cli.run import chosen_script
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.member import run_worker
from syncline.launch.processes import Plan
from syncline.launch.running import Script, check_script, listen, settle_here

JobOption = Annotated[
    pathlib.Path, typer.Option("--job", metavar="FILE", help="The job file: address and token, mode 0600.")
]
HostOption = Annotated[str, typer.Option("--host", help="Name of this host; workers on one host share its GPUs.")]
#: A role may be started before the coordinator has written the job file.
FILE_SECONDS = 20.0


def coordinator(
    job: JobOption,
    workers: Annotated[int, typer.Option("-w", "--workers", help="Number of workers.")] = 1,
    servers: Annotated[int, typer.Option("-s", "--servers", help="Number of servers.")] = 1,
    policy: Annotated[str | None, typer.Option(help="sync, bounded:K or async. [default: sync]")] = None,
    sync_every: Annotated[int | None, typer.Option(metavar="H", help="Local steps per average (sync).")] = None,
    window: Annotated[int | None, typer.Option(metavar="W", help="Commits left unanswered (bounded, async).")] = None,
    transport: Annotated[str | None, typer.Option(help="auto, shm or tcp.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job and of its folder under runs/.")] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS[:PORT]", help="Where to listen. [default: loopback]")
    ] = None,
    start_seconds: Annotated[float | None, typer.Option(help="Deadline for all members to be there.")] = None,
) -> None:
    """Starts a job's coordinator by hand.

    Writes the job file that the other roles are started with.

    Example:  syncline coordinator --job job.json -w 2 -s 1
    """
    from syncline.launch.coordinating import run_coordinator

    said: dict[str, Any] = {
        "workers": workers, "servers": servers, "policy": policy, "sync_every": sync_every, "window": window,
        "transport": transport, "name": name, "bind": bind, "start_seconds": start_seconds,
    }  # fmt: skip
    launch = {key: value for key, value in said.items() if value is not None}
    given, config = settle_here(launch, Script(path=job.stem))
    if config.bind.rpartition(":")[0].strip("[]") in ("0.0.0.0", "::") or config.bind in ("0.0.0.0", "::"):
        raise ConfigError(f"--bind {config.bind}: members must know where to connect; give an address of this host")
    sock = listen(config)
    file = jobfile.new(str(sock.getsockname()[0]), sock.getsockname()[1], given)
    jobfile.write(job, file)
    sys.stderr.write(f"syncline: coordinator: listens on {file.host}:{file.port}; the job file is {job}\n")
    try:
        raise typer.Exit(run_coordinator(file, None, sock))
    finally:
        job.unlink(missing_ok=True)


def server(
    job: JobOption,
    name: Annotated[str, typer.Option(help="e.g. server-0. [default: the next free one]")] = "",
    host: HostOption = "",
) -> None:
    """Starts one server of a job.

    Example:  syncline server --job job.json
    """
    from syncline.launch.serving import run_server

    file = _read(job)
    sys.stderr.write(f"syncline: {name or 'server'}: joins the job at {file.host}:{file.port}\n")
    raise typer.Exit(run_server(file, name, host or socket.gethostname()))


def worker(
    job: JobOption,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="Python script to run.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead.")] = None,
    name: Annotated[str, typer.Option(help="e.g. worker-0. [default: the next free one]")] = "",
    host: HostOption = "",
) -> None:
    """Starts one worker of a job.

    Runs the script, whose init() joins the job.

    Example:  syncline worker --job job.json train.py --epochs 3
    """
    target = chosen_script(script, module, arguments or [])
    check_script(target)
    plan = Plan(
        role="worker",
        name=name,
        host=host or socket.gethostname(),
        file=_read(job),
        script=target.path,
        is_module=target.is_module,
        arguments=target.arguments,
    )
    raise typer.Exit(run_worker(plan))


def _read(path: pathlib.Path) -> jobfile.JobFile:
    deadline = time.monotonic() + FILE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise ConfigError(f"there is no job file {path}; start syncline coordinator --job {path} first")
        time.sleep(0.1)
    return jobfile.read(path)
