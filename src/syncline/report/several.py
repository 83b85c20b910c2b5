"""Runs beside each other: the settings that differ, how they went, and their curves, as text and as a page."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator, Sequence
from html import escape

from syncline.core.units import number_told, seconds_told
from syncline.report.charts import Line, chart
from syncline.report.elements import charts, notice, page, section, table, told
from syncline.report.reading import RunRecord
from syncline.store.series import CurvePoints

#: Rows of a metric's table, metrics in the terminal, and charts.
NUM_ROWS, MOST_METRICS, MOST_CHARTS = 8, 12, 60

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def labels_of(runs: Sequence[RunRecord]) -> list[str]:
    """The names of the runs; of runs with one name, their folders."""
    names = collections.Counter(run.name for run in runs)
    return [run.name if names[run.name] == 1 else str(run.folder) for run in runs]


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """The settings that are not the same in all runs that have told theirs: name, and a value for each run."""
    names = sorted({name for run in runs for name in run.changed_settings})
    rows = [(name, *(told(run.setting(name)) if run.settings else "?" for run in runs)) for name in names]
    return [row for row in rows if len(set(row[1:]) - {"?"}) > 1]


def metrics_of(runs: Sequence[RunRecord]) -> list[str]:
    """Those that most runs have come first."""
    counts = collections.Counter(name for run in runs for name in run.curves)
    return sorted(counts, key=lambda name: -counts[name])


def value_at(curve: CurvePoints, step: float) -> float | None:
    """The newest value up to this step; None before the first, and behind the last."""
    place = bisect.bisect_right(curve.step, step)
    if not place or not curve.step or step > curve.step[-1]:
        return None
    return next((value for value in reversed(curve.value[:place]) if value is not None), None)


def summary(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """A row for each fact, with a value for each run."""
    rows: list[tuple[str, ...]] = [
        ("verdict", *(run.told for run in runs)),
        ("steps", *(f"{run.step:,}" for run in runs)),
        ("time, without the start", *(seconds_told(run.seconds) for run in runs)),
        ("samples/s", *(number_told(run.samples_per_second or None) for run in runs)),
        ("deaths", *(str(sum(event.kind == "death" for event in run.events)) for run in runs)),
    ]
    for name in metrics_of(runs)[:MOST_METRICS]:
        rows.append((f"last {name}", *(number_told(run.last(name)) for run in runs)))  # noqa: PERF401
    return rows


def at_steps(runs: Sequence[RunRecord], metric: str, num_rows: int = NUM_ROWS) -> list[tuple[str, ...]]:
    """A metric at evenly spread steps: the step, and a value for each run."""
    curves = [run.curves.get(metric) for run in runs]
    known = [curve for curve in curves if curve is not None and curve.step]
    if not known:
        return []
    first, last = min(curve.step[0] for curve in known), max(curve.step[-1] for curve in known)
    steps = sorted({round(first + (last - first) * k / max(1, num_rows - 1)) for k in range(num_rows)})
    rows = []
    for step in steps:
        values = [value_at(curve, step) if curve is not None else None for curve in curves]
        rows.append((f"{step:,}", *(number_told(value) for value in values)))
    return rows


def comparison(runs: Sequence[RunRecord], most_columns: int = 100) -> str:
    """All of it as text."""
    labels, lines = labels_of(runs), list[str]()
    for run, label in zip(runs, labels, strict=True):
        lines += [f"{label}: damaged: {damage}; what comes later is missing" for damage in run.damages]
    lines += [""] if lines else []
    found = differences(runs)
    if found:
        lines += _text(("setting", *labels), found, most_columns)
    else:
        lines.append("no setting differs")
    lines += ["", *_text(("", *labels), summary(runs), most_columns)]
    names = metrics_of(runs)
    for name in names[:MOST_METRICS]:
        lines += ["", name, *_text(("step", *labels), at_steps(runs, name), most_columns)]
    if len(names) > MOST_METRICS:
        lines += ["", f"and {len(names) - MOST_METRICS} more metrics (--metric NAME, or --html FILE)"]
    return "\n".join(_printable(line) for line in lines)


def _text(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], most_columns: int) -> list[str]:
    """A table; cells are cut so that a line fits."""
    room = max(10, (most_columns - 16) // max(1, len(head) - 1) - 2)
    cut = [tuple(cell if len(cell) <= room else cell[: room - 1] + "…" for cell in row) for row in (head, *rows)]
    clean = [tuple(map(_printable, row)) for row in cut]
    widths = [max(len(row[k]) for row in clean) for k in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in clean
    ]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """All of it as a file."""
    return page(f"{', '.join(labels_of(runs))} · syncline", _parts(runs))


def _parts(runs: Sequence[RunRecord]) -> Iterator[str]:
    labels = labels_of(runs)
    yield f"<header><h1>{escape(', '.join(labels))}</h1></header>"
    for run, label in zip(runs, labels, strict=True):
        for damage in run.damages:
            yield notice(f"A file of {label} is damaged", f"{damage}; what comes later is missing", "bad")
    words = tuple(range(len(runs) + 1))
    found = differences(runs)
    same = "<p class=soft>No setting differs.</p>"
    yield section("Settings that differ", table(("setting", *labels), found, text=words) if found else same)
    yield section("How they went", table(("", *labels), summary(runs), text=words))
    made = []
    for name in metrics_of(runs)[:MOST_CHARTS]:
        lines = [
            Line(label=label, x=run.curves[name].step, y=run.curves[name].value, color=number)
            for number, (run, label) in enumerate(zip(runs, labels, strict=True))
            if name in run.curves
        ]
        made.append(chart(name, lines))
    yield section("Metrics by step", charts(made))
    speeds = [
        Line(
            label=label,
            x=[at - run.began_at for at in run.figures.at],
            y=run.figures.columns.get("samples_per_second") or [None] * len(run.figures.at),
            color=number,
        )
        for number, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]
    yield section(
        "Speed", charts([chart("samples per second", speeds, x_unit=seconds_told, x_name="time", from_zero=True)])
    )
