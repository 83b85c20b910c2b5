"""Forecasts the next round from the previous one, so that its sums can begin before it is complete.

Every server makes the same forecast, since all have the same rounds in the same order, and comes to the same outcome.
Early sums count where the forecast held; the rest is summed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from syncline.core.layout import Ranges

#: After this many wrong forecasts in a row there are none, until as many would have been right.
PATIENCE = 3


class CommitShare(NamedTuple):
    """The part of a commit that sums depend on."""

    worker: str
    incarnation: int
    clock: int
    weight: float
    pushed: Ranges


@dataclasses.dataclass(frozen=True)
class ForecastOutcome:
    """The outcome of a round's forecast."""

    number: int  # of the round in its generation
    was_forecast: bool = False
    held: bool = False
    changed: frozenset[int] = frozenset()  # slices that a worker has changed since they were staged early

    def is_anew(self, number: int) -> bool:
        """Whether this slice must be summed again."""
        return self.was_forecast and (not self.held or number in self.changed)


class Forecasts:
    """Of one generation."""

    def __init__(self) -> None:
        self.number = 0  #: of the next round
        self._last: tuple[CommitShare, ...] = ()
        self._is_early = False
        self._misses = 0

    @property
    def next(self) -> tuple[CommitShare, ...]:
        """The expected commits of the next round, in order; empty if nothing should be summed early."""
        return self._last if self._is_early and self._misses < PATIENCE else ()

    def settle(
        self,
        shares: Sequence[CommitShare],
        changed: Collection[int],
        num_slices: int,
        *,
        is_early: bool = True,
        skip: bool = False,
    ) -> ForecastOutcome:
        """A round is complete. `changed`: as its commits say; `num_slices`: pushed by any of them. `is_early`: all
        of them staged slices early, so that a forecast pays off again.
        """
        found = tuple(shares)
        held = found == self._last and not skip and any(share.weight > 0 for share in found)
        outcome = ForecastOutcome(self.number, bool(self.next), held, frozenset(changed))
        if self._last:
            is_hit = held and 2 * len(outcome.changed) <= num_slices
            self._misses = max(self._misses - 1, 0) if is_hit else min(self._misses + 1, 2 * PATIENCE - 1)
        self._last = tuple(share._replace(clock=share.clock + 1) for share in found)
        self.number, self._is_early = self.number + 1, is_early
        return outcome
