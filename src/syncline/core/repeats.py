"""Lines that would come by the thousand: the first few of a minute are shown, the others are counted.

`Repeats` folds lines of one kind, `SameLines` lines that are the same word for word.
"""

from __future__ import annotations

import re

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


#: Of one line: so many in a row are shown, and so many in a minute. A table may have the same line between its rows.
SHOWN_IN_A_ROW, SHOWN_IN_A_MINUTE = 10, 100
#: Different lines that are counted at a time.
MOST_COUNTED = 256
#: Of a line, in the one that says how often it came.
MOST_QUOTED = 100
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class SameLines:
    """Folds what one member prints again and again, word for word. Pure: `now` is an argument."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = 0.0
        self._last: str | None = None
        self._num_in_a_row = 0
        self._seen: dict[str, int] = {}  # line -> how often in this minute, without the rests of long rows
        self._hidden: dict[str, int] = {}  # line -> how often it was not shown, and that is not told yet

    def add(self, line: str, now: float) -> list[str]:
        """The lines to show now that this one has come."""
        shown = self.flush(now)
        if line != self._last:
            shown += self._end_of_row()
            self._last, self._num_in_a_row = line, 0
        if not self._seen:
            self._began = now
        self._num_in_a_row += 1
        if self._num_in_a_row <= SHOWN_IN_A_ROW:
            seen = self._seen[line] = self._seen.pop(line, 0) + 1
            if len(self._seen) > MOST_COUNTED:
                shown += self._forget(next(iter(self._seen)))
            if seen <= SHOWN_IN_A_MINUTE:
                return [*shown, line]
        self._hidden[line] = self._hidden.get(line, 0) + 1
        return shown

    def flush(self, now: float, *, is_over: bool = False) -> list[str]:
        """After a minute, or at the end: one line for each that was not always shown."""
        if not self._seen or (now - self._began < SECONDS and not is_over):
            return []
        shown = [told for line in list(self._hidden) for told in self._tell(line)]
        self._seen.clear()
        self._num_in_a_row = 0
        return shown

    def _end_of_row(self) -> list[str]:
        """Another line has come. What comes all the time, with others in between, is told after the minute."""
        line = self._last
        return self._tell(line) if line is not None and self._seen.get(line, 0) <= SHOWN_IN_A_MINUTE else []

    def _forget(self, line: str) -> list[str]:
        del self._seen[line]
        return self._tell(line)

    def _tell(self, line: str) -> list[str]:
        hidden, bare = self._hidden.pop(line, 0), _COLOURS.sub("", line)
        quoted = bare if len(bare) <= MOST_QUOTED else f"{bare[:MOST_QUOTED]}…"
        times = "1 more time" if hidden == 1 else f"{hidden:,} more times"
        said = f"syncline: {self._name} printed this line {times}, which its log has: {quoted or 'an empty line'}"
        return [said] if hidden else []
