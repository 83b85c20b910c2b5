"""`job.report` of images, histograms and texts: the newest of each name travels, at most one a second."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline.core.media import MOST_MEDIA, GiveMedia, Histogram, Text
from syncline.errors import ConfigError, ConnectionLost
from syncline.worker.media import MediaReports


class Line:
    """A coordinator that hears, or is away."""

    def __init__(self) -> None:
        self.is_open, self.is_lost = True, False
        self.heard: list[tuple[str, int, bytes]] = []

    def tell(self, message: GiveMedia) -> None:
        if self.is_lost:
            raise ConnectionLost("gone")
        self.heard += [(item.name, item.step, item.content) for item in message.items]


class Made:
    def __init__(self) -> None:
        self.line, self.said, self.now = Line(), list[str](), 0.0
        link: Any = self.line
        self.media = MediaReports(link, self.said.append, lambda: self.now)


def test_the_newest_of_a_second_is_sent() -> None:
    """The first at once; of the next ones only the last, when a second is over; none is lost at the end."""
    made = Made()
    for step in range(5):
        made.media.report({"a": Text(f"a{step}")}, step)
    assert made.line.heard == [("a", 0, b"a0")]
    made.media.report({"b": Text("b")}, 5)
    assert made.line.heard[1:] == [("b", 5, b"b")], "another name has a second of its own"
    made.now = 1.0
    made.media.flush()
    assert made.line.heard[2:] == [("a", 4, b"a4")]
    made.media.report({"a": Text("last")}, 6)
    made.media.flush()
    assert len(made.line.heard) == 3
    made.media.flush(is_end=True)
    assert made.line.heard[3:] == [("a", 6, b"last")]


def test_what_is_reported_is_what_was_there_then() -> None:
    """The script goes on to change the array in place."""
    made = Made()
    values = np.zeros(4)
    made.media.report({"a": Text("x"), "h": Histogram(values)}, 1)
    made.media.report({"h": Histogram(values)}, 2)
    values += 7
    made.media.flush(is_end=True)
    assert b'"high":0.0' in made.line.heard[-1][2]


def test_while_the_coordinator_is_away_only_the_newest_waits() -> None:
    made = Made()
    made.line.is_open = False
    for step in range(100):
        made.media.report({"a": Text(str(step))}, step)
    made.line.is_open = True
    made.media.flush()
    assert made.line.heard == [("a", 99, b"99")]
    made.line.is_lost = True
    made.now = 5.0
    made.media.report({"a": Text("lost")}, 100)


def test_too_many_names_are_left_out_and_said_once() -> None:
    made = Made()
    for number in range(10_000):
        made.media.report({f"n{number}": Text("x")}, 1)
    assert len(made.line.heard) == MOST_MEDIA and len(made.said) == 1
    assert "'n200' would be image, histogram or text 201" in made.said[0]
    made.now = 2.0
    made.media.report({"n7": Text("y")}, 2)
    assert made.line.heard[-1] == ("n7", 2, b"y"), "known names go on"


def test_bad_ones_are_named_and_nothing_is_sent() -> None:
    made = Made()
    with pytest.raises(ConfigError, match=r"job.report: h cannot be a histogram"):
        made.media.report({"h": Histogram(["x"])}, 1)
    assert not made.line.heard
