"""Pace: a worker that is slowed or held by hand, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from syncline.core.members import by_name
from syncline.core.wire.message import Message

#: Nobody means a longer pause before every step; who does holds the worker.
MOST_DELAY_SECONDS = 24 * 3600.0


class Pace(Message, frozen=True):
    """To the coordinator, and from it to the worker: from now on so long before each step; or held; or neither."""

    worker: str
    delay_seconds: float = 0.0
    is_paused: bool = False


class Paced(msgspec.Struct, frozen=True, array_like=True):
    """A worker's pace, as the coordinator keeps it."""

    delay_seconds: float
    is_paused: bool
    since: float  # wall clock: it outlives the coordinator

    @property
    def state(self) -> str:
        """For the table of `status`."""
        return "paused" if self.is_paused else f"paced: {told_seconds(self.delay_seconds)}"

    def told(self, now: float) -> str:
        """For `why`: what it is by hand, and since when."""
        if self.is_paused:
            return f"is paused by hand since {max(0.0, now - self.since):.0f} s"
        return f"is slowed by hand, {told_seconds(self.delay_seconds)} before each step"


def told_seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def told_paused(paces: Mapping[str, Paced], now: float) -> str:
    """Who is held by hand, in words; nobody: nothing."""
    held = sorted((name for name, pace in paces.items() if pace.is_paused), key=by_name)
    return ", ".join(f"{name} {paces[name].told(now)}" for name in held)
