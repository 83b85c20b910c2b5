"""`syncline pace`: a worker of a running job is slowed, held or released by hand."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from syncline.cli.status import JobArgument, RunsOption, find
from syncline.core.units import duration
from syncline.core.wire.message import Done
from syncline.core.wire.pace import Pace, told_seconds
from syncline.errors import ConfigError
from syncline.launch.watching import ask


def pace(
    job: JobArgument,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Name of a worker, e.g. worker-2.")],
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Wait so long before each step, e.g. 200ms, 1.5s.")
    ] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Hold it before its next step.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Let it go on at its own pace.")] = False,
    runs: RunsOption = None,
) -> None:
    """Slows, holds or releases a worker of a running job.

    It holds from its next step on, also for a process that comes back under the name, until it is said otherwise. In
    sync the others wait for a worker that is held, as long as --wait-seconds lets them; it is not evicted for that.
    With spare workers no round waits for so many of them; but with several servers, and half of the workers spare or
    more, the next one does if all who were in the last one are held.

    Example:  syncline pace train-20250101-120000 worker-2 --delay 200ms
    """
    if (delay is not None) + pause + resume != 1:
        raise ConfigError("give one of --delay TIME, --pause and --resume")
    seconds = duration("--delay", delay, "200ms, 1.5s; --resume ends it") if delay is not None else 0.0
    ask(find(job, runs), Pace(worker, seconds, pause), Done)
    if pause:
        words = f"is held before its next step; syncline pace {job} {worker} --resume lets it go on"
    elif delay is not None:
        words = f"waits {told_seconds(seconds)} before each step from now on"
    else:
        words = "goes on at its own pace"
    sys.stdout.write(f"{job}: {worker} {words}\n")
