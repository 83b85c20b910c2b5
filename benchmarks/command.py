"""`python -m benchmarks`: every figure beside its reference, measured in the same run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.figures import show_outcomes, show_rows, to_json
from benchmarks.row import QUICK, Effort, NotMeasured, Outcome, Row
from benchmarks.rows import all_rows, choose
from syncline.bench.machine import Others
from syncline.config import num_cores
from syncline.errors import SynclineError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Measure this row; may be repeated; * works.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter turns: a first look.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, for machines.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List the rows and measure nothing.")] = False,
) -> None:
    """Measures speed and memory here: jobs of real processes beside bare loops and peers, in turns, as ratios.

    A ratio is the median over pairs of turns, with the lowest and the highest beside it. The share of the machine
    that other programs used meanwhile is printed too: if it is large, measure again. A row that this machine cannot
    measure says what it needs.

    Example:  python -m benchmarks --quick --only shm-small --only "sync-*"
    """
    rows = choose(all_rows(), only or [])
    if names:
        show_rows(rows)
        return
    outcomes = measure_rows(rows, QUICK if quick else Effort(), named=bool(only))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(to_json(outcomes)), indent=2).decode() + "\n")
    else:
        show_outcomes(outcomes)
    raise typer.Exit(1 if any(outcome.error for outcome in outcomes) else 0)


def measure_rows(rows: Sequence[Row], effort: Effort, *, named: bool = False) -> list[Outcome]:
    """One row after the other; a row that fails says why and leaves the others alone.

    `named`: the user asked for these rows: measure them even if the machine has too few cores for them.
    """
    outcomes = []
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        for number, row in enumerate(rows, 1):
            status.update(f"{number} of {len(rows)}: {row.name}: {row.what}")
            outcomes.append(_measure(row, effort, named))
    return outcomes


def _measure(row: Row, effort: Effort, named: bool) -> Outcome:
    if num_cores() < row.num_cores and not named:
        return Outcome(row, not_measured=f"needs {row.num_cores} cores, there are {num_cores()}")
    others = Others()
    try:
        samples = row.measure(effort)
    except NotMeasured as reason:
        return Outcome(row, not_measured=str(reason))
    except (SynclineError, OSError) as error:
        return Outcome(row, error=f"{type(error).__name__}: {error}")
    return Outcome(row, samples, others_share=others.share())
