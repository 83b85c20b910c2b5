"""`syncline trace`: makes of a run's spans what Perfetto opens."""

from __future__ import annotations

import gzip
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import IO, Annotated, Any, cast

import msgspec
import typer

from syncline.cli.status import RunsOption, runs_folder
from syncline.core.tracing import TracedLife, chrome_events
from syncline.core.units import counted
from syncline.errors import ConfigError
from syncline.launch.folder import TRACE, find_run
from syncline.stats import Event
from syncline.store.lines import EVENTS, Lines
from syncline.store.spans import read_lives

_STEPS = re.compile(r"(\d{0,15}):(\d{0,15})")

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run under runs/, or its folder.")]


def trace(
    run: RunArgument,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where to; - is standard output, and .gz compresses. [default: trace.json in the run's folder]",
            show_default=False,
        ),
    ] = "",
    steps: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="Only these steps, e.g. 100:200, 100: or :200. [default: all]")
    ] = "",
    runs: RunsOption = None,
) -> None:
    """Makes a trace of a run's steps that Perfetto opens.

    The run must have been started with `syncline run --trace`. The trace has a lane for each member, with each step
    and in it compute, stage, wait and pull; a server's lane has the rounds that it applies. A pipeline has a lane for
    each of its stages, with the forward and backward of every micro-batch. The clocks of all hosts
    are aligned, and each member says how far that can be wrong. A run that goes on is traced up to now.

    Open the file in ui.perfetto.dev, or in chrome://tracing.

    Example:  syncline trace train-20250101-120000 --steps 100:200
    """
    first, last = _bounds(steps)
    folder = find_run(run, runs_folder(runs))
    lives, damage = read_lives(folder)
    num_spans = sum(map(len, lives))
    if not num_spans:
        why = f"its spans are damaged: {damage}" if damage else "start it with syncline run --trace"
        raise ConfigError(f"the run {run} has no trace: {why}")
    lines = Lines(folder / EVENTS, Event)
    num_made = 0

    def made() -> Iterable[dict[str, Any]]:
        nonlocal num_made
        for event in chrome_events(lives, list(lines), first=first, last=last):
            num_made += event["ph"] == "X"
            yield event

    path = None if output == "-" else pathlib.Path(output) if output else folder / TRACE
    try:
        if path is None:
            _write(sys.stdout.buffer, made(), folder.name)
            sys.stdout.flush()
        elif path.suffix == ".gz":
            with gzip.open(path, "wb") as packed:
                _write(cast(IO[bytes], packed), made(), folder.name)
        else:
            with open(path, "wb") as file:
                _write(file, made(), folder.name)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; use another: -o FILE") from None
    _tell(lives, path, num_made, [text for text in (damage, lines.damage) if text])


def _bounds(steps: str) -> tuple[int, int | None]:
    found = _STEPS.fullmatch(steps) if steps else None
    if steps and found is None:
        raise ConfigError(f"--steps {steps!r}: give FIRST:LAST, e.g. 100:200, 100: or :200")
    first, last = (found[1], found[2]) if found is not None else ("", "")
    if first and last and int(first) > int(last):
        raise ConfigError(f"--steps {steps!r}: the first step is behind the last one")
    return int(first or 0), int(last) if last else None


def _write(file: IO[bytes], events: Iterable[dict[str, Any]], name: str) -> None:
    told = msgspec.json.encode({"run": name})
    file.write(b'{"displayTimeUnit":"ms","otherData":' + told + b',"traceEvents":[\n')
    between = b""
    for event in events:
        file.write(between + msgspec.json.encode(event))
        between = b",\n"
    file.write(b"\n]}\n")


def _tell(lives: list[TracedLife], path: pathlib.Path | None, num_made: int, damages: list[str]) -> None:
    out = sys.stdout if path is not None else sys.stderr
    if path is not None:
        members = counted(len({life.member for life in lives}), "member")
        out.write(f"{path}: {members}, {num_made:,} spans; open it in ui.perfetto.dev\n")
    if path is not None and not num_made:
        out.write("none of its spans is of these steps\n")
    for life in lives:
        if life.num_dropped:
            out.write(f"{life.member}: {counted(life.num_dropped, 'span')} came faster than they could be sent\n")
    for damage in damages:
        out.write(f"damaged: {damage}; what comes later is missing\n")
