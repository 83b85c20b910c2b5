"""What the bench has measured: for machines, and for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.efficiency import efficiencies
from benchmarks.row import Outcome, Row
from benchmarks.words import figure
from syncline.bench.machine import describe_machine, in_words
from syncline.config import num_cores


def to_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    rows = [_row_to_json(outcome) for outcome in outcomes]
    scaled = efficiencies(outcomes)
    for row in rows:
        if found := scaled.get(row["name"]):
            row["efficiency"] = {"ours": found.ours, "reference": found.reference}
    return {"machine": describe_machine(), "rows": rows}


def _row_to_json(outcome: Outcome) -> dict[str, Any]:
    row, samples = outcome.row, outcome.samples
    reach: dict[str, Any] = {"kind": row.reach.kind}
    if row.reach.kind != "printed":
        reach |= {"ratio": row.reach.ratio, "plus_seconds": row.reach.plus_seconds}
    found: dict[str, Any] = {
        "name": row.name,
        "what": row.what,
        "reference": row.reference,
        "unit": row.unit,
        "reach": reach,
        "error": outcome.error,
        "not_measured": outcome.not_measured,
    }
    if outcome.has_figures:
        found |= {
            "ratio": outcome.ratio,
            "lowest_ratio": min(outcome.ratios),
            "highest_ratio": max(outcome.ratios),
            "reached": outcome.is_reached,
            "others_share": outcome.others_share,
            f"ours_{row.unit}": list(samples.ours),
            f"reference_{row.unit}": list(samples.reference),
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
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_row(outcome.row.name, *_cells(outcome))
    _print_whole(table)
    _show_efficiency(outcomes)
    console.print(_caption())
    for outcome in outcomes:
        if outcome.error:
            console.print(f"{outcome.row.name}: {outcome.error}", markup=False)


def _print_whole(table: Table) -> None:
    """On a narrow terminal lines are long rather than figures short."""
    console = Console(highlight=False)
    options = console.options.update(max_width=1000)
    console.width = max(console.width, console.measure(table, options=options).maximum)
    console.print(table)


def _cells(outcome: Outcome) -> list[str]:
    row = outcome.row
    if not outcome.has_figures:
        why = f"not measured: {outcome.not_measured}" if outcome.not_measured else "failed"
        return ["", "", "", "", "", str(row.reach), why]
    ours, reference = (figure(median, row.unit) for median in outcome.medians)
    verdict = {True: "reached", False: "not yet", None: ""}[outcome.is_reached]
    return [
        ours,
        reference,
        f"{outcome.ratio:.2f}×",
        f"{min(outcome.ratios):.2f} to {max(outcome.ratios):.2f}",
        "" if outcome.others_share is None else f"{outcome.others_share:.0%}",
        str(row.reach),
        verdict,
    ]


def _show_efficiency(outcomes: Sequence[Outcome]) -> None:
    """The series of rows side by side; nothing without its row of one worker."""
    found = efficiencies(outcomes)
    if not found:
        return
    table = Table(box=None, title="samples/s and efficiency: samples/s over workers × samples/s of one worker")
    table.add_column("row", no_wrap=True)
    for column in ("ours", "reference", "efficiency, ours", "efficiency, reference", "most that the cores allow"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in found.items():
        rates = [f"{one.ours_per_second:,.0f}/s", f"{one.reference_per_second:,.0f}/s"]
        allowed = min(1.0, num_cores() / one.scale.num_workers)
        table.add_row(name, *rates, *(f"{share:.0%}" for share in (one.ours, one.reference, allowed)))
    _print_whole(table)


def _caption() -> str:
    return (
        f"{in_words(describe_machine())}; per operation or step; memory: PSS, shared pages by share; ratio: ours to "
        "the reference, of times or bytes (≤) or of samples/s (≥), median of pairs; others: share of all cores that "
        "other programs used meanwhile"
    )
