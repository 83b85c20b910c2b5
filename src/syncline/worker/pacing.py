"""A worker's pace: how long it waits before a step, or that it is held there, by the coordinator's word."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from syncline.core.wire.pace import Pace
from syncline.worker.times import StepClock

#: So often a worker that waits looks whether it is to leave, or the job is over.
LOOK_SECONDS = 0.2


class Pacing:
    """Set by the thread that hears the coordinator; heeded by the script's own, between two steps."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises how the job has ended for this worker, if it has."""
        self._check = check
        self._pace = Pace("")
        self._change = threading.Condition()

    def hear(self, pace: Pace) -> None:
        with self._change:
            self._pace = pace
            self._change.notify_all()

    def slow_down(self, look: Callable[[], None]) -> None:
        """A step was made: the pause that is to come before the next one. A new pace ends it, and `look` may."""
        pace = self._pace
        if pace.delay_seconds:
            self._wait(lambda: self._pace is not pace, time.monotonic() + pace.delay_seconds, look)

    @property
    def is_held(self) -> bool:
        return self._pace.is_paused

    def hold(self, look: Callable[[], None], times: StepClock) -> None:
        """Returns when this worker is not held; that is no part of a step."""
        if self._pace.is_paused:
            times.pause()
            self._wait(lambda: not self._pace.is_paused, math.inf, look)
            times.resume()

    def _wait(self, is_over: Callable[[], bool], until: float, look: Callable[[], None]) -> None:
        while not is_over() and (left := until - time.monotonic()) > 0:
            self._check()
            look()
            with self._change:
                if not is_over():
                    self._change.wait(min(left, LOOK_SECONDS))
