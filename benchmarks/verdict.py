"""Whether one version is slower than another, by the quartiles of new/old over pairs of turns."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.row import Unit
from syncline.errors import ConfigError

#: A row fails where the lower quartile of new/old is above this: three of four pairs show the slowdown.
LIMIT = 1.10


@dataclasses.dataclass(frozen=True)
class Quartiles:
    lower: float
    median: float
    upper: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One figure of a row, compared between two versions."""

    row: str
    unit: Unit
    new: float  #: the medians
    old: float
    ratio: Quartiles  #: new/old
    num_pairs: int

    @property
    def is_slower(self) -> bool:
        return self.ratio.lower > LIMIT


def quartiles(values: Sequence[float]) -> Quartiles:
    """By linear interpolation between the values, of which the lowest and the highest are the ends."""
    if len(values) < 2:
        raise ConfigError(f"quartiles need two values at least, not {len(values)}")
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def compare(row: str, unit: Unit, new: Sequence[float], old: Sequence[float]) -> Verdict:
    """Figures at the same place were taken right after each other: what slowed down both cancels out."""
    ratios = [one / other for one, other in zip(new, old, strict=True)]
    return Verdict(row, unit, statistics.median(new), statistics.median(old), quartiles(ratios), len(ratios))
