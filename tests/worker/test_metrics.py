"""`job.report` while the coordinator is away: nothing is lost, doubled or put out of order, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline.config import resolve
from syncline.core.metrics import MOST_METRICS, Metrics, Steer
from syncline.core.wire.message import Message
from syncline.errors import ConfigError, ConnectionLost
from syncline.worker.metrics import Measures, RuleSignals, with_factor


class FakeCall:
    def __init__(self, answer: Message | None) -> None:
        self._answer = answer

    def wait(self, seconds: float) -> Message:
        if self._answer is None:
            raise ConnectionLost("gone")
        return self._answer


class FakeLink:
    """A coordinator that is there, away, or dies before it answers."""

    def __init__(self) -> None:
        self.is_open, self.answers = True, True
        self.heard: list[Metrics] = []
        self.steer = Steer()
        self.open: list[Callable[[], None]] = []

    def try_call(self, message: Metrics, then: Callable[[Any], None]) -> None:
        if not self.is_open:
            raise ConnectionLost("the coordinator is gone for the moment")
        self.heard.append(message)
        if self.answers:
            then(FakeCall(self.steer))
        else:
            self.open.append(lambda: then(FakeCall(None)))

    def die(self) -> None:
        self.is_open = False
        while self.open:
            self.open.pop(0)()

    def come_back(self) -> None:
        self.is_open = self.answers = True
        self.heard = []


class FakeJob:
    name, step, samples_taken = "worker-0", 3, 0

    def __init__(self, link: FakeLink, **settings: Any) -> None:
        self.config, self.link = resolve(settings), link
        self.asked: list[Metrics] = []

    def ask(self, message: Metrics) -> Message:
        self.asked.append(message)
        return self.link.steer


def made(**settings: Any) -> tuple[Measures, FakeLink, FakeJob, RuleSignals, list[str]]:
    link, signals = FakeLink(), RuleSignals()
    said: list[str] = []
    job = FakeJob(link, **settings)
    return Measures(job, link, signals, said.append), link, job, signals, said  # type: ignore[arg-type]


def losses(link: FakeLink) -> list[tuple[int, float]]:
    return [(message.number, message.values["loss"][0]) for message in link.heard]


def test_what_was_not_answered_is_said_again_in_order() -> None:
    measures, link, *_ = made()
    measures.report({"loss": 0.0})
    link.answers = False
    measures.report({"loss": 1.0})
    measures.report({"loss": 2.0})
    link.die()
    measures.report({"loss": 3.0})
    measures.flush()
    assert losses(link) == [(1, 0.0), (2, 1.0), (3, 2.0)]
    link.come_back()
    measures.report({"loss": 4.0})
    assert losses(link) == [(2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0)]
    measures.flush()
    assert len(link.heard) == 4, "all of it is answered"


def test_weights_are_the_samples_since_the_same_metric_was_last_reported() -> None:
    measures, link, job, *_ = made()
    job.samples_taken = 32
    measures.report({"loss": 1.0})
    job.samples_taken = 48
    measures.report({"loss": 1.0})
    measures.report({"accuracy": 1.0})
    measures.report({"loss": 1.0})
    measures.report({"loss": 1.0}, weight=7.0)
    weights = [next(iter(message.values.values()))[1] for message in link.heard]
    assert weights == [32.0, 16.0, 48.0, 1.0, 7.0]


def test_the_answer_steers_and_an_older_word_changes_nothing() -> None:
    measures, link, _, signals, _ = made()
    link.steer = Steer(2, "", 0.5)
    measures.report({"loss": 1.0})
    assert signals.factor == 0.5 and not measures.should_stop
    signals.hear(Steer(1, "old", 1.0))
    assert signals.factor == 0.5 and not signals.stop
    signals.hear(Steer(3, "--stop", 0.5))
    assert measures.should_stop


def test_the_last_step_is_told_once() -> None:
    measures, _, job, *_ = made(max_steps=5)
    assert not measures.should_stop
    job.step = 5
    assert measures.should_stop and measures.should_stop
    job.step = 4  # its parameters came back from an older copy
    assert measures.should_stop
    assert [(message.values, message.step) for message in job.asked] == [({}, 5)]


def test_a_whole_reading_waits_for_the_rules() -> None:
    measures, link, job, signals, _ = made()
    link.steer = Steer(1, "--stop", 1.0)
    measures.report_whole({"accuracy": 0.9})
    assert signals.stop == "--stop" and job.asked[0].is_whole and job.asked[0].values == {"accuracy": (0.9, 1.0)}


def test_names_beyond_the_most_are_left_out_and_that_is_said_once() -> None:
    """A script that makes a name of each step goes on, and so do the metrics that it had."""
    measures, link, _, _, said = made()
    for number in range(10_000):
        measures.report({"loss": 1.0, f"m{number}": 1.0})
    names = {name for message in link.heard for name in message.values}
    assert len(names) == MOST_METRICS and link.heard[-1].values.keys() == {"loss"}
    (line,) = said
    assert line == (
        "worker-0 has reported 1,000 metrics: 'm999' and all further names are left out; give few, fixed names; "
        "'m99' is one of them"
    )


def test_what_cannot_be_reported() -> None:
    measures, link, *_ = made()
    with pytest.raises(ConfigError, match="weight = -1: it must be a number from 0 on"):
        measures.report({"m1": 1.0}, weight=-1)
    measures.report({})
    for name in ("a b", "", "é", "a\nb", "x" * 201, "-a", "a{b}", '"', "../a\0"):
        with pytest.raises(ConfigError, match="is not a name for a metric: letters, digits"):
            measures.report({name: 1.0})
    for value, words in (
        ("high", r"loss = 'high': it must be a number; report words as syncline.Text"),
        (b"1", r"it must be a number$"),
        (None, r"loss = None: it must be a number$"),
        ([1.0, 2.0], r"loss is a list: it must be one number"),
        (np.zeros((2, 3)), r"loss is a ndarray of shape \(2, 3\): it must be one number, e.g. its .mean\(\)"),
        (1j, r"loss is a complex: it must be one number"),
        (10**400, r"loss is a int: it must be one number"),
    ):
        with pytest.raises(ConfigError, match=words):
            measures.report({"loss": value})
    assert link.heard == []


def test_a_factor_is_on_what_is_pushed() -> None:
    assert with_factor({}, {"lr": 0.5}, 1.0) == {}
    assert with_factor({}, {"lr": 0.5, "eps": 1.0}, 0.5) == {"lr": 0.25}
    assert with_factor({"lr": 0.1, "eps": 2.0}, {"lr": 0.5}, 0.5) == {"lr": 0.05, "eps": 2.0}
    assert with_factor({"eps": 2.0}, {}, 0.5) == {"eps": 2.0}
