"""Sizing: finds the number of workers that pays off. One more is tried, kept if it adds enough, else removed.

Pure: `now` is an argument; every decision has a reason.
"""

from __future__ import annotations

import dataclasses

from syncline.core.units import counted

#: Time for all workers to reach full speed after a change, then the time of the measurement.
SETTLE_SECONDS, MEASURE_SECONDS = 3.0, 6.0
#: One more worker must add at least this part of an average worker's speed.
WORTH = 0.5
#: A failed attempt is repeated after this time: other jobs may have left the machine.
AGAIN_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class SizingDecision:
    """The new number of workers, and why."""

    count: int
    reason: str


class Sizing:
    """Observes samples and workers periodically."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._wanted: int | None = None
        self._began: tuple[float, int] | None = None  # measuring: since when, from how many samples on
        self._still_since: float | None = None  # since when the wanted number is at work
        self._rates: dict[int, float] = {}  # samples per second by number of workers
        self._is_settled_until = 0.0

    def look(self, now: float, wanted: int, at_work: int, samples: int, waiting: float) -> SizingDecision | None:
        """Evaluates one observation. `samples`: total of all workers. `waiting`: the part of time in which workers
        wait.
        """
        if wanted != self._wanted or at_work != wanted:
            self._wanted, self._began, self._still_since = wanted, None, None
        if at_work != wanted or not samples or now < self._is_settled_until:
            return None
        if self._still_since is None:
            self._still_since = now
        if self._began is None:
            if now - self._still_since >= SETTLE_SECONDS:
                self._began = (now, samples)
            return None
        since, before = self._began
        if now - since < MEASURE_SECONDS or samples == before:
            return None
        self._rates[wanted] = (samples - before) / (now - since)
        self._began = None
        return self._decide(now, wanted, waiting)

    def _decide(self, now: float, count: int, waiting: float) -> SizingDecision | None:
        rate, fewer = self._rates[count], self._rates.get(count - 1)
        if fewer is not None and count > self._least:
            gain, worth = rate / fewer - 1, WORTH / (count - 1)
            said = f"{count} workers do {rate:,.0f} samples/s, {count - 1} did {fewer:,.0f}: one more adds {gain:.0%}"
            if gain < worth:
                self._is_settled_until = now + AGAIN_SECONDS
                why = f"less than the {worth:.0%} that would pay; workers wait {waiting:.0%} of their time"
                return SizingDecision(count - 1, f"{said}, {why}")
        else:
            verb = "do" if count > 1 else "does"
            said = f"{counted(count, 'worker')} {verb} {rate:,.0f} samples/s"
        if count < self._most:
            return SizingDecision(count + 1, f"{said}; one more is tried")
        self._is_settled_until = now + AGAIN_SECONDS
        return None
