"""A clock for deadlines between processes: it stands still while its host is suspended, so no peer misses one."""

from __future__ import annotations

import time

#: More than this between two looks is time in which this process did not run.
STEP_SECONDS = 1.0


class AwakeClock:
    """Counts the seconds in which this process has run, as long as it is looked at several times a second."""

    def __init__(self) -> None:
        self._seconds, self._before = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Since it was made."""
        now = time.monotonic()
        self._seconds, self._before = self._seconds + min(STEP_SECONDS, now - self._before), now
        return self._seconds
