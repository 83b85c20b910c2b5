"""What showing a job costs: whose processor time counts, and that a browser looks."""

from __future__ import annotations

import pathlib
import threading

import pytest
from tests.patience import PATIENCE

from benchmarks import showing
from benchmarks.match import play
from benchmarks.row import Effort, NotMeasured, Reach, Row
from benchmarks.task import Task
from benchmarks.turns import Player, take_turns


def test_only_the_side_that_has_a_turn_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side's job lives meanwhile, and beats."""
    used = {1: 0.0, 2: 0.0, 3: 0.0}
    monkeypatch.setattr(showing, "seconds_of", lambda pids: sum(used[pid] for pid in pids))
    spent = showing.Spent({"ours": {"a": 1, "b": 2}, "reference": {"a": 3}})
    ours, reference = spent.gauge("ours"), spent.gauge("reference")
    ours(1)
    used.update({1: 4.0, 2: 6.0, 3: 1.0})
    assert ours(10) == 1.0
    used.update({1: 5.0, 3: 3.0})
    assert reference(4) == 0.5
    used.update({1: 9.0, 2: 8.0})
    assert ours(3) == 2.0


def test_the_coordinator_is_charged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the second. Members join after the gauge was made."""
    used, now = {1: 0.0, 2: 0.0, 3: 0.0}, 100.0
    monkeypatch.setattr(showing, "seconds_of", lambda pids: sum(used[pid] for pid in pids))
    monkeypatch.setattr(showing.time, "monotonic", lambda: now)
    ours_pids: dict[str, int] = {}
    sides = {"ours": showing.Coordinator(ours_pids), "reference": showing.Coordinator({"coordinator": 3})}
    spent = showing.Spent(sides)
    ours_pids.update({"worker-0": 1, "coordinator": 2})
    ours, reference = spent.in_a_second("ours"), spent.in_a_second("reference", 0.5)
    ours(1)
    used.update({1: 4.0, 2: 6.0, 3: 1.0})
    now = 110.0
    assert ours(7) == 0.6
    used.update({3: 3.0})
    now = 114.0
    assert reference(7) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        showing.showing_alone("a", "lenet", "LeNet", 0.5, reach=Reach("printed")),
        pytest.param(showing.showing("s", "lenet", "LeNet", reach=Reach("printed")), marks=pytest.mark.proof),
    ],
    ids=lambda row: row.name,
)
def test_a_browser_follows_ours_while_both_take_turns(
    row: Row, fast: Effort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs with torch take 20 s of a processor: the row that has another gauge is in the proof."""
    pytest.importorskip("starlette")
    monkeypatch.setattr(showing, "TURN_SECONDS", 0.05)
    opened: list[showing.ShownJob] = []
    real = showing.ShownJob.open_page
    monkeypatch.setattr(showing.ShownJob, "open_page", lambda self: (opened.append(self), real(self)))
    samples = row.measure(fast)
    assert len(samples.ours) == 5 and sum(samples.ours) > 0 and min(samples.reference) > 0
    assert len(opened) == 1 and opened.pop().num_looks > 0


class Nothing:
    """A side that takes its turns in a thread, and does nothing."""

    num_processes = 1

    def start(self, folder: pathlib.Path, path: str) -> None:
        given = (path, Player("reference", 0), lambda: None)
        self._thread = threading.Thread(target=take_turns, args=given, name="nothing", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """It cannot fail."""

    def stop(self) -> None:
        self._thread.join(PATIENCE)


@pytest.mark.slow
def test_without_its_page_there_is_nothing_to_show(fast: Effort) -> None:
    hidden = showing.ShownJob(Task(kind="push_pull", num_bytes=4096), page="off")
    gauges = {"ours": lambda num_operations: hidden.open_page()}
    with pytest.raises(NotMeasured, match="needs the extra page"):
        play(hidden, Nothing(), fast, gauges=gauges)  # type: ignore[arg-type]
