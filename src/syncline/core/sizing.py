"""Sizing: as many workers as pay. One more is tried, kept when it adds enough, and let go when it does not.

Pure: `now` is an argument; every decision says why.
"""

from __future__ import annotations

import dataclasses

from syncline.core.units import counted

#: After a change, for all to be at full speed; then for so long their samples are counted.
SETTLE_SECONDS, MEASURE_SECONDS = 3.0, 6.0
#: One more must add at least this part of what a worker does on average.
WORTH = 0.5
#: What did not pay is tried again after so long: other jobs may have left the machine.
AGAIN_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class SizingDecision:
    """So many workers from now on, and why."""

    count: int
    reason: str


class Sizing:
    """Looks at samples and workers, now and then."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._wanted: int | None = None
        self._began: tuple[float, int] | None = None  # counting: since when, from how many samples on
        self._still_since: float | None = None  # as many at work as there are to be
        self._rates: dict[int, float] = {}  # samples a second, by the number of workers
        self._is_settled_until = 0.0

    def look(self, now: float, wanted: int, at_work: int, samples: int, waiting: float) -> SizingDecision | None:
        """What follows from this look. `samples`: done so far, by all. `waiting`: the part of their time in which
        workers wait."""
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
