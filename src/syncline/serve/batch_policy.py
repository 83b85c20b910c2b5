"""When waiting requests become a batch. Pure: times are arguments."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class BatchPolicy:
    """An idle server takes what is there at once. A busy one may wait for as many rows as came lately.

    Clients that were just answered are likely to ask again: after a batch, as many rows are expected as were answered
    and waiting then. From the end of that batch, or the arrival of the oldest request, they are waited for up to
    `max_delay` seconds, and no longer than that batch took: a short call is not worth a long wait. If they do not
    come in time, fewer are expected next. If nothing at all comes in that time, the server is idle.
    """

    max_rows: int
    max_delay: float
    _expected: int = 1
    _ended: float = 0.0  # the last batch
    _patience: float = 0.0  # seconds

    @property
    def wanted_rows(self) -> int:
        """With so many rows nothing is waited for."""
        return min(self._expected, self.max_rows)

    def wait_seconds(self, num_rows: int, oldest: float, now: float) -> float:
        """How long to wait for more than these rows; 0: take them now."""
        if num_rows >= self.wanted_rows or oldest > self._ended + self._patience:
            return 0.0
        return max(0.0, max(oldest, self._ended) + self._patience - now)

    def taken(self, num_rows: int) -> None:
        """A batch of so many rows begins."""
        self._expected = min(self._expected, num_rows)

    def finished(self, num_rows: int, num_waiting: int, seconds: float, now: float) -> None:
        """A batch of so many rows took so long, and is answered while these are waiting."""
        self._expected = num_rows + num_waiting
        self._ended, self._patience = now, min(self.max_delay, seconds)
