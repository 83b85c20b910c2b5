"""A week of running, played with a fast clock: what a run's files take, what is still known at its end, and how long
it takes to show it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import pathlib
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.coordinator.played import Job
from tests.page.served import Served, served

from syncline.coordinator.recording import RunFiles
from syncline.core.media import MediaItem, ReportedMedia
from syncline.page.runs import MOST_EVENTS
from syncline.report.reading import read_run
from syncline.report.single import report
from syncline.stats import Event, JobFigures, JobLook, MemberFigures
from syncline.store.lines import EVENTS, EVENTS_BYTES, METRICS, METRICS_BYTES, LinesWriter, parts, read_lines
from syncline.store.series import SERIES, SeriesReader

pytestmark = pytest.mark.proof

WEEK, DAY, HOUR = 604_800, 86_400, 3_600
BEGAN = 1.8e9
#: As many as share all points that a run may keep; each line has some of them.
METRIC_NAMES = [f"train/metric-{k}" for k in range(100)]
NUM_IN_A_LINE, NUM_IMAGES = 12, 20
#: The page asks for so many metrics at a time, and so many points of each.
NUM_CURVES, NUM_POINTS = 32, 600
#: A browser may get so much when it opens a run, and a report may be so long.
MOST_OPENED, MOST_REPORT = 10e6, 10e6


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


def moments() -> Iterator[tuple[int, bool]]:
    """Seconds of a week, and whether members have figures then: as often as rows of that age are kept."""
    spans = ((WEEK, 600), (2 * DAY, 60), (2 * HOUR, 10), (600, 1), (0, 1))
    for (age, every), (until, _) in itertools.pairwise(spans):
        for second in range(WEEK - age, WEEK - until, every):
            left = WEEK - second
            own = 600 if left > 6 * HOUR else 60 if left > HOUR / 2 else 10 if left > 120 else 1
            yield second, second % own == 0


def size_of(folder: pathlib.Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


class Week(msgspec.Struct):
    """The files of a run of a week, and the most that they took meanwhile."""

    folder: pathlib.Path
    series_bytes: int = 0
    lines_bytes: int = 0
    written_bytes: int = 0  #: as lines, most of which were thinned


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Week:
    """Played once, which takes minutes: the processes of pytest-xdist wait for the first of them."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_TESTRUNUID" in os.environ else base) / "played"
    place.mkdir(exist_ok=True)
    told = place / "week.json"
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if told.exists():
            return Week(place / "week", *json.loads(told.read_text()))
        found = Week(place / "week")
        found.folder.mkdir()
        play_series(found)
        for path in found.folder.glob("*.jsonl"):
            path.unlink()
        play_lines(found)
        told.write_text(json.dumps([found.series_bytes, found.lines_bytes, found.written_bytes]))
        return found


def play_series(week: Week) -> None:
    """200 members, and more points of metrics and more images than are kept."""
    job = Job()
    with contextlib.closing(job.coordinator):
        files, known = RunFiles(week.folder, job.coordinator.job), members()
        for number, (second, has_members) in enumerate(moments()):
            at, step = BEGAN + second, 20 * second
            readings = [(name, step, at, math.exp(-second / WEEK) + 0.01 * k) for k, name in enumerate(METRIC_NAMES)]
            figures = JobFigures(
                at=at, step=step, seconds=float(second), members=known if has_members else (), steps_per_second=20.0
            )
            look = JobLook(number=number, figures=figures, readings=tuple(readings))
            items = [MediaItem(f"image-{k}", "image", step, bytes([k]) * 60_000) for k in range(NUM_IMAGES)]
            files.write(look, [ReportedMedia(at, "worker-0", item) for item in items] if number % 25 == 0 else [])
            if number % 50 == 0:
                week.series_bytes = max(week.series_bytes, size_of(week.folder, f"{SERIES}*"))
        files.close()


def play_lines(week: Week) -> None:
    """A line of metrics each second, and an event each ten seconds: more than all files may take."""
    metrics, events = (
        LinesWriter(week.folder / METRICS, METRICS_BYTES),
        LinesWriter(week.folder / EVENTS, EVENTS_BYTES),
    )
    for second in range(WEEK):
        at = BEGAN + second
        line = {"at": at, "step": 20 * second, "metrics": dict.fromkeys(METRIC_NAMES[:NUM_IN_A_LINE], second / 7)}
        metrics.write([line])
        if second % 10 == 0:
            text = f"worker-{second % 192} (incarnation {second}) has left the job: it was not heard of for 2.0 s" * 4
            events.write([Event(number=second, at=at, step=20 * second, kind="death", text=text)])
        if second % 10_000 == 0:
            week.written_bytes += 10_000 * len(msgspec.json.encode(line))
            week.lines_bytes = max(week.lines_bytes, size_of(week.folder, "*.jsonl"))
    metrics.close()
    events.close()


def test_its_files_take_less_than_100_mb(week: Week) -> None:
    print(
        f"after a week of 200 members: {SERIES} took {week.series_bytes / 1e6:.0f} MB at most, the lines "
        f"{week.lines_bytes / 1e6:.0f} MB of {week.written_bytes / 1e6:.0f} MB that were written"
    )
    assert week.series_bytes < 100e6 and week.lines_bytes <= 100e6 < week.written_bytes


def test_the_series_reach_from_its_begin_to_its_end(week: Week) -> None:
    """The last minutes by the second; of what is older there is less, and something of everything."""
    reader = SeriesReader(week.folder / SERIES)
    rows, own, curve = reader.rows(most=10**6), reader.rows("worker-7", most=10**6), reader.curve(METRIC_NAMES[0])
    print(f"{len(rows.at):,} rows of the job, {len(own.at):,} of a member, {len(curve.at):,} points of a metric")
    for at, most in ((rows.at, 20_000), (own.at, 3_000)):
        assert at[0] - BEGAN < HOUR and at[-1] >= BEGAN + WEEK - 1 and len(at) < most
        assert max(b - a for a, b in itertools.pairwise(at)) <= HOUR
    assert {b - a for a, b in itertools.pairwise(rows.at[-500:])} == {1.0}
    assert curve.step[-1] > 20 * (WEEK - HOUR) and curve.step[0] < 20 * HOUR * 6
    assert len(reader.subjects()) == 200 and len(reader.media()) > 20


def test_the_lines_reach_from_its_begin_to_its_end(week: Week) -> None:
    for name in (METRICS, EVENTS):
        assert len(parts(week.folder / name)) >= 2
        assert read_lines(week.folder / name, 1).damage == ""
    newest = read_lines(week.folder / METRICS, 10_000).lines
    assert [line["step"] for line in newest] == [20 * second for second in range(WEEK - 10_000, WEEK)]
    oldest = read_lines(week.folder / METRICS, 10**7).lines[0]
    assert oldest["step"] < 20 * HOUR


def test_a_browser_gets_a_bounded_part_of_it(week: Week) -> None:
    """What the page asks for when it opens a run and one of its members. Both ends of the week are in each answer."""
    with served(week.folder.parent, "") as page:
        opened = Opened(page)
        view = opened.get("/api/v1/runs/week")
        assert len(view["members"]) == 200 and view["metrics"] == METRIC_NAMES
        for path in ("rows", "rows?member=worker-7"):
            at = opened.get(f"/api/v1/runs/week/{path}")["at"]
            assert at[0] - BEGAN < 2 * HOUR and at[-1] >= BEGAN + WEEK - 1 and 300 < len(at) <= 1_200
        for k in range(0, len(METRIC_NAMES), NUM_CURVES):
            query = urllib.parse.urlencode([("name", name) for name in METRIC_NAMES[k : k + NUM_CURVES]])
            for curve in opened.get(f"/api/v1/runs/week/curves?{query}&most={NUM_POINTS}")["curves"].values():
                assert 300 < len(curve["step"]) <= NUM_POINTS and curve["step"][0] < 20 * DAY
        told = opened.get("/api/v1/runs/week/events")
        assert len(told["events"]) == MOST_EVENTS and told["damage"] == ""
        assert told["events"][-1]["number"] == WEEK - 10
        assert len(opened.get("/api/v1/runs/week/media")["media"]) > 20
        assert opened.num_bytes < MOST_OPENED
        print(
            f"a browser opens it: {opened.seconds:.2f} s, {opened.num_bytes / 1e6:.1f} MB: {', '.join(opened.each)}"
        )


class Opened:
    """What a browser has asked for, and what that took."""

    def __init__(self, page: Served) -> None:
        self._page = page
        page.get("/api/v1/openapi.json")  # the page's thread has loaded its packages
        self.seconds, self.num_bytes, self.each = 0.0, 0, list[str]()

    def get(self, path: str) -> Any:
        began = time.perf_counter()
        status, _, body = self._page.get(path)
        took = time.perf_counter() - began
        assert status == 200, body
        self.seconds, self.num_bytes = self.seconds + took, self.num_bytes + len(body)
        self.each.append(
            f"{path.removeprefix('/api/v1/runs/week').partition('?')[0] or 'the run'} {1e3 * took:.0f} ms"
        )
        return json.loads(body)


def test_a_report_of_it_is_bounded(week: Week) -> None:
    began = time.perf_counter()
    run = read_run(week.folder)
    text = report(run)
    print(f"syncline report: {time.perf_counter() - began:.1f} s, {len(text) / 1e6:.1f} MB")
    assert run.damages == [] and len(run.curves) == len(METRIC_NAMES) and len(text) < MOST_REPORT
