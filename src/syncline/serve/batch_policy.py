"""When waiting requests become a batch. Pure: `now` is an argument."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class BatchPolicy:
    """An idle server takes what is there at once. A busy one may wait for as many rows as came lately, at most
    `max_delay` seconds from the arrival of the oldest.

    Clients that were just answered are likely to ask again: after a batch, as many rows are expected as were answered
    and waiting then. If they do not come in time, fewer are expected next.
    """

    max_rows: int
    max_delay: float
    _expected: int = 1

    def wait_seconds(self, num_rows: int, oldest: float, now: float) -> float:
        """How long to wait for more than these rows; 0: take them now."""
        if num_rows >= min(self._expected, self.max_rows):
            return 0.0
        return max(0.0, oldest + self.max_delay - now)

    def taken(self, num_rows: int) -> None:
        """A batch of so many rows begins."""
        self._expected = min(self._expected, num_rows)

    def finished(self, num_rows: int, num_waiting: int) -> None:
        """A batch of so many rows was answered while these were waiting. None waiting: nothing is expected."""
        self._expected = num_rows + num_waiting if num_waiting else 1

    def idle(self) -> None:
        """Nothing came for a while."""
        self._expected = 1
