"""Pace: a worker that is slowed or held by hand, and how that is shown."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from syncline.core.members import by_name
from syncline.core.wire.message import Message

#: The longest useful pause before a step; hold the worker instead.
MOST_DELAY_SECONDS = 24 * 3600.0


class Pace(Message, frozen=True):
    """To the coordinator, and from it to the worker: a pause before each step, or a hold, or neither."""

    worker: str
    delay_seconds: float = 0.0
    is_paused: bool = False


class Paced(msgspec.Struct, frozen=True, array_like=True):
    """A worker's pace, as journaled by the coordinator."""

    delay_seconds: float
    is_paused: bool
    since: float  # wall clock, valid across coordinators

    @property
    def state(self) -> str:
        """For the table of `status`."""
        return "paused" if self.is_paused else f"paced: {told_seconds(self.delay_seconds)}"

    def told(self, now: float) -> str:
        """For `why`: the state set by hand, and since when."""
        if self.is_paused:
            return f"is paused by hand since {max(0.0, now - self.since):.0f} s"
        return f"is slowed by hand, {told_seconds(self.delay_seconds)} before each step"


def told_seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def told_paused(paces: Mapping[str, Paced], now: float) -> str:
    """Names the workers held by hand; empty if there are none."""
    held = sorted((name for name, pace in paces.items() if pace.is_paused), key=by_name)
    return ", ".join(f"{name} {paces[name].told(now)}" for name in held)
