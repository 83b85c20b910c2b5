"""When a worker reports its numbers: with heartbeats, and by a timer where there are none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.worker.conftest import TwinCoordinator

from syncline import Rule
from syncline.core.wire.control import AskLife, Report
from syncline.worker import reporting


def reports(twin: Any) -> list[Report]:
    return [message for message in twin.coordinator.heard if isinstance(message, Report)]


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def step(twin: Any) -> None:
    twin.job.kv.push({"a": np.ones(8)}).wait()


def test_a_report_goes_right_before_a_heartbeat(house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is woken once for both. There is one where there is something new, and not too often."""
    monkeypatch.setattr(reporting, "REPORT_SECONDS", 1e9)  # the timer does nothing in this test
    twin = house(1)
    twin.job.kv.register({"a": np.zeros(8)}, Rule("SGD", lr=1.0))
    step(twin)
    monkeypatch.setattr(reporting, "REPORT_SECONDS", 0.0)
    assert twin.handlers.heartbeat().step == 1
    until(lambda: [report.step for report in reports(twin)] == [1])
    twin.handlers.heartbeat()
    step(twin)
    twin.handlers.heartbeat()
    until(lambda: [report.step for report in reports(twin)] == [1, 2])
    monkeypatch.setattr(reporting, "REPORT_SECONDS", 1e9)
    step(twin)
    twin.handlers.heartbeat()
    assert [report.step for report in reports(twin)] == [1, 2]


def test_a_heartbeat_while_the_job_asks_for_its_earlier_lives(
    house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the answer takes longer than a heartbeat, which has nothing to report yet."""
    answer, beaten = TwinCoordinator.answer, []

    def beats_first(self: TwinCoordinator, message: Any) -> Any:
        if isinstance(message, AskLife):
            beaten.append(self.house.handlers.heartbeat())
        return answer(self, message)

    monkeypatch.setattr(TwinCoordinator, "answer", beats_first)
    twin = house(1, late=True)
    assert [found.step for found in beaten] == [0]
    assert not reports(twin)


def test_a_timer_reports_where_there_are_no_heartbeats(
    house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of one process send none; and a heartbeat may wait for its answer."""
    monkeypatch.setattr(reporting, "REPORT_SECONDS", 0.01)
    twin = house(1)
    twin.job.kv.register({"a": np.zeros(8)}, Rule("SGD", lr=1.0))
    step(twin)
    until(lambda: [report.step for report in reports(twin)][-1:] == [1])
    twin.handlers.heartbeat()
    step(twin)
    until(lambda: [report.step for report in reports(twin)][-1:] == [2])
