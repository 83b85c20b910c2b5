"""What a row is, how hard to measure, and what came out."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from syncline.errors import ConfigError, SynclineError

#: A median of fewer says little.
LEAST_PAIRS = 5

#: What a figure counts.
Unit = Literal["seconds", "bytes", "processor"]


class NotMeasured(SynclineError):
    """Why a row cannot be measured on this machine, e.g. `needs a GPU`: that is no failure."""


def check_gpu() -> None:
    """Loads torch, which alone knows whether it can use a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise NotMeasured("needs a GPU")


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
    """What a row is to come to.

    `at most`: our figure over the reference's; `at least`: our speed over its speed; `printed`: nothing to come to.
    """

    kind: Literal["at most", "at least", "printed"]
    ratio: float = 0.0
    plus_seconds: float = 0.0  #: of ours that are free, whatever the reference takes (`at most` only)

    def ratio_of(self, ours: float, reference: float) -> float:
        return reference / ours if self.kind == "at least" else ours / reference

    def is_met_by(self, pairs: Sequence[tuple[float, float]]) -> bool | None:
        """By the median over pairs of figures; None where there is nothing to come to."""
        if self.kind == "printed":
            return None
        ratio = statistics.median(self.ratio_of(ours - self.plus_seconds, reference) for ours, reference in pairs)
        return ratio <= self.ratio if self.kind == "at most" else ratio >= self.ratio

    def __str__(self) -> str:
        if self.kind == "printed":
            return "printed"
        plus = f" + {self.plus_seconds:g} s" if self.plus_seconds else ""
        return f"{'≤' if self.kind == 'at most' else '≥'} {self.ratio:g}×{plus}"


@dataclasses.dataclass(frozen=True)
class Samples:
    """Figures, turn by turn: seconds per operation, or bytes. Those at the same place were taken together."""

    ours: Sequence[float]
    reference: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Scale:
    """The place of a row in a series that differs in the number of workers only."""

    num_workers: int
    num_samples: int  #: of training data, in one step of all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of ours beside its reference. `measure` raises NotMeasured where it cannot."""

    name: str
    what: str
    reference: str
    reach: Reach
    measure: Callable[[Effort], Samples]
    unit: Unit = "seconds"
    num_cores: int = 0  #: on fewer it says nothing, and is measured only when it is named
    scale: Scale | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row as measured, or the reason why it was not."""

    row: Row
    samples: Samples = Samples((), ())
    error: str = ""  #: it was tried and failed
    not_measured: str = ""  #: it cannot be measured here
    others_share: float | None = None  #: of all cores, that went to other programs meanwhile

    @property
    def has_figures(self) -> bool:
        return not self.error and not self.not_measured

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """What slows down the machine for a while slows down both sides of a pair."""
        return list(zip(self.samples.ours, self.samples.reference, strict=True))

    @property
    def medians(self) -> tuple[float, float]:
        """The figure of ours and of the reference, each for itself."""
        return statistics.median(self.samples.ours), statistics.median(self.samples.reference)

    @property
    def ratios(self) -> list[float]:
        """One per pair of turns."""
        return [self.row.reach.ratio_of(ours, reference) for ours, reference in self.pairs]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_reached(self) -> bool | None:
        """None where it was not measured, or has nothing to come to."""
        return self.row.reach.is_met_by(self.pairs) if self.has_figures else None
