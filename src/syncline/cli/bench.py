"""`syncline bench`: every figure beside its reference, measured in the same run."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from syncline.bench.machine import Others, describe_machine
from syncline.bench.row import QUICK, Effort, Outcome, Row
from syncline.bench.rows import all_rows, choose
from syncline.errors import SynclineError


def bench(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Measure this row; may be repeated; * works.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter turns: a first look.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, for machines.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List the rows and measure nothing.")] = False,
) -> None:
    """Measures speed here: jobs of real processes beside bare loops and peers, in turns, as ratios.

    A ratio is the median over pairs of turns, with the lowest and the highest beside it. What other programs took
    of the machine meanwhile is printed too: figures taken beside them say little.

    Example:  syncline bench --quick --only shm-small --only "sync-*"
    """
    rows = choose(all_rows(), only or [])
    if names:
        show_rows(rows)
        return
    outcomes = measure_rows(rows, QUICK if quick else Effort())
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(to_json(outcomes)), indent=2).decode() + "\n")
    else:
        show_outcomes(outcomes)
    raise typer.Exit(1 if any(outcome.error for outcome in outcomes) else 0)


def measure_rows(rows: Sequence[Row], effort: Effort) -> list[Outcome]:
    """One row after the other; a row that fails says why and leaves the others alone."""
    outcomes = []
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        for number, row in enumerate(rows, 1):
            status.update(f"{number} of {len(rows)}: {row.name}: {row.what}")
            others = Others()
            try:
                samples = row.measure(effort)
                outcomes.append(Outcome(row, samples, others_share=others.share()))
            except (SynclineError, OSError) as error:
                outcomes.append(Outcome(row, error=f"{type(error).__name__}: {error}"))
    return outcomes


def to_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"machine": describe_machine(), "rows": [_row_to_json(outcome) for outcome in outcomes]}


def _row_to_json(outcome: Outcome) -> dict[str, Any]:
    row, samples = outcome.row, outcome.samples
    found: dict[str, Any] = {
        "name": row.name,
        "what": row.what,
        "reference": row.reference,
        "reach": {"kind": row.reach.kind, "ratio": row.reach.ratio},
        "error": outcome.error,
    }
    if not outcome.error:
        found |= {
            "ratio": outcome.ratio,
            "lowest_ratio": min(outcome.ratios),
            "highest_ratio": max(outcome.ratios),
            "reached": outcome.is_reached,
            "others_share": outcome.others_share,
            "ours_seconds": list(samples.ours),
            "reference_seconds": list(samples.reference),
        }
    return found


# -- for people ---------------------------------------------------------------------------------------------


def show_rows(rows: Sequence[Row]) -> None:
    table = Table("row", "what", "reference in the same run", "reach", box=None)
    for row in rows:
        table.add_row(row.name, row.what, row.reference, str(row.reach))
    Console(highlight=False).print(table)


def show_outcomes(outcomes: Sequence[Outcome]) -> None:
    console = Console(highlight=False)
    table = Table(box=None)
    table.add_column("row", no_wrap=True)
    for column in ("ours", "reference", "ratio", "lowest to highest", "others", "reach"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for outcome in outcomes:
        if outcome.error:
            table.add_row(outcome.row.name, "failed", "", "", "", "", str(outcome.row.reach))
            continue
        ours, reference = (statistics.median(s) for s in (outcome.samples.ours, outcome.samples.reference))
        table.add_row(
            outcome.row.name,
            duration(ours),
            duration(reference),
            f"{outcome.ratio:.2f}×",
            f"{min(outcome.ratios):.2f} to {max(outcome.ratios):.2f}",
            "" if outcome.others_share is None else f"{outcome.others_share:.0%}",
            str(outcome.row.reach),
            "reached" if outcome.is_reached else "not yet",
        )
    console.print(table)
    machine = describe_machine()
    console.print(
        f"{machine['cores']} cores, {machine['system']}, Python {machine['python']}, torch {machine['torch']}; "
        "per operation or step; ratio: ours to the reference, of times (≤) or of samples/s (≥), median of pairs; "
        "others: what other programs took of all cores meanwhile"
    )
    for outcome in outcomes:
        if outcome.error:
            console.print(f"{outcome.row.name}: {outcome.error}", markup=False)


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
