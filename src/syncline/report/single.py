"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from syncline.core.units import bytes_told, number_told, seconds_told
from syncline.report.charts import ChartMark, Line, chart
from syncline.report.elements import bars, charts, moment, notice, page, section, table, tiles, told
from syncline.report.reading import RunRecord
from syncline.stats import MemberFigures
from syncline.store.series import Series

#: Charts of metrics; of more metrics the last values are in a table.
MOST_CHARTS, MOST_LISTED = 60, 1_000
MOST_EVENTS, MOST_TILES = 500, 6
_PHASES = ("compute", "data", "stage", "wait", "pull", "apply")
_PHASE_COLORS = (0, 1, 2, 7, 3, 4)  #: as on the page
_COLOR_OF = dict(zip(_PHASES, _PHASE_COLORS, strict=True))
_PHASE_NAMES = ("compute", "waiting for data", "stage", "wait", "pull", "apply")


def report(run: RunRecord) -> str:
    """The whole file."""
    return page(f"{run.name} · syncline", _parts(run))


def _parts(run: RunRecord) -> Iterator[str]:
    kind = "warn" if run.is_running else "bad" if run.failed else "good" if run.outcome else ""
    yield f'<header><h1>{escape(run.name)}</h1><span class="chip {kind}">{escape(run.told)}</span></header>'
    times = [moment(at) for at in (run.began_at, run.ended_at) if at]
    yield f"<p class=when>{' to '.join(times)}</p>" if times else ""
    for damage in run.damages:
        yield notice("A file of this run is damaged", f"{damage}; what comes later is missing", "bad")
    yield tiles(_tiles(run))
    yield _verdicts(run)
    yield _metrics(run)
    yield _steps(run)
    yield _machine(run)
    yield section("Members", _members(run))
    yield section("Events", _events(run))
    yield section("Settings", _settings_table(run))


def _tiles(run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "steps", f"{run.step:,}"
    yield "running time", seconds_told(run.seconds)
    if run.samples_per_second:
        yield "samples per second", number_told(run.samples_per_second)
    yield "workers, servers", f"{_most(run.figures, 'num_workers')}, {_most(run.figures, 'num_servers')}"
    deaths = sum(event.kind == "death" for event in run.events)
    yield "deaths", str(deaths)
    for name in list(run.curves)[:MOST_TILES]:
        yield name, number_told(run.last(name))


def _most(figures: Series, column: str) -> str:
    return number_told(max((value for value in figures.columns.get(column, []) if value is not None), default=None))


def _verdicts(run: RunRecord) -> str:
    found = [(verdict.text, verdict.advice) for verdict in run.look.verdicts] if run.look is not None else []
    known = {text for text, _ in found}
    said = dict.fromkeys(event.text for event in run.events if event.kind == "verdict" and event.text not in known)
    found += [(text, "") for text in list(said)[-10:]]
    return section("What made it slow, or was wrong", *(notice(text, advice) for text, advice in found))


def _marks(run: RunRecord, *, in_time: bool) -> list[ChartMark]:
    return [
        ChartMark(event.at - run.began_at if in_time else event.step, event.kind, event.text) for event in run.events
    ]


def _metrics(run: RunRecord) -> str:
    marks = _marks(run, in_time=False)
    names = list(run.curves)
    made = (
        chart(
            name,
            [Line(label=name, x=c.step, y=c.value, low=c.low, high=c.high)],
            marks=marks,
        )
        for name, c in list(run.curves.items())[:MOST_CHARTS]
    )
    rest = [(name, number_told(run.last(name))) for name in names[MOST_CHARTS:MOST_LISTED]]
    return section("Metrics", charts(made), table(("metric", "last value"), rest) if rest else "")


def _over_time(run: RunRecord, title: str, names: Sequence[tuple[str, str]], **more: object) -> str:
    """A chart of columns of the job as a whole."""
    ats = [at - run.began_at for at in run.figures.at]
    lines = [
        Line(label=label, x=ats, y=run.figures.columns[name], color=_COLOR_OF.get(name, number))
        for number, (name, label) in enumerate(names)
        if any(run.figures.columns.get(name, ()))
    ]
    return chart(
        title, lines, x_unit=seconds_told, x_name="time", marks=_marks(run, in_time=True), from_zero=True,
        has_now=False,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _steps(run: RunRecord) -> str:
    rows = []
    for name, series in run.members.items():
        parts = [_mean(series, phase) for phase in _PHASES]
        parts[0] = max(0.0, parts[0] - parts[1])  # waiting for data is part of it
        if sum(parts) > 0:
            rows.append((name, parts, seconds_told(sum(parts))))
    shown = [number for number in range(len(_PHASES)) if any(parts[number] for _, parts, _ in rows)]
    left_out = (
        f"<p class=soft>{run.num_members_left_out} more members are left out.</p>" if run.num_members_left_out else ""
    )
    return section(
        "Steps",
        bars(
            [(name, [parts[k] for k in shown], end) for name, parts, end in rows],
            [_PHASE_NAMES[k] for k in shown],
            colors=[_PHASE_COLORS[k] for k in shown],
        ),
        left_out,
        charts(
            [
                _over_time(run, "samples per second", [("samples_per_second", "samples/s")]),
                _over_time(run, "steps per second", [("steps_per_second", "steps/s")]),
                _over_time(
                    run, "seconds of a step", list(zip(_PHASES, _PHASES, strict=True)), unit=seconds_told
                ),
            ]
        ),
        _staleness(run),
    )  # fmt: skip


def _mean(series: Series, column: str) -> float:
    known = [value for value in series.columns.get(column, []) if value is not None]
    return sum(known) / len(known) if known else 0.0


def _staleness(run: RunRecord) -> str:
    counts = run.look.figures.staleness_counts if run.look is not None else ()
    if not any(counts[1:]):
        return ""
    rows = []
    for k, count in enumerate(counts):
        first, last = (0, 0) if not k else (2 ** (k - 1), 2**k - 1)
        label = f"{first}" if first == last else f"{first} to {last}"
        rows.append((label, [float(count)], f"{count:,}"))
    return "<h3>Staleness of gradients, in updates</h3>" + bars(rows, ["gradients"])


def _machine(run: RunRecord) -> str:
    return section(
        "Machine",
        charts(
            [
                _over_time(run, "memory of all members", [("memory_bytes", "memory")], unit=bytes_told),
                _over_time(run, "busy cores", [("cores", "cores")]),
                _over_time(
                    run, "bytes per second", [("sent_per_second", "sent"), ("received_per_second", "received")],
                    unit=bytes_told,
                ),
                _over_time(run, "GPU memory", [("gpu_bytes", "memory")], unit=bytes_told),
                _over_time(run, "GPUs busy, part of the time", [("gpu_busy", "busy")]),
            ]
        ),
    )  # fmt: skip


def _members(run: RunRecord) -> str:
    last: dict[str, MemberFigures] = (
        {member.name: member for member in run.look.figures.members} if run.look is not None else {}
    )
    names = list(dict.fromkeys([*run.members, *last]))
    if not names:
        return ""
    rows = []
    for name in names:
        series, known = run.members.get(name, Series([], {})), last.get(name)
        memory = [value for value in series.columns.get("memory_bytes", []) if value is not None]
        rows.append(
            (
                name,
                known.host if known is not None else "",
                number_told(known.step) if known is not None and known.role == "worker" else "",
                number_told(_mean(series, "samples_per_second") or None).replace("–", ""),
                f"{_mean(series, 'cores'):.2f}",
                bytes_told(max(memory, default=None)),
                bytes_told(_mean(series, "sent_per_second")),
            )
        )
    return table(
        ("member", "host", "step", "samples/s", "cores", "most memory", "sent per second"), rows, text=(0, 1)
    )


def _events(run: RunRecord) -> str:
    if not run.events:
        return ""
    rows = [
        (moment(event.at), f"{event.step:,}", event.kind, event.text) for event in run.events[-MOST_EVENTS:][::-1]
    ]
    more = len(run.events) - MOST_EVENTS
    return table(("time", "step", "kind", "what happened"), rows, text=(0, 2, 3)) + (
        f"<p class=soft>{more:,} older events are left out.</p>" if more > 0 else ""
    )


def _settings_table(run: RunRecord) -> str:
    if not run.settings:
        return ""
    changed = [(name, told(value)) for name, value in run.changed_settings.items()]
    every = [(name, told(value)) for name, value in sorted(run.settings.items())]
    return (
        table(("setting", "value"), changed, text=(0, 1)) if changed else "<p class=soft>All are the defaults.</p>"
    ) + f"<details><summary>All settings</summary>{table(('setting', 'value'), every, text=(0, 1))}</details>"
