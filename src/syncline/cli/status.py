"""`syncline status|why|scale`: a running job, looked at and told something from outside."""

from __future__ import annotations

import pathlib
import sys
from typing import Annotated

import msgspec
import typer

from syncline import config as configuration
from syncline.cli.listing import list_jobs
from syncline.cli.standing import show_status, verdict_lines
from syncline.core.units import counted
from syncline.core.wire.control import AskStatus, AskWhy, GivenStatus, GivenWhy, Scale
from syncline.core.wire.message import Done
from syncline.errors import ConfigError
from syncline.launch.folder import find_job
from syncline.launch.jobfile import JobFile
from syncline.launch.watching import ask

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of a job under runs/, or path of a job file.")]
RunsOption = Annotated[str | None, typer.Option(metavar="DIR", help="Folder with jobs' folders. [default: runs]")]


def find(job: str, runs: str | None) -> JobFile:
    """The job file of a job; a ConfigError if it does not exist."""
    return find_job(job, runs_folder(runs))


def runs_folder(runs: str | None) -> pathlib.Path:
    """The folder with one folder per job: as given, or as in syncline.toml."""
    return pathlib.Path(runs or configuration.resolve(configuration.read_toml_here()).runs)


def status(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Name of a job under runs/, or path of a job file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, for machines.")] = False,
    runs: RunsOption = None,
) -> None:
    """Shows how a running job stands; without JOB, lists the jobs.

    Of a job: its members with their incarnations, steps and round-trip times; who waits for whom since when; what
    happened lately; and what the death of a server would cost now.

    Example:  syncline status train-20250101-120000
    """
    if job is None:
        sys.stdout.write(list_jobs(runs_folder(runs), as_json=as_json) + "\n")
        return
    given = ask(find(job, runs), AskStatus(), GivenStatus).status
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(given), indent=2).decode()
    else:
        text = show_status(given)
    sys.stdout.write(text + "\n")


def ls(
    as_json: Annotated[bool, typer.Option("--json", help="All of it, for machines.")] = False,
    runs: RunsOption = None,
) -> None:
    """Lists the jobs of this machine, those that run first.

    Each with its state, when it began or ended, its policy, its step and how it ended, or what is wrong with it now.

    Example:  syncline ls
    """
    sys.stdout.write(list_jobs(runs_folder(runs), as_json=as_json) + "\n")


def why(job: JobArgument, runs: RunsOption = None) -> None:
    """Says in one sentence who waits for whom.

    Below it: what else makes the job slow, or is wrong with it, with the figures that say so and what to do.

    Example:  syncline why train-20250101-120000
    """
    given = ask(find(job, runs), AskWhy(), GivenWhy)
    sys.stdout.write("\n".join([given.reason, *verdict_lines(given.verdicts)]) + "\n")


def scale(
    job: JobArgument,
    workers: Annotated[int | None, typer.Option("-w", "--workers", help="Number of workers from now on.")] = None,
    servers: Annotated[int | None, typer.Option("-s", "--servers", help="Number of servers from now on.")] = None,
    runs: RunsOption = None,
) -> None:
    """Gives a running job more or fewer workers or servers.

    More are started by `syncline run`; those that are too many finish their step, or hand over their slices, and
    leave. In a job with `--stages`, -w counts processes, as `syncline run` does: it must be divisible by the stages.

    Example:  syncline scale train-20250101-120000 -w 6 -s 3
    """
    if workers is None and servers is None:
        raise ConfigError("give the numbers: -w WORKERS, -s SERVERS, or both")
    ask(find(job, runs), Scale(workers, servers), Done)
    words = [counted(count, role) for role, count in (("worker", workers), ("server", servers)) if count is not None]
    sys.stdout.write(f"{job}: {' and '.join(words)} from now on; see syncline status {job}\n")
