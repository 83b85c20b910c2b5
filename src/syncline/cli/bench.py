"""`syncline bench`: how fast this machine, or a set of hosts, is with syncline, each figure against its floor."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from syncline.bench.jobs import QUICK, measure
from syncline.bench.machine import describe_machine, in_words
from syncline.bench.rows import RowGroup, RowOutcome, choose, groups
from syncline.bench.script import Effort
from syncline.errors import ConfigError
from syncline.launch.hosts import parse_hosts


def bench(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Measure this row; may be repeated; * works.")
    ] = None,
    hosts: Annotated[
        str, typer.Option("-H", "--hosts", metavar="a,b", help="Measure between these hosts, as `syncline run -H`.")
    ] = "",
    remote: Annotated[str, typer.Option(help='How a host is reached, e.g. "ssh -p 2222 {host}".')] = "",
    bind: Annotated[str, typer.Option(help="With -H: the coordinator's address, where the default is wrong.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter turns: a first look.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, for machines.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Describe the rows and measure nothing.")] = False,
) -> None:
    """Measures shared memory, TCP, TLS, all-reduce and a training step here, each against its floor, as a ratio.

    Both sides of a row take turns in the same run, and a ratio is the median over pairs of turns. It takes about a
    minute. A row that is slower than it should be says what you can do.

    Example:  syncline bench                    this machine
    Example:  syncline bench -H a,b             between two hosts
    Example:  syncline bench --quick --only step
    """
    if hosts and len(parse_hosts(hosts)) < 2:
        raise ConfigError(f"-H {hosts}: name two hosts or more, e.g. -H a,b; leave -H out to measure this machine")
    if (remote or bind) and not hosts:
        raise ConfigError("--remote and --bind need -H: without it this machine is measured")
    chosen = choose(groups(hosts, remote, bind), only or [])
    if names:
        _show_rows(chosen)
        return
    outcomes: list[RowOutcome] = []
    with Console(stderr=True, highlight=False).status("") as status:
        for group in chosen:
            status.update(f"measuring {', '.join(row.name for row in group.rows)}")
            outcomes += measure(group, QUICK if quick else Effort())
    if as_json:
        found = {"machine": describe_machine(), "hosts": hosts, "rows": [outcome.to_json() for outcome in outcomes]}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        show(outcomes)
    raise typer.Exit(1 if any(outcome.error for outcome in outcomes) else 0)


def _show_rows(chosen: Sequence[RowGroup]) -> None:
    console = Console(highlight=False)
    for row in (row for group in chosen for row in group.rows):
        console.print(f"{row.name}: {row.what}", markup=False, soft_wrap=True)
        console.print(f"    floor: {row.floor}; good: up to {row.good:g}×", markup=False, soft_wrap=True)
        console.print(f"    if it is slower: {row.advice}", markup=False, soft_wrap=True)


def show(outcomes: Sequence[RowOutcome]) -> None:
    """The table, and a sentence for every row that is slower than it should be."""
    table = Table(box=None)
    table.add_column("row", no_wrap=True)
    for column in ("ours", "speed", "floor", "ratio", "lowest to highest", "good", "others"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_row(outcome.row.name, *_cells(outcome))
    console = Console(highlight=False)
    # On a narrow terminal lines are long rather than figures cut off.
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)
    for outcome in outcomes:
        if outcome.error:
            console.print(f"{outcome.row.name}: {outcome.error}", markup=False, soft_wrap=True)
        elif outcome.is_good is False:
            console.print(f"{outcome.row.name}: {outcome.row.advice}", markup=False, soft_wrap=True)
    console.print(
        f"{in_words(describe_machine())}; ratio: ours to the floor, median of pairs; others: share of all cores that "
        "other programs used meanwhile",
        markup=False,
        soft_wrap=True,
    )


def _cells(outcome: RowOutcome) -> list[str]:
    row = outcome.row
    if not outcome.ratios:
        why = f"not measured: {outcome.not_measured}" if outcome.not_measured else "failed"
        return ["", "", "", "", "", f"≤ {row.good:g}×", "", why]
    ours = statistics.median(outcome.ours)
    share = outcome.others_share
    return [
        _duration(ours),
        _speed(ours, row.num_bytes),
        _duration(statistics.median(outcome.floor)),
        f"{outcome.ratio:.2f}×",
        f"{min(outcome.ratios):.2f} to {max(outcome.ratios):.2f}",
        f"≤ {row.good:g}×",
        "" if share is None else f"{share:.0%}",
        "good" if outcome.is_good else "slow",
    ]


def _speed(seconds: float, num_bytes: int) -> str:
    is_large = num_bytes >= 1 << 20
    return f"{num_bytes / seconds / 1e9:.2f} GB/s" if is_large else f"{1 / seconds:,.0f}/s"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
