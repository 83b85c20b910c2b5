"""A week of running, played with a fast clock: what a run's files take, and what is still known at its end."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.coordinator.played import Job, jobs

from syncline.coordinator.recording import MOST_POINTS, RunFiles
from syncline.core.media import MediaItem, ReportedMedia
from syncline.stats import Event, JobFigures, JobLook, MemberFigures
from syncline.store.lines import EVENTS, EVENTS_BYTES, METRICS, METRICS_BYTES, LinesWriter, parts, read_lines
from syncline.store.series import SERIES, SeriesReader

pytestmark = pytest.mark.proof
__all__ = ["jobs"]

WEEK, HOUR = 604_800, 3_600
BEGAN = 1.8e9
METRIC_NAMES = [f"train/metric-{k}" for k in range(12)]


def members() -> tuple[MemberFigures, ...]:
    """192 workers and 8 servers, with a number in each column."""
    worker = MemberFigures(
        name="", role="worker", num_steps=20, compute=0.1, data=0.01, stage=0.02, wait=0.03, pull=0.04, lag=1,
        samples_per_second=100.0, cores=1.5, memory_bytes=10**9, gpu_bytes=10**9, sent_per_second=1e6,
        received_per_second=1e6,
    )  # fmt: skip
    server = MemberFigures(name="", role="server", num_rounds=20, apply=0.01, cores=1.5, memory_bytes=10**9)
    workers = [msgspec.structs.replace(worker, name=f"worker-{k}") for k in range(192)]
    return (*workers, *(msgspec.structs.replace(server, name=f"server-{k}") for k in range(8)))


def moments() -> Iterator[int]:
    """Seconds of a week: each minute, and at its end as often as rows of that age are kept."""
    yield from range(0, WEEK - 2 * HOUR, 60)
    yield from range(WEEK - 2 * HOUR, WEEK - 600, 10)
    yield from range(WEEK - 600, WEEK)


def size_of(folder: pathlib.Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def test_the_series_of_a_week_take_less_than_100_mb(jobs: Callable[..., Job], tmp_path: pathlib.Path) -> None:
    """200 members, 12 metrics with as many points as a look may have, and large images."""
    files = RunFiles(tmp_path, jobs().coordinator.job)
    known, largest = members(), 0
    for number, second in enumerate(moments()):
        at, step = BEGAN + second, 20 * second
        readings = [
            (name, step + k, at, math.exp(-second / WEEK) + 0.01 * k)
            for name in METRIC_NAMES
            for k in range(MOST_POINTS)
        ]
        figures = JobFigures(at=at, step=step, seconds=float(second), members=known, steps_per_second=20.0)
        events = (Event(number=number, at=at, step=step, kind="note", text="something has happened"),)
        look = JobLook(number=number, figures=figures, events=events, readings=tuple(readings))
        items = [MediaItem(f"image-{k}", "image", step, bytes([k]) * 60_000) for k in range(2)]
        files.write(look, [ReportedMedia(at, "worker-0", item) for item in items] if number % 10 == 0 else [])
        largest = max(largest, size_of(tmp_path, f"{SERIES}*")) if number % 100 == 0 else largest
    files.close()
    reader = SeriesReader(tmp_path / SERIES)
    rows, own, curve = reader.rows(most=10**6), reader.rows("worker-7", most=10**6), reader.curve(METRIC_NAMES[0])
    print(f"series.db after a week of 200 members: {largest / 1e6:.0f} MB at most, {len(own.at):,} rows of a member")
    assert largest < 100e6
    for at, each in ((rows.at, 20_000), (own.at, 3_000)):
        assert at[0] - BEGAN < HOUR and at[-1] >= BEGAN + WEEK - 1 and len(at) < each, "from the begin to the end"
    assert {b - a for a, b in itertools.pairwise(rows.at[-500:])} == {1.0}
    assert curve.step[-1] > 20 * (WEEK - HOUR) and curve.step[0] < 20 * HOUR * 6
    assert len(reader.subjects()) == 200 and len(reader.media()) > 20


def test_the_lines_of_a_week_take_less_than_100_mb(tmp_path: pathlib.Path) -> None:
    """A line of 12 metrics each second, and an event each ten seconds: more than all files may take."""
    metrics, events = LinesWriter(tmp_path / METRICS, METRICS_BYTES), LinesWriter(tmp_path / EVENTS, EVENTS_BYTES)
    written = largest = 0
    for second in range(WEEK):
        at = BEGAN + second
        line = {"at": at, "step": 20 * second, "metrics": dict.fromkeys(METRIC_NAMES, second / 7)}
        metrics.write([line])
        if second % 10 == 0:
            text = f"worker-{second % 192} (incarnation {second}) has left the job: it was not heard of for 2.0 s" * 4
            events.write([Event(number=second, at=at, step=20 * second, kind="death", text=text)])
        if second % 10_000 == 0:
            written += 10_000 * len(msgspec.json.encode(line))
            largest = max(largest, size_of(tmp_path, "*.jsonl"))
    metrics.close()
    events.close()
    print(f"{written / 1e6:.0f} MB of lines were written in a week, {largest / 1e6:.0f} MB are kept at most")
    assert written > 150e6 and largest <= 100e6
    for name in (METRICS, EVENTS):
        assert len(parts(tmp_path / name)) >= 2
        assert read_lines(tmp_path / name, 1).damage == ""
    newest = read_lines(tmp_path / METRICS, 10_000).lines
    assert [line["step"] for line in newest] == [20 * second for second in range(WEEK - 10_000, WEEK)]
    oldest = read_lines(tmp_path / METRICS, 10**7).lines[0]
    assert oldest["step"] < 20 * HOUR
