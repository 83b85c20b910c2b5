"""The recorder of a real coordinator: what it writes, and that nothing it meets harms the job."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.coordinator.played import Job, jobs, until

from syncline.coordinator import recording
from syncline.coordinator.recording import Recorder, StepPace
from syncline.core.media import GiveMedia, MediaItem, Text
from syncline.core.metrics import Metrics
from syncline.core.wire.control import AskWhy, GivenWhy, Heartbeat
from syncline.errors import ProtocolError
from syncline.stats import JobFigures, JobLook, JobVerdict, MemberStats, ProcessStats
from syncline.store import lines
from syncline.store.lines import read_lines
from syncline.store.series import SeriesReader

__all__ = ["jobs"]

Jobs = Callable[..., Job]


def recorder(job: Job, folder: pathlib.Path) -> Recorder:
    return Recorder(job.coordinator.job, job.coordinator.status, folder)


def test_it_writes_what_happens(jobs: Jobs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings, events and figures are in the files of the run when it is closed, also what came last."""
    monkeypatch.setattr(recording, "LOOK_SECONDS", 0.02)
    job = jobs().begin()
    own = recorder(job, tmp_path)
    seen: list[JobLook] = []
    own.watch(seen.append)
    own.start()
    stats = MemberStats(process=ProcessStats(cpu_seconds=1.0, memory_bytes=7, gpu_bytes=9, gpu_busy=0.25))
    job["worker-0"].ask(Heartbeat(step=3, stats=stats))
    for name in ("worker-0", "worker-1"):
        job[name].ask(Metrics(1, {"loss": (0.5, 1.0), "odd/name-1": (2.0, 1.0)}, step=3))
    until(lambda: any(look.readings for look in seen), "the reading is in a look")
    job.kill("worker-1")
    until(lambda: any(event.kind == "death" for look in seen for event in look.events), "the death is in a look")
    own.close()
    events = read_lines(tmp_path / "events.jsonl", 100).lines
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    assert "worker-1 (incarnation" in next(event["text"] for event in events if event["kind"] == "death")
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"loss": 0.5, "odd/name-1": 2.0} in [line.get("metrics") for line in metrics]
    reader = SeriesReader(tmp_path / "series.db")
    assert reader.curve("loss").value == [0.5] and reader.facts().keys() >= {"look", "settings"}
    known = {column: reader.rows("worker-0").columns[column] for column in ("memory_bytes", "gpu_bytes", "gpu_busy")}
    assert 7.0 in known["memory_bytes"] and 9.0 in known["gpu_bytes"] and 0.25 in known["gpu_busy"]
    assert 0.25 in reader.rows().columns["gpu_busy"], "in the mean over the members that know it"
    assert "gpu_busy" not in reader.rows("worker-1").columns
    assert seen[-1].figures.members and [look.number for look in seen] == sorted(look.number for look in seen)


def test_media_are_kept_the_newest_of_a_look(
    jobs: Jobs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers report the same name between two looks: the job has one, and who reported it."""
    job = jobs().begin()
    own = recorder(job, tmp_path)
    for worker in ("worker-0", "worker-1"):
        items = [MediaItem("sample/text", "text", 3, Text(worker).content("x"))]
        job[worker].ask(GiveMedia(items))
    job["worker-0"].ask(GiveMedia([MediaItem("odd", "text", 4, b"o")]))
    with pytest.raises(ProtocolError, match=r"worker-0 reports media that cannot be shown: 'bad' is no PNG"):
        job["worker-0"].ask(GiveMedia([MediaItem("bad", "image", 4, b"no picture")]))
    seen: list[JobLook] = []
    own.watch(seen.append)
    monkeypatch.setattr(recording, "LOOK_SECONDS", 0.02)
    own.start()
    until(lambda: len(seen) > 1, "there are looks")
    own.close()
    assert seen[0].media == ("sample/text", "odd") and not any(look.media for look in seen[1:])
    reader = SeriesReader(tmp_path / "series.db")
    kept = {(one.name, one.member, one.step): reader.media_content(one.id) for one in reader.media()}
    assert kept == {("sample/text", "worker-1", 3): ("text", b"worker-1"), ("odd", "worker-0", 4): ("text", b"o")}


def test_another_coordinator_numbers_events_on(jobs: Jobs, tmp_path: pathlib.Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"number":41,"at":1.0,"step":0,"kind":"note","text":"x"}\n')
    job = jobs().begin()
    assert recorder(job, tmp_path).look().events[0].number == 42


def test_a_full_disk_is_said_once_and_the_job_goes_on(
    jobs: Jobs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write fails; looks go on; when there is space again, what has happened is written."""
    monkeypatch.setattr(recording, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(recording, "AGAIN_SECONDS", 0.0)
    said: list[str] = []
    job = jobs().begin()
    monkeypatch.setattr(job.coordinator.job, "log_line", said.append)
    is_full = True
    real = lines.os.write

    def write(descriptor: int, data: bytes) -> int:
        if is_full:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(lines.os, "write", write)
    own = recorder(job, tmp_path)
    seen: list[Any] = []
    own.watch(seen.append)
    own.start()
    job.coordinator.job.event("something")
    until(lambda: len(seen) > 20, "looks go on")
    until(lambda: any("No space left" in text for text in said), "it is said")
    is_full = False
    job.coordinator.job.event("space again")
    until(lambda: "space again" in (tmp_path / "events.jsonl").read_text(), "it is written again")
    own.close()
    assert sum("No space left" in text for text in said) == 1, said
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events if event["kind"] == "note"][-2:] == ["something", "space again"]
    assert [event["number"] for event in events] == list(range(1, len(events) + 1)), (
        "none is lost, none is there twice"
    )


def test_a_disk_that_stands_still_holds_up_no_look(
    jobs: Jobs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing thread is stuck: its queue fills up, further looks are dropped, and whoever watches sees them."""
    import threading

    monkeypatch.setattr(recording, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(recording, "END_SECONDS", 0.05)
    stuck = threading.Event()
    monkeypatch.setattr(recording.RunFiles, "write", lambda *given: stuck.wait())
    own = recorder(jobs().begin(), tmp_path)
    seen: list[JobLook] = []
    own.watch(seen.append)
    own.start()
    until(lambda: len(seen) > recording.MOST_UNWRITTEN + 20, "looks go on")
    own.close()
    stuck.set()


def test_a_bug_here_fails_no_job(jobs: Jobs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LOOK_SECONDS", 0.01)
    job = jobs().begin()
    said: list[str] = []
    monkeypatch.setattr(job.coordinator.job, "log_line", said.append)
    own = recorder(job, tmp_path)
    monkeypatch.setattr(own, "look", lambda media: 1 / 0)
    own.start()
    until(lambda: bool(said), "it is said")
    time.sleep(0.05)
    own.close()
    assert len(said) == 1 and "ZeroDivisionError" in said[0] and job.coordinator.membership.outcome is None


def test_verdicts_are_told_by_why_and_are_events_once(
    jobs: Jobs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = JobVerdict(kind="straggler", subject="worker-1", text="worker-1 is slow")
    monkeypatch.setattr(recording, "verdicts", lambda *known: [found])
    job = jobs().begin()
    own = recorder(job, tmp_path)
    events = [event for _ in range(6) for event in own.look().events if event.kind == "verdict"]
    assert [event.text for event in events] == ["worker-1 is slow"]
    given = job["worker-0"].ask(AskWhy())
    assert isinstance(given, GivenWhy) and given.verdicts == [found]


def test_many_readings_of_a_second_are_merged(jobs: Jobs, tmp_path: pathlib.Path) -> None:
    job = jobs().begin()
    for k in range(1_000):
        job.coordinator.job.note_reading("loss", k, float(k))
    for k in range(2_000):
        job.coordinator.job.note_reading(f"m{k}", 1, 1.0)
    readings = recorder(job, tmp_path).look().readings
    own = [value for name, _, _, value in readings if name == "loss"]
    assert len(own) == recording.MOST_POINTS and sum(value or 0.0 for value in own) / len(own) == 499.5


def test_too_many_names_of_all_workers_together_are_said_once(jobs: Jobs, tmp_path: pathlib.Path) -> None:
    """No worker has too many by itself. The job goes on, and metrics that it has are read as before."""
    job = jobs().begin()
    own = recorder(job, tmp_path)
    for turn, worker in enumerate(("worker-0", "worker-1")):
        for part in range(10):
            values = {f"{worker}/{part}/{k}": (1.0, 1.0) for k in range(60)}
            job[worker].ask(Metrics(part + 1, values, step=turn + 1))
    for worker in ("worker-0", "worker-1"):
        job[worker].ask(Metrics(11, {"worker-0/0/0": (5.0, 1.0)}, step=3))
    events = [event.text for event in own.look().events if "all further names" in event.text]
    assert events == ["the job has 1,000 metrics: 'worker-1/6/40' and all further names are left out"]
    assert job.coordinator.metrics.values()["worker-0/0/0"] == 5.0


def test_the_usual_time_of_a_step() -> None:
    pace = StepPace()
    for second in range(20):
        pace.look(JobFigures(at=100.0 + second, step=4 * second, seconds=1.0 + second))
    assert abs(pace.step_seconds - 0.25) < 1e-9 and pace.still_seconds == 0.0
    pace.look(JobFigures(at=160.0, step=76, seconds=61.0))
    assert pace.still_seconds == 41.0
