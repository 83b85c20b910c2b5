"""`syncline attach|stop`, and `syncline run --detach`: jobs that go on without a terminal."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from syncline.cli.status import JobArgument, RunsOption, runs_folder
from syncline.config import JobConfig
from syncline.core.wire.control import AskStatus, GivenStatus
from syncline.engines import detached
from syncline.engines.detached import OUTPUT, DetachedJob
from syncline.errors import ConfigError, ConnectionLost, SynclineError
from syncline.launch import jobfile
from syncline.launch.folder import DETACHED, EXIT_CODE, JOB_FILE, holder_of, job_folders
from syncline.launch.running import Script, settle_name
from syncline.launch.watching import ask

_LOOK_SECONDS = 0.1
#: For an agent to start another launcher; after that, with no launcher and no agent, attach starts one.
GONE_SECONDS = 3.0
#: For a job that was started to have a coordinator.
COORDINATOR_SECONDS = 20.0
#: For the launcher to hear that the job ends; another one may be on its way.
HEAR_SECONDS = 20.0
#: For everything to end, where nothing has to be saved.
END_SECONDS = 30.0
_TAIL_BYTES = 1 << 16


def run_detached(given: dict[str, Any], config: JobConfig, script: Script) -> None:
    """Starts the job, shows its first lines, and leaves it."""
    from syncline.cli.detached import FirstLaunch, start_launcher

    given, config = settle_name(given, config, script)
    start_launcher(FirstLaunch(given=given, script=script))
    folder = pathlib.Path(config.runs) / config.name
    _wait_for_coordinator(folder)
    output = JobOutput(folder / OUTPUT)
    output.show()
    where = f" --runs {config.runs}" if config.runs != "runs" else ""
    sys.stdout.write(
        f"syncline: {config.name} is detached: syncline attach {config.name}{where} shows it, "
        f"syncline stop {config.name}{where} ends it\n"
    )


def _wait_for_coordinator(folder: pathlib.Path) -> None:
    """So that commands about the job find it; a job that has ended, or is slow to start, is left as it is."""
    until = time.monotonic() + COORDINATOR_SECONDS
    while _code_of(folder) is None and time.monotonic() < until:
        with contextlib.suppress(SynclineError, OSError):
            ask(jobfile.read(folder / JOB_FILE), AskStatus(), GivenStatus, 1.0)
            return
        time.sleep(_LOOK_SECONDS)


def attach(
    job: JobArgument,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Lines to begin with, of those before.")] = 20,
    runs: RunsOption = None,
) -> None:
    """Shows what a detached job prints, until it ends; ends with its exit code.

    Ctrl-C leaves the job, which goes on. If the job has lost its launcher, and nothing on this host starts another
    one, this command does: the job's other hosts go on, and its members of this host start again.

    Example:  syncline attach train-20250101-120000
    """
    folder = _folder_of(job, runs)
    output = JobOutput(folder / OUTPUT)
    output.skip(lines)
    try:
        code = _follow(folder, output, takes_over=True)
    except KeyboardInterrupt:
        sys.stdout.write(f"\nsyncline: left {job}, which goes on; syncline stop {job} ends it\n")
        code = 0
    raise typer.Exit(code or 0)


def stop(
    job: JobArgument,
    now: Annotated[bool, typer.Option("--now", help="Without saving it first.")] = False,
    runs: RunsOption = None,
) -> None:
    """Ends a detached job: it is saved, if it has a checkpoint folder, and all of its members end.

    Example:  syncline stop train-20250101-120000
    """
    folder = _folder_of(job, runs)
    found = _running(folder)
    output = JobOutput(folder / OUTPUT)
    output.skip(0)
    deadline = time.monotonic() + HEAR_SECONDS
    while True:
        try:
            detached.stop(found, 2.0, at_once=now)
            break
        except (ConfigError, ConnectionLost) as error:
            if _code_of(folder) is not None:
                break
            if not holder_of(folder) or time.monotonic() > deadline:
                raise ConfigError(
                    f"{job} has no launcher that could end it ({error}); syncline attach {job}, on {found.machine}, "
                    "starts one"
                ) from None
            time.sleep(_LOOK_SECONDS)
    save_seconds = float(found.file.given.get("save_seconds", 30.0))
    until = time.monotonic() + END_SECONDS + save_seconds
    code = _follow(folder, output, takes_over=False, until=lambda: time.monotonic() > until)
    if code is None:
        raise ConfigError(f"{job} was told to end, and has not within {END_SECONDS + save_seconds:g} s")


class JobOutput:
    """What a job has printed into its folder."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._shown = path, 0

    def skip(self, lines: int) -> None:
        """All but so many of the last lines."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - _TAIL_BYTES)
            file.seek(begin)
            tail = file.read(size - begin)
            kept = tail.splitlines(keepends=True)[-lines:] if lines > 0 else []
            self._shown = size - sum(map(len, kept))

    def show(self) -> None:
        """What is new."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._shown)
            while data := file.read(1 << 20):
                self._shown += len(data)
                sys.stdout.buffer.write(data)
            sys.stdout.flush()


def _folder_of(job: str, runs: str | None) -> pathlib.Path:
    where = runs_folder(runs)
    folder = where / job
    if "/" in job or folder not in job_folders(where):
        names = sorted(path.parent.name for path in where.glob(f"*/{DETACHED}"))
        there = f"detached jobs: {', '.join(names)}" if names else "none is detached"
        raise ConfigError(f"there is no job {job} under {where}/; {there}")
    if not (folder / DETACHED).exists() and not (folder / EXIT_CODE).exists():
        holder = holder_of(folder)
        if any(folder.glob("slurm-*.out")):
            raise ConfigError(f"the job {job} is held by Slurm: squeue shows it, scancel ends it")
        end = f"Ctrl-C in its terminal, or kill {holder}, ends it" if holder > 0 else "it has ended"
        raise ConfigError(f"the job {job} was not started with --detach; {end}")
    return folder


def _running(folder: pathlib.Path) -> DetachedJob:
    code = _code_of(folder)
    if code is not None:
        raise ConfigError(f"the job {folder.name} has ended, with exit code {code}")
    return detached.read(folder)


def _code_of(folder: pathlib.Path) -> int | None:
    """The exit code of a job that has ended."""
    with contextlib.suppress(OSError, ValueError):
        if not (folder / DETACHED).exists():
            return int((folder / EXIT_CODE).read_text())
    return None


def _follow(
    folder: pathlib.Path, output: JobOutput, *, takes_over: bool, until: Callable[[], bool] = lambda: False
) -> int | None:
    """Shows the job's output to its end; its exit code. None: it was enough."""
    gone_at: float | None = None
    while not until():
        code = _code_of(folder)
        output.show()
        if code is not None:
            return code
        if holder_of(folder):
            gone_at = None
        elif gone_at is None:
            gone_at = time.monotonic()
        elif time.monotonic() - gone_at > GONE_SECONDS and takes_over:
            _take_over(folder)
            gone_at = None
        time.sleep(_LOOK_SECONDS)
    return None


def _take_over(folder: pathlib.Path) -> None:
    from syncline.cli.detached import start_successor

    machine = detached.read(folder).machine
    if machine != socket.gethostname():
        raise ConfigError(
            f"the job {folder.name} has lost its launcher; run this on {machine}, where its members can reach another"
        )
    sys.stdout.write(f"syncline: {folder.name} has no launcher and no agent on this host: another launcher starts\n")
    sys.stdout.flush()
    start_successor(folder)
