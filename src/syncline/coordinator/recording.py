"""Records a job while it runs: looks at it once a second, judges it, shows the look, and writes it down.

Nothing waits for this. The thread that looks holds the job's lock for a moment. The thread that writes takes what
fits into its queue. A full disk is reported once, and the job goes on.
"""

from __future__ import annotations

import collections
import contextlib
import math
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from syncline.coordinator.job import FreshReading, JobContext
from syncline.coordinator.status import StatusService
from syncline.core.media import ReportedMedia
from syncline.core.metrics import MOST_METRICS
from syncline.core.observing import Observer
from syncline.core.series import Curve, Point, merge_points, point
from syncline.core.verdicts import StandStill, verdicts
from syncline.errors import StoreError
from syncline.stats import Event, JobFigures, JobLook, JobVerdict, MemberFigures
from syncline.store.lines import EVENTS, EVENTS_BYTES, METRICS, METRICS_BYTES, LinesWriter, read_lines
from syncline.store.series import SERIES, WHOLE, SeriesWriter

LOOK_SECONDS = 1.0
#: Looks that verdicts see.
NUM_LOOKS = 60
#: How often verdicts are made.
JUDGE_LOOKS = 2
#: Looks that wait to be written; more are dropped.
MOST_UNWRITTEN = 30
#: Points of each metric that verdicts see, evenly spread over the run.
MOST_JUDGED = 400
#: Lines of metrics.jsonl, and points of one metric, for a look. Of more readings some are merged.
MOST_LINES, MOST_POINTS = 50, 10
#: After trouble with the disk, the next attempt.
AGAIN_SECONDS = 30.0
#: Trouble with the disk is said again after so long at the earliest.
SILENT_SECONDS = 3_600.0
#: Events that wait for a disk that is full; of more, the oldest are dropped.
MOST_DUE = 1_000
#: How often figures of the job as a whole go to metrics.jsonl, and the last look into the series.
FIGURES_SECONDS = 10.0
#: The same verdict is an event again only after so long.
VERDICT_SECONDS = 600.0
#: For the last lines, at the end of the job.
END_SECONDS = 5.0


class Recorder:
    """The threads that look, and that write."""

    def __init__(self, job: JobContext, status: StatusService, folder: pathlib.Path) -> None:
        self._job, self._status = job, status
        self._observer = Observer()
        self._history: collections.deque[JobFigures] = collections.deque(maxlen=NUM_LOOKS)
        self._curves: dict[str, tuple[Curve, list[Point]]] = {}
        self._pace = StepPace()
        self._verdicts: tuple[JobVerdict, ...] = ()
        self._said: dict[tuple[str, str], float] = {}
        self._watchers: list[Callable[[JobLook], None]] = []
        self._takers: list[Callable[[JobLook, Sequence[ReportedMedia]], None]] = []
        self._latest: JobLook | None = None
        self._number, self._is_broken = 0, False
        self._num_events = _last_number(folder)
        self._files = RunFiles(folder, job)
        self._unwritten: queue.Queue[tuple[JobLook, Sequence[ReportedMedia]] | None] = queue.Queue(MOST_UNWRITTEN)
        self._closed, self._has_ended = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._look_regularly, name="record", daemon=True),
            threading.Thread(target=self._write, name="write records", daemon=True),
        ]

    # -- for others ---------------------------------------------------------------------------------------

    @property
    def latest(self) -> JobLook | None:
        return self._latest

    def watch(self, watcher: Callable[[JobLook], None]) -> Callable[[], None]:
        """Calls it with each look, in a thread of ours: it must not block. Returns what ends that."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def give_to(self, taker: Callable[[JobLook, Sequence[ReportedMedia]], None]) -> None:
        """Calls it with each look and what was reported to be looked at, in a thread of ours: it must not block."""
        self._takers.append(taker)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Takes a last look, and waits a little until it is written."""
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(END_SECONDS)

    # -- looking ------------------------------------------------------------------------------------------

    def _look_regularly(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self._look_once()
        self._look_once()
        self._has_ended.set()
        with contextlib.suppress(queue.Full):
            self._unwritten.put_nowait(None)

    def _look_once(self) -> None:
        try:
            media = self._job.take_media()
            look = self.look([one.item.name for one in media])
        except Exception as error:  # a bug of ours here is no reason to fail a job
            if not self._is_broken:
                self._is_broken = True
                self._job.log_line(f"the job is not recorded: {type(error).__name__}: {error}; it goes on")
            return
        for watcher in list(self._watchers):
            watcher(look)
        for taker in self._takers:
            taker(look, media)
        with contextlib.suppress(queue.Full):
            self._unwritten.put_nowait((look, media))

    def look(self, media: Sequence[str] = ()) -> JobLook:
        """One look at the job. `media`: names of what came since the last one."""
        with self._job.lock:
            totals = self._status.totals()
            fresh, readings = _taken(self._job.fresh_events), _taken(self._job.fresh_readings)
            config = self._job.config
            slices = self._status.slices() if self._number % JUDGE_LOOKS == 0 else {}
            is_held = bool(self._job.membership.state.paces) and any(
                pace.is_paused for pace in self._job.membership.state.paces.values()
            )
        figures = self._observer.look(totals)
        self._history.append(figures)
        self._job.long_wait = figures.why
        merged = _fewer(readings)
        for reading in merged:
            self._judge_later(reading)
        self._pace.look(figures)
        if self._number % JUDGE_LOOKS == 0 and totals.seconds:
            curves = {name: points for name, (_, points) in self._curves.items()}
            progress = StandStill(
                still_seconds=self._pace.still_seconds, step_seconds=self._pace.step_seconds, is_held=is_held
            )
            self._job.verdicts = self._verdicts = tuple(
                verdicts(list(self._history), curves, config, progress, slices)
            )
        events = [Event(number=0, at=at, step=totals.step, kind=kind, text=text) for at, kind, text in fresh]
        events += self._new_verdicts(totals.step, totals.at)
        numbered = tuple(
            msgspec.structs.replace(event, number=self._num_events + k) for k, event in enumerate(events, 1)
        )
        self._num_events += len(numbered)
        self._number += 1
        self._latest = self._job.latest_look = JobLook(
            number=self._number,
            figures=figures,
            verdicts=self._verdicts,
            events=numbered,
            readings=tuple(
                (reading.name, reading.step, reading.at, reading.value if math.isfinite(reading.value) else None)
                for reading in merged
            ),
            media=tuple(media),
        )
        return self._latest

    def _judge_later(self, reading: FreshReading) -> None:
        if reading.name not in self._curves and len(self._curves) >= MOST_METRICS:
            return
        curve, points = self._curves.setdefault(reading.name, (Curve(), []))
        made = curve.add(point(reading.step, reading.at, reading.value))
        if made is not None:
            points.append(made)
        if len(points) > MOST_JUDGED:
            points[:] = curve.halve(points)

    def _new_verdicts(self, step: int, at: float) -> list[Event]:
        found = []
        for verdict in self._verdicts:
            key = (verdict.kind, verdict.subject)
            if at - self._said.get(key, -math.inf) >= VERDICT_SECONDS:
                found.append(Event(number=0, at=at, step=step, kind="verdict", text=verdict.text))
            self._said[key] = at
        return found

    # -- writing ------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while not (self._has_ended.is_set() and self._unwritten.empty()):
            with contextlib.suppress(queue.Empty):
                found = self._unwritten.get(timeout=LOOK_SECONDS)
                if found is not None:
                    self._files.write(*found)
        self._files.close()


class StepPace:
    """How long a step usually takes, and since when there was none."""

    def __init__(self) -> None:
        self._step, self._advanced_at, self._seen_at = 0, 0.0, 0.0
        self.step_seconds = 0.0

    @property
    def still_seconds(self) -> float:
        return self._seen_at - self._advanced_at

    def look(self, figures: JobFigures) -> None:
        now = self._seen_at = figures.at
        if not self._advanced_at or not figures.seconds:
            self._step, self._advanced_at = figures.step, now
        elif figures.step != self._step:
            took = (now - self._advanced_at) / max(1, figures.step - self._step)
            self.step_seconds = took if not self.step_seconds else 0.8 * self.step_seconds + 0.2 * took
            self._step, self._advanced_at = figures.step, now


class RunFiles:
    """The files of a run that records go to. For one thread."""

    def __init__(self, folder: pathlib.Path, job: JobContext) -> None:
        self._folder, self._job = folder, job
        self._series: SeriesWriter | None = None
        self._metrics: LinesWriter | None = None
        self._events: LinesWriter | None = None
        self._not_before = self._silent_until = self._figures_at = -math.inf
        self._last: JobLook | None = None
        self._due: collections.deque[Event] = collections.deque(maxlen=MOST_DUE)

    def write(self, look: JobLook, media: Sequence[ReportedMedia] = ()) -> None:
        """Writes a look. Trouble is said once, and tried again later: readings meanwhile are lost, events are not."""
        self._last = look
        self._due.extend(look.events)
        if time.monotonic() < self._not_before:
            return
        try:
            self._open()
            self._write(look, media)
        except StoreError as error:
            self._not_before = time.monotonic() + AGAIN_SECONDS
            self._drop()
            if time.monotonic() >= self._silent_until:
                self._silent_until = time.monotonic() + SILENT_SECONDS
                self._job.log_line(f"{error}; the job goes on, and is not recorded meanwhile")

    def _open(self) -> None:
        if self._events is None:
            self._events = LinesWriter(self._folder / EVENTS, EVENTS_BYTES)
        if self._metrics is None:
            self._metrics = LinesWriter(self._folder / METRICS, METRICS_BYTES)
        if self._series is None:
            self._series = SeriesWriter(self._folder / SERIES)
            if self._series.put_aside is not None:
                self._job.log_line(f"the readings so far were damaged; they are in {self._series.put_aside} now")

    def _write(self, look: JobLook, media: Sequence[ReportedMedia]) -> None:
        assert self._events is not None and self._metrics is not None and self._series is not None
        figures = look.figures
        self._events.write(self._due)
        self._due.clear()
        self._metrics.write(_metric_lines(look))
        facts: dict[str, bytes] = {}
        if figures.at - self._figures_at >= FIGURES_SECONDS or figures.verdict:
            self._figures_at = figures.at
            self._metrics.write([{"at": round(figures.at, 3), "step": figures.step, "job": whole_row(figures)}])
            facts = {"look": msgspec.json.encode(look), "settings": msgspec.json.encode(self._job.config)}
        rows = {WHOLE: whole_row(figures)}
        rows |= {member.name: member_row(member) for member in figures.members}
        nan = math.nan
        points = [(name, point(step, at, nan if value is None else value)) for name, step, at, value in look.readings]
        self._series.write(figures.at, rows, points, facts, [(one.item, one.at, one.member) for one in media])

    def _drop(self) -> None:
        for file in (self._events, self._metrics, self._series):
            if file is not None:
                file.close()
        self._events = self._metrics = self._series = None

    def close(self) -> None:
        try:
            if self._series is not None:
                facts = {"look": msgspec.json.encode(self._last)} if self._last is not None else {}
                self._series.write(time.time(), {}, facts=facts)
                self._series.finish()
        except StoreError as error:
            self._job.log_line(str(error))
        self._drop()


def whole_row(figures: JobFigures) -> dict[str, float]:
    """The columns of the job as a whole. Times are means over the workers, weighted by their steps."""
    workers = [member for member in figures.members if member.role == "worker"]
    servers = [member for member in figures.members if member.role == "server"]
    steps = sum(member.num_steps for member in workers)
    row: dict[str, float] = {
        "step": figures.step,
        "steps_per_second": figures.steps_per_second,
        "samples_per_second": figures.samples_per_second,
        "num_workers": len(workers),
        "num_servers": len(servers),
        "lag": max((member.lag for member in workers), default=0),
        "cores": sum(member.cores for member in figures.members),
        "memory_bytes": sum(member.memory_bytes for member in figures.members),
        "gpu_bytes": sum(member.gpu_bytes for member in figures.members),
        "sent_per_second": sum(member.sent_per_second for member in figures.members),
        "received_per_second": sum(member.received_per_second for member in figures.members),
        "longest_wait_seconds": max((wait.seconds for wait in figures.waits), default=0.0),
    }
    if busy := [member.gpu_busy for member in figures.members if member.gpu_busy is not None]:
        row["gpu_busy"] = sum(busy) / len(busy)
    for phase in ("compute", "data", "stage", "wait", "pull") if steps else ():
        row[phase] = sum(getattr(member, phase) * member.num_steps for member in workers) / steps
    rounds = [member.apply for member in servers if member.num_rounds]
    if rounds:
        row["apply"] = max(rounds)
    return row


def member_row(member: MemberFigures) -> dict[str, float]:
    """The columns of one member."""
    row: dict[str, float] = {
        "cores": member.cores,
        "memory_bytes": member.memory_bytes,
        "sent_per_second": member.sent_per_second,
        "received_per_second": member.received_per_second,
    }
    if member.gpu_bytes:
        row["gpu_bytes"] = member.gpu_bytes
    if member.gpu_busy is not None:
        row["gpu_busy"] = member.gpu_busy
    if member.role == "worker":
        row |= {"lag": member.lag, "samples_per_second": member.samples_per_second}
        if member.num_steps:
            row |= {phase: getattr(member, phase) for phase in ("compute", "data", "stage", "wait", "pull")}
    elif member.num_rounds:
        row["apply"] = member.apply
    return row


def _metric_lines(look: JobLook) -> list[dict[str, Any]]:
    """One line for the readings of a step, or of several if there are many."""
    by_step: dict[int, dict[str, Any]] = {}
    for name, step, at, value in look.readings:
        line = by_step.setdefault(step, {"at": round(at, 3), "step": step, "metrics": {}})
        line["metrics"][name] = value
    lines = list(by_step.values())
    stride = -(-len(lines) // MOST_LINES)
    return lines[::stride] if stride > 1 else lines


def _taken(fresh: collections.deque[Any]) -> list[Any]:
    found = []
    with contextlib.suppress(IndexError):
        while True:
            found.append(fresh.popleft())
    return found


def _fewer(readings: Sequence[FreshReading]) -> list[FreshReading]:
    """At most MOST_POINTS of each metric, neighbours merged."""
    by_name: dict[str, list[FreshReading]] = {}
    for reading in readings:
        by_name.setdefault(reading.name, []).append(reading)
    found = []
    for name, own in by_name.items():
        stride = -(-len(own) // MOST_POINTS)
        for k in range(0, len(own), stride):
            part = own[k : k + stride]
            made = merge_points([point(one.step, one.at, one.value) for one in part])
            found.append(FreshReading(made.at, name, int(made.step), made.value))
    return found


def _last_number(folder: pathlib.Path) -> int:
    """The number of the last event that an earlier coordinator of this job recorded."""
    lines = read_lines(folder / EVENTS, 1).lines
    number = lines[-1].get("number") if lines else None
    return number if isinstance(number, int) else 0
