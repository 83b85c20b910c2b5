"""A run's folder as one value: settings, curves, figures over time, events, and how it ended.

A file that is damaged is read up to the damage, which is said. Where the series are gone, the lines of
`metrics.jsonl` stand in for them.
"""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.core.membership import JobState
from syncline.errors import StoreError
from syncline.launch.folder import JOURNAL, holder_of
from syncline.stats import Event, JobLook
from syncline.store import journal
from syncline.store.lines import EVENTS, METRICS, Lines
from syncline.store.series import SERIES, CurvePoints, Series, SeriesReader

#: Points of a curve, and rows of figures.
MOST_POINTS = 600
#: The newest events; lines of metrics where there are no series.
MOST_EVENTS, MOST_LINES = 5_000, 200_000
#: Members that have rows of their own.
MOST_MEMBERS = 64
#: Settings that say where a run was, not what it did.
_PLACES = frozenset({"name", "runs", "page", "bind"})
_DEFAULTS: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(JobConfig()))


class RunRecord(msgspec.Struct, kw_only=True):
    """What is known of one run."""

    name: str
    folder: pathlib.Path
    is_running: bool = False
    settings: dict[str, Any] = {}
    look: JobLook | None = None  #: the last one
    curves: dict[str, CurvePoints] = {}
    figures: Series = Series([], {})  #: of the job as a whole
    members: dict[str, Series] = {}
    num_members_left_out: int = 0
    events: list[Event] = []
    damages: list[str] = []
    outcome: str = ""  #: how it ended; "": it is not known
    failed: bool = False
    num_steps: int = 0  #: by the journal

    @property
    def changed_settings(self) -> dict[str, Any]:
        """Settings that are not the defaults, without those that only say where the run was."""
        return {
            name: value
            for name, value in sorted(self.settings.items())
            if name not in _PLACES and value != _DEFAULTS.get(name)
        }

    def setting(self, name: str) -> Any:
        return self.settings.get(name, _DEFAULTS.get(name))

    @property
    def step(self) -> int:
        looked = self.look.figures.step if self.look is not None else 0
        lasts = [int(curve.step[-1]) for curve in self.curves.values() if curve.step]
        return max([looked, self.num_steps, *lasts, *(event.step for event in self.events[-1:])])

    def last(self, metric: str) -> float | None:
        """The newest reading."""
        readings = self.look.figures.readings if self.look is not None else {}
        return readings.get(metric, last_of(self.curves[metric]) if metric in self.curves else None)

    @property
    def seconds(self) -> float:
        if self.look is not None:
            return self.look.figures.seconds
        return self.figures.at[-1] - self.figures.at[0] if self.figures.at else 0.0

    @property
    def began_at(self) -> float:
        """Wall clock; 0: it is not known."""
        firsts = [self.figures.at[:1], [event.at for event in self.events[:1]]]
        return min((at for found in firsts for at in found), default=0.0)

    @property
    def ended_at(self) -> float:
        lasts = [self.figures.at[-1:], [event.at for event in self.events[-1:]]]
        return max((at for found in lasts for at in found), default=0.0)

    @property
    def samples_per_second(self) -> float:
        """In the mean over the time in which samples were read."""
        known = [value for value in self.figures.columns.get("samples_per_second", []) if value]
        return sum(known) / len(known) if known else 0.0

    @property
    def told(self) -> str:
        """How it stands, in words."""
        return "still running" if self.is_running else self.outcome or "it is not known how it ended"


def last_of(curve: CurvePoints) -> float | None:
    return next((value for value in reversed(curve.value) if value is not None), None)


def read_run(folder: pathlib.Path) -> RunRecord:
    """All that can be read of a run."""
    record = RunRecord(name=folder.resolve().name, folder=folder, is_running=bool(holder_of(folder)))
    _read_series(record)
    if record.damages or not (record.curves and record.figures.at):
        _read_lines(record)
    events = Lines(folder / EVENTS, Event)
    for event in events:
        record.events.append(event)
        if len(record.events) > 2 * MOST_EVENTS:
            del record.events[:-MOST_EVENTS]
    record.events = record.events[-MOST_EVENTS:]
    if events.damage:
        record.damages.append(events.damage)
    _read_outcome(record)
    return record


def _read_series(record: RunRecord) -> None:
    """Part by part: one that is damaged takes no other along."""
    if not (record.folder / SERIES).exists():
        return
    reader = SeriesReader(record.folder / SERIES)
    damages: list[str] = []

    def read(part: Any) -> Any:
        try:
            return part()
        except StoreError as error:
            damages.append(str(error))
            return None

    facts = read(reader.facts) or {}
    try:
        record.settings = msgspec.json.decode(facts.get("settings", b"{}"), type=dict[str, Any])
        record.look = msgspec.json.decode(facts["look"], type=JobLook) if "look" in facts else None
    except msgspec.MsgspecError:
        damages.append(f"{SERIES}: its last look is of another version of syncline")
    for metric in read(reader.metrics) or []:
        curve = read(lambda metric=metric: reader.curve(metric, most=MOST_POINTS))
        if curve is not None and curve.step:
            record.curves[metric] = curve
    record.figures = read(lambda: reader.rows(most=MOST_POINTS)) or record.figures
    names = sorted(read(reader.subjects) or [], key=_by_name)
    record.num_members_left_out = max(0, len(names) - MOST_MEMBERS)
    for name in names[:MOST_MEMBERS]:
        rows = read(lambda name=name: reader.rows(name, most=MOST_POINTS))
        if rows is not None:
            record.members[name] = rows
    record.damages += list(dict.fromkeys(damages))


def _by_name(name: str) -> tuple[bool, int, int, str]:
    role, _, number = name.rpartition("-")
    return (role != "worker", len(number), int(number) if number.isdecimal() and len(number) < 9 else 0, name)


def _read_lines(record: RunRecord) -> None:
    """The lines of metrics.jsonl in place of what the series lack."""
    lines = Lines(record.folder / METRICS, dict[str, Any])
    curves: dict[str, list[tuple[float, float, float | None]]] = {}
    rows: list[tuple[float, dict[str, Any]]] = []
    for number, line in enumerate(lines):
        at, step, metrics, job = line.get("at"), line.get("step"), line.get("metrics"), line.get("job")
        if not (isinstance(at, int | float) and isinstance(step, int | float)) or number > MOST_LINES:
            continue
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            curves.setdefault(name, []).append((step, at, value if isinstance(value, int | float) else None))
        if isinstance(job, dict):
            rows.append((at, {name: v for name, v in job.items() if isinstance(v, int | float)}))
    if lines.damage:
        record.damages.append(lines.damage)
    for name in curves.keys() - record.curves.keys():
        points = curves[name]
        kept = points[:: -(-len(points) // MOST_POINTS)]
        steps, ats, values = (list(column) for column in zip(*kept, strict=True))
        record.curves[name] = CurvePoints(steps, ats, values, values, values)
    if record.figures.at:
        return
    kept_rows = rows[:: -(-len(rows) // MOST_POINTS) or 1]
    columns = sorted({name for _, row in kept_rows for name in row})
    record.figures = Series(
        [at for at, _ in kept_rows], {name: [row.get(name) for _, row in kept_rows] for name in columns}
    )


def _read_outcome(record: RunRecord) -> None:
    try:
        state = msgspec.msgpack.decode(journal.look(record.folder / JOURNAL) or b"", type=JobState)
    except msgspec.MsgspecError:  # missing, or of another version
        record.outcome = record.look.figures.verdict if record.look is not None else ""
        return
    outcome, stop = state.outcome, state.steering.stop
    record.num_steps = state.num_steps
    if outcome is None:
        record.outcome = "interrupted or killed"
        return
    record.failed = outcome.failed
    record.outcome = f"failed: {outcome.reason}" if outcome.failed else outcome.reason
    if stop is not None and not outcome.failed:
        record.outcome = f"stopped by {stop}"
    if not record.settings:
        record.settings = msgspec.json.decode(msgspec.json.encode(state.config))
