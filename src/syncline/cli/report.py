"""`syncline report` and `syncline compare`: runs as files to keep and to send."""

from __future__ import annotations

import pathlib
import shutil
import sys
from typing import Annotated

import msgspec
import typer

from syncline.cli.status import RunsOption, runs_folder
from syncline.errors import ConfigError
from syncline.launch.folder import find_run
from syncline.report.reading import RunRecord, read_run
from syncline.report.several import comparison, comparison_page, metrics_of
from syncline.report.single import report as report_page

#: Runs that are told apart by their colours.
MOST_RUNS = 8


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run under runs/, or its folder.")],
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where to; - is standard output. [default: RUN.html here]",
            show_default=False,
        ),
    ] = "",
    runs: RunsOption = None,
) -> None:
    """Makes one HTML file of a run, to keep or to send.

    It has the verdict, metrics, where the time of the steps went, memory and network, members, events and settings.
    The file loads nothing and runs no scripts. A run that goes on is shown up to now.

    Example:  syncline report train-20250101-120000
    """
    record = read_run(find_run(run, runs_folder(runs)))
    path = None if output == "-" else pathlib.Path(output or f"{record.name}.html")
    _write(report_page(record), path)
    _tell(path, [record])


def compare(
    runs_given: Annotated[
        list[str], typer.Argument(metavar="RUN RUN…", help="Names of runs under runs/, or their folders.")
    ],
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also make one HTML file, with the curves on top of each other."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="Only this metric; can be said several times."),
    ] = None,
    runs: RunsOption = None,
) -> None:
    """Shows runs beside each other: settings that differ, how they went, and their metrics.

    The metrics are shown at the same steps of all runs.

    Example:  syncline compare lenet-1 lenet-2 --html both.html
    """
    if not 2 <= len(runs_given) <= MOST_RUNS:
        raise ConfigError(f"give 2 to {MOST_RUNS} runs; these are {len(runs_given)}")
    folders = [find_run(run, runs_folder(runs)) for run in runs_given]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("one of these runs is given twice")
    records = [read_run(folder) for folder in folders]
    if metric:
        known = metrics_of(records)
        for name in metric:
            if name not in known:
                names = ", ".join(known[:20]) or "none"
                raise ConfigError(f"--metric {name!r}: no run has it; they have: {names}")
        records = [
            msgspec.structs.replace(one, curves={n: c for n, c in one.curves.items() if n in metric})
            for one in records
        ]
    sys.stdout.write(comparison(records, shutil.get_terminal_size((100, 24)).columns) + "\n")
    if html is not None:
        path = pathlib.Path(html)
        _write(comparison_page(records), path)
        sys.stdout.write(f"\n{path}\n")


def _write(text: str, path: pathlib.Path | None) -> None:
    if path is None:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; use another: -o FILE") from None


def _tell(path: pathlib.Path | None, records: list[RunRecord]) -> None:
    out = sys.stderr if path is None else sys.stdout
    for record in records:
        for damage in record.damages:
            out.write(f"damaged: {damage}; what comes later is missing\n")
    if path is not None:
        out.write(f"{path}\n")
