"""What a sink is, and how often it gets something."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from syncline.core.media import ReportedMedia
from syncline.stats import JobLook


class SinkError(Exception):
    """A sink cannot take anything now; the text says why and what helps.

    A sink keeps what it could not write, up to a bound, and writes it with a later look.
    """


class SinkRefusal(Exception):
    """A sink will never take a part of what it was given; the text says which, and why. It goes on with the rest."""


class SinkRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a sink is for."""

    name: str
    job: str  #: its id; the same after the coordinator has started again
    folder: pathlib.Path  #: of the run
    settings: dict[str, Any]


class Sink(Protocol):
    """Takes what is seen of a job. All calls come from one thread, which may wait.

    They raise SinkError, or SinkRefusal when they are done with the rest.
    """

    def write(self, look: JobLook, media: Sequence[ReportedMedia]) -> None:
        """A look at the job, once a second: its readings, figures and events, and images, histograms and texts."""

    def close(self, *, has_failed: bool) -> None:
        """The job is over; or, without an outcome, this coordinator is."""


class Spacing:
    """Makes what goes to a sink sparser as it grows: nothing grows without bound in a week.

    While fewer than `full` were let through, there are `seconds` between two of one name; after each further `full`,
    twice as many.
    """

    def __init__(self, full: int, seconds: float = 0.0, num_passed: int = 0) -> None:
        """`num_passed`: in earlier lives."""
        self._full, self._seconds, self._num_passed = full, seconds, num_passed
        self._passed_at: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        doublings = self._num_passed // self._full
        return max(self._seconds, 1.0) * 2.0 ** (doublings - 1) if doublings else self._seconds

    def lets_pass(self, name: str, at: float, size: int = 1) -> bool:
        """Whether one of this name, of this size, is let through now."""
        if at - self._passed_at.get(name, float("-inf")) < self.seconds:
            return False
        self._passed_at[name] = at
        self._num_passed += size
        return True
