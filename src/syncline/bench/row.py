"""What a row is, how hard to measure, and what came out."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from syncline.errors import ConfigError

#: A median of fewer says little.
LEAST_PAIRS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard to measure: a figure is the median over pairs of turns, ours and the reference's."""

    num_pairs: int = 9  #: turns of each side
    turn_seconds: float = 0.3  #: about how long a turn lasts
    row_seconds: float = 60.0  #: after this, a row makes do with the pairs that it has, if they are enough

    def __post_init__(self) -> None:
        if self.num_pairs < LEAST_PAIRS:
            raise ConfigError(f"num_pairs = {self.num_pairs}: a median needs at least {LEAST_PAIRS}")


QUICK = Effort(num_pairs=LEAST_PAIRS, turn_seconds=0.1, row_seconds=30.0)


@dataclasses.dataclass(frozen=True)
class Reach:
    """What a row is to come to. `at most`: our time over the reference's; `at least`: our speed over its speed."""

    kind: Literal["at most", "at least"]
    ratio: float

    def ratio_of(self, ours: float, reference: float) -> float:
        return ours / reference if self.kind == "at most" else reference / ours

    def is_met_by(self, ratio: float) -> bool:
        return ratio <= self.ratio if self.kind == "at most" else ratio >= self.ratio

    def __str__(self) -> str:
        return f"{'≤' if self.kind == 'at most' else '≥'} {self.ratio:g}×"


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds per operation, turn by turn. Figures at the same place were taken right after each other."""

    ours: Sequence[float]
    reference: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of ours beside its reference."""

    name: str
    what: str
    reference: str
    reach: Reach
    measure: Callable[[Effort], Samples]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row as measured, or the reason why it was not."""

    row: Row
    samples: Samples = Samples((), ())
    error: str = ""
    others_share: float | None = None  #: of all cores, that went to other programs meanwhile

    @property
    def ratios(self) -> list[float]:
        """One per pair of turns: what slows down the machine for a while slows down both sides of a pair."""
        pairs = zip(self.samples.ours, self.samples.reference, strict=True)
        return [self.row.reach.ratio_of(ours, reference) for ours, reference in pairs]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_reached(self) -> bool:
        return not self.error and self.row.reach.is_met_by(self.ratio)
