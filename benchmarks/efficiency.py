"""How well a series of rows scales: samples/s at N workers over N times samples/s at one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.row import Outcome, Scale


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """One row of a series: of ours and of the reference."""

    scale: Scale
    ours_per_second: float  #: samples
    reference_per_second: float
    ours: float  #: 1: every worker is as fast as one alone
    reference: float


def efficiencies(outcomes: Sequence[Outcome]) -> dict[str, Efficiency]:
    """By row; none without the row of one worker, to which the others are held."""
    found: dict[str, tuple[Scale, float, float]] = {}
    for outcome in outcomes:
        scale = outcome.row.scale
        if scale is not None and outcome.has_figures:
            ours, reference = outcome.medians
            found[outcome.row.name] = (scale, scale.num_samples / ours, scale.num_samples / reference)
    alone = next((rates for scale, *rates in found.values() if scale.num_workers == 1), None)
    if alone is None:
        return {}
    return {
        name: Efficiency(
            scale,
            ours,
            reference,
            ours / (scale.num_workers * alone[0]),
            reference / (scale.num_workers * alone[1]),
        )
        for name, (scale, ours, reference) in found.items()
    }
