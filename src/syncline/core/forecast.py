"""What the next round of a generation will be, by the one before: so that its sums can begin before it is whole.

Every server comes to the same forecast by itself, since all have the same rounds in the same order, and to the same
word on what of it has held. What was added up early counts where it has; the rest is added up again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from syncline.core.layout import Ranges

#: After so many forecasts in a row that did not hold there is none, until as many would have held.
PATIENCE = 3


class CommitShare(NamedTuple):
    """One commit of a round, as far as sums depend on it."""

    worker: str
    incarnation: int
    clock: int
    weight: float
    pushed: Ranges


@dataclasses.dataclass(frozen=True)
class ForecastOutcome:
    """What became of a round's forecast."""

    number: int  # of the round, in its generation
    was_forecast: bool = False
    held: bool = False
    changed: frozenset[int] = frozenset()  # slices that somebody has changed since they were staged early

    def is_anew(self, number: int) -> bool:
        """Whether this slice is added up again, whatever was made of it early."""
        return self.was_forecast and (not self.held or number in self.changed)


class Forecasts:
    """Of one generation."""

    def __init__(self) -> None:
        self.number = 0  #: of the round that is next
        self._last: tuple[CommitShare, ...] = ()
        self._is_early = False
        self._misses = 0

    @property
    def next(self) -> tuple[CommitShare, ...]:
        """The commits of the next round, in their order; none, where nothing is to be added up early."""
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
        """A round is whole. `changed`: by the word of its commits; `num_slices`: that any of them has pushed.
        `is_early`: all of them have staged slices early, so that it will help again."""
        found = tuple(shares)
        held = found == self._last and not skip and any(share.weight > 0 for share in found)
        outcome = ForecastOutcome(self.number, bool(self.next), held, frozenset(changed))
        if self._last:
            is_hit = held and 2 * len(outcome.changed) <= num_slices
            self._misses = max(self._misses - 1, 0) if is_hit else min(self._misses + 1, 2 * PATIENCE - 1)
        self._last = tuple(share._replace(clock=share.clock + 1) for share in found)
        self.number, self._is_early = self.number + 1, is_early
        return outcome
