"""Lines that would come by the thousand: the first few of a minute are shown, the others are counted."""

from __future__ import annotations

SHOWN = 3
SECONDS = 60.0


class Repeats:
    """Folds lines of one kind, named by `noun` in the plural. Pure: `now` is an argument."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._began = 0.0
        self._num_seen = 0
        self._last = ""

    @property
    def num_hidden(self) -> int:
        return max(0, self._num_seen - SHOWN)

    def add(self, line: str, now: float) -> list[str]:
        """The lines to show now that this one has come."""
        shown = self.flush(now)
        if not self._num_seen:
            self._began = now
        self._num_seen += 1
        self._last = line
        return [*shown, line] if self._num_seen <= SHOWN else shown

    def flush(self, now: float, *, is_over: bool = False) -> list[str]:
        """After a minute, or at the end: one line for all that were not shown."""
        if not self._num_seen or (now - self._began < SECONDS and not is_over):
            return []
        hidden, seconds = self.num_hidden, now - self._began
        self._num_seen = 0
        if not hidden:
            return []
        return [f"{hidden:,} more {self._noun} in the last {seconds:.0f} s; the last one: {self._last}"]
