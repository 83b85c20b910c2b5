"""Readings that are kept: how a series is thinned as it ages, so that a long run takes bounded space.

Pure. A *row* has the values of several columns at one moment. Rows of the last minutes are kept each; older ones are
merged: ten seconds to a row, then a minute, then ten. A *curve* is one metric over the steps of a job: points are
merged in pairs when there are too many, and each keeps the least and the most of what it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec


class Tier(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one length."""

    seconds: float  # of a row
    kept_seconds: float  # older rows are merged into the next tier


class Thinning(msgspec.Struct, frozen=True, kw_only=True):
    """How the rows of one kind are thinned. Rows of the last tier are merged in pairs when there are too many."""

    tiers: tuple[Tier, ...]
    most_rows: int


#: Of the job as a whole: 5,200 rows for a week.
JOB = Thinning(
    tiers=(Tier(1.0, 600.0), Tier(10.0, 7_200.0), Tier(60.0, 172_800.0), Tier(600.0, math.inf)), most_rows=2_000
)
#: Of each member: 1,300 rows for a week. The rows of 200 members take about 25 MB.
MEMBER = Thinning(
    tiers=(Tier(1.0, 120.0), Tier(10.0, 1_800.0), Tier(60.0, 21_600.0), Tier(900.0, math.inf)), most_rows=1_000
)
#: Points of one curve; more are merged in pairs.
MOST_POINTS = 4_000
#: Points of all curves together: with many metrics each has fewer.
MOST_POINTS_IN_ALL = 300_000
LEAST_POINTS = 200

Row = Mapping[str, float]


def slot_of(at: float, seconds: float) -> float:
    """The beginning of the row of this length that has this moment."""
    return math.floor(at / seconds) * seconds


def merged(rows: Iterable[Row]) -> dict[str, float]:
    """One row in the place of several: the mean of each column, over the rows that have it."""
    sums: dict[str, tuple[float, int]] = {}
    for row in rows:
        for name, value in row.items():
            if math.isfinite(value):
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + value, count + 1)
    return {name: total / count for name, (total, count) in sums.items()}


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A metric at a step; merged points have a mean, and the least and the most."""

    step: float
    at: float  # wall clock
    value: float
    low: float
    high: float
    count: int = 1


def point(step: int, at: float, value: float) -> Point:
    return Point(float(step), at, value, value, value)


def merge_points(points: Sequence[Point]) -> Point:
    """One point for several. Values that are not finite count only where there is nothing else."""
    finite = [one for one in points if math.isfinite(one.value)] or list(points)
    count = sum(one.count for one in finite)
    return Point(
        step=points[-1].step,
        at=points[-1].at,
        value=sum(one.value * one.count for one in finite) / count,
        low=min(one.low for one in finite),
        high=max(one.high for one in finite),
        count=sum(one.count for one in points),
    )


class Curve:
    """Keeps the points of one metric. While `stride` is more than 1, that many readings become one point."""

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self._open: list[Point] = []

    def add(self, new: Point) -> Point | None:
        """The point to keep now, if one is complete."""
        self._open.append(new)
        if len(self._open) < self.stride:
            return None
        return self.flush()

    def flush(self) -> Point | None:
        """What is not kept yet, as a point."""
        if not self._open:
            return None
        made, self._open = merge_points(self._open), []
        return made

    def halve(self, points: Sequence[Point]) -> list[Point]:
        """Half as many points, oldest first; from now on twice as many readings become one."""
        self.stride *= 2
        return [merge_points(points[k : k + 2]) for k in range(0, len(points), 2)]


def most_points(num_curves: int) -> int:
    """Points that each of so many curves may have."""
    return max(LEAST_POINTS, min(MOST_POINTS, MOST_POINTS_IN_ALL // max(1, num_curves)))
