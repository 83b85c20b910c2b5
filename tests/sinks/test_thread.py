"""A sink beside a job: nothing waits for it, trouble is said once, and the end is not lost."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.config import JobConfig
from syncline.core.media import MediaItem, ReportedMedia
from syncline.errors import ConfigError
from syncline.sinks import choosing, thread
from syncline.sinks.choosing import Choice, choices
from syncline.sinks.sink import SinkError, SinkRefusal, SinkRun, Spacing
from syncline.sinks.thread import SinkThread
from syncline.stats import JobFigures, JobLook

RUN = SinkRun(name="now", job="job", folder=pathlib.Path("now"), settings={})


def look(number: int) -> JobLook:
    readings = (("loss", number, 1e9 + number, 1.0 / number),)
    return JobLook(number=number, figures=JobFigures(at=1e9 + number, step=number, seconds=1.0), readings=readings)


class Played:
    """A sink that keeps what it gets, fails, or stands still."""

    def __init__(self) -> None:
        self.looks: list[int] = []
        self.media: list[str] = []
        self.ended: list[bool] = []
        self.trouble = ""
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def write(self, look: JobLook, media: Sequence[ReportedMedia]) -> None:
        self.may_go_on.wait(PATIENCE)
        if self.trouble:
            raise SinkError(self.trouble)
        self.looks.append(look.number)
        self.media += [one.item.name for one in media]

    def close(self, *, has_failed: bool) -> None:
        self.ended.append(has_failed)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(thread, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(thread, "AGAIN_SECONDS", 0.0)

    def make(make_sink: Callable[[SinkRun], Any] | None = None) -> tuple[SinkThread, Played, list[str]]:
        sink, said = Played(), list[str]()
        own = SinkThread(Choice("played", make_sink or (lambda run: sink)), RUN, said.append)
        own.start()
        return own, sink, said

    return make


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_gets_every_look_in_order_and_the_end(made: Any) -> None:
    own, sink, said = made()
    for number in range(1, 100):
        own.take(look(number), [ReportedMedia(1.0, "worker-0", MediaItem(f"m{number}", "text", 1, b""))])
    own.close(has_failed=True)
    assert sink.looks == list(range(1, 100)) and len(sink.media) == 99 and sink.ended == [True] and not said


def test_a_short_job_makes_its_sink_at_the_end(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are not imported beside the training of a job that ends at once."""
    monkeypatch.setattr(thread, "WARM_SECONDS", PATIENCE)
    num_made = []
    sink = Played()
    own, _, _ = made(lambda run: num_made.append(1) or sink)
    own.take(look(1), ())
    time.sleep(0.05)
    assert not num_made
    own.close(has_failed=False)
    assert sink.looks == [1] and sink.ended == [False]


def test_a_sink_that_stands_still_holds_up_nobody(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks go on at full speed; the oldest that wait are left out; the end waits a little only, and says so."""
    monkeypatch.setattr(thread, "END_SECONDS", 0.05)
    own, sink, said = made()
    sink.may_go_on.clear()
    for number in range(1, 10_000):
        own.take(look(number), ())
    own.close(has_failed=False)
    assert len(said) == 1 and "played did not take the last readings" in said[0]
    sink.may_go_on.set()
    until(lambda: bool(sink.ended))
    assert len(sink.looks) <= thread.MOST_WAITING + 1 and sink.looks[-1] == 9_999


def test_trouble_is_said_once_and_tried_again(made: Any) -> None:
    own, sink, said = made()
    sink.trouble = "the server is away"
    for number in range(1, 20):
        own.take(look(number), ())
    until(lambda: bool(said))
    sink.trouble = ""
    own.take(look(20), ())
    until(lambda: 20 in sink.looks)
    own.close(has_failed=False)
    assert said == ["played cannot take readings: the server is away; the job goes on, and tries it again"]


def test_a_bug_of_a_package_fails_no_job(made: Any) -> None:
    def broken(run: SinkRun) -> Any:
        raise ImportError("libwhatever.so is missing")

    own, _, said = made(broken)
    for number in range(1, 5):
        own.take(look(number), ())
    until(lambda: bool(said))
    own.close(has_failed=False)
    assert len(said) == 1 and "ImportError: libwhatever.so is missing" in said[0]


def test_looks_wait_for_a_sink_that_cannot_be_made_yet(made: Any) -> None:
    """Each attempt took one look with it."""
    sink, may = Played(), threading.Event()

    def make(run: SinkRun) -> Any:
        if not may.is_set():
            raise SinkError("the server is away")
        return sink

    own, _, said = made(make)
    for number in range(1, 20):
        own.take(look(number), ())
    until(lambda: bool(said))
    may.set()
    own.close(has_failed=False)
    assert sink.looks == list(range(1, 20))


def test_a_refusal_is_said_and_nothing_waits(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest was taken: the next look is written at once, not after the time that trouble takes."""
    monkeypatch.setattr(thread, "AGAIN_SECONDS", PATIENCE)

    class Refusing(Played):
        def write(self, look: JobLook, media: Sequence[ReportedMedia]) -> None:
            super().write(look, media)
            if look.number == 1:
                raise SinkRefusal("the metric x is refused, and left out: it is odd")

    sink = Refusing()
    own, _, said = made(lambda run: sink)
    for number in range(1, 5):
        own.take(look(number), ())
    until(lambda: sink.looks == [1, 2, 3, 4])
    own.close(has_failed=False)
    assert said == ["played: the metric x is refused, and left out: it is odd; the rest goes on"]


def test_looks_with_nothing_new_are_not_taken(made: Any) -> None:
    own, sink, _ = made()
    for number in range(1, 30):
        own.take(JobLook(number=number, figures=JobFigures(at=1.0)), ())
    own.close(has_failed=False)
    assert sink.looks == [10, 20], "figures of the job, now and then"


def test_a_week_stays_small() -> None:
    """A thousand metrics each second: what is let through grows with the logarithm of the time."""
    spacing = Spacing(4_000_000)
    num_bytes, at = 0, 0.0
    while at < 7 * 86_400:
        passed = spacing.lets_pass("m", at, 60)
        num_bytes += 60_000 if passed else 0
        for _ in range(999 if passed else 0):
            spacing.lets_pass(f"other {_}", at, 60)
        at += max(1.0, spacing.seconds)
    assert 10_000_000 < num_bytes < 100_000_000
    assert Spacing(100, num_passed=250).seconds == 2.0, "another coordinator goes on where the first one was"


def test_which_sinks_a_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"tensorboard"}
    monkeypatch.setattr(choosing, "is_installed", installed.__contains__)

    def names(*sinks: str) -> list[str]:
        return [choice.name for choice in choices(JobConfig(sink=sinks))]

    assert names() == names("tensorboard") == ["tensorboard"] and names("off") == []
    with pytest.raises(ConfigError, match="--sink mlflow: its package is missing: pip install mlflow-skinny"):
        names("mlflow://")
    installed.add("mlflow")
    assert names("mlflow://") == ["mlflow", "tensorboard"]
    installed.clear()
    assert names() == []
    with pytest.raises(ConfigError, match="--sink tensorboard: its package is missing: pip install tensorboard"):
        names("tensorboard")
