"""Metrics: what workers report, merged into readings of the whole job, weighted by samples.

Pure. A reading of a metric is whole when everybody who reports it has done so since the last one. The first one waits
for all who take part, until one of them reports a second time: who has never reported it by then is not waited for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping

import msgspec

from syncline.core.members import by_name
from syncline.core.wire.message import Message

#: Names that a job may report under.
MOST_METRICS = 1000
#: So often somebody reports a metric without one of the others, and that one is not waited for until it does.
MOST_AHEAD = 4
#: Bits of the significand, by the name of a type. Others are taken as Python's floats.
_SIGNIFICAND_BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}


class Metrics(Message, frozen=True):
    """A worker's report: of each metric the value and its weight. Answered with `Steer`.

    `number`: its reports so far in this life; one that comes twice counts once. `is_whole`: each value is one of
    the whole job by itself. `step`: the job's, as this worker knows it; it may be the last that there is to be.
    `errors`: how far values may be off because of their types; see `rounding_error`.
    """

    number: int
    values: dict[str, tuple[float, float]]
    step: int = 0
    is_whole: bool = False
    errors: dict[str, float] = msgspec.field(default_factory=dict)


class Steer(Message, frozen=True):
    """To workers: what the job's rules want of them by now. The highest number counts.

    `stop`: why training ends; empty: it goes on. `factor`: on every learning rate.
    """

    number: int = 0
    stop: str = ""
    factor: float = 1.0


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """A metric of the whole job."""

    value: float
    step: int = 0
    number: int = 1  # its readings so far
    weight: float = 0.0
    error: float = 0.0  # how far the value may be off because of the types of the reported numbers


class Reports(msgspec.Struct):
    """A metric between two readings."""

    sums: dict[str, tuple[float, float, int]] = {}  # worker: sum of weight times value, of weights, how many reports
    reporters: list[str] | None = None  # whom a reading waits for; None: nobody knows yet, all who take part
    step: int = 0
    errors: float = 0.0  # sum of weight times rounding error, of all workers


class MetricState(msgspec.Struct):
    """All metrics of a job; what of it a coordinator remembers through its own death."""

    readings: dict[str, Reading] = {}  # the newest of each
    reports: dict[str, Reports] = {}
    numbers: dict[str, tuple[int, int]] = {}  # worker: incarnation and its last report
    num_readings: int = 0


class Merging:
    """Merges reports into readings; what it knows is in the state."""

    def __init__(self, state: MetricState) -> None:
        self.state = state

    def is_new(self, worker: str, incarnation: int, number: int) -> bool:
        """Whether this report was not here before; it is by now."""
        if (incarnation, number) <= self.state.numbers.get(worker, (0, 0)):
            return False
        self.state.numbers[worker] = (incarnation, number)
        return True

    def take(
        self,
        worker: str,
        values: Mapping[str, tuple[float, float]],
        step: int,
        taking_part: Collection[str],
        errors: Mapping[str, float] = {},
    ) -> list[dict[str, Reading]]:
        """A worker's report; the readings that are whole by it, in the order in which they are."""
        early: dict[str, Reading] = {}
        found: dict[str, Reading] = {}
        for name, (value, weight) in values.items():
            if name not in self.state.reports and len(self.state.reports) >= MOST_METRICS:
                continue
            reports = self.state.reports.setdefault(name, Reports())
            if reports.reporters is None and worker in reports.sums:
                early.update(self._read(name, reports))  # some never report it
            total, weights, count = reports.sums.get(worker, (0.0, 0.0, 0))
            counts = math.isfinite(value) and weight > 0
            reports.sums[worker] = (total + weight * value, weights + weight, count + 1) if counts else (
                total, weights, count + 1,
            )  # fmt: skip
            reports.errors += weight * errors.get(name, 0.0) if counts else 0.0
            reports.step = max(reports.step, step)
            if reports.reporters is not None and worker not in reports.reporters:
                reports.reporters.append(worker)
            found.update(self._read_if_whole(name, reports, taking_part))
        return [each for each in (early, found) if each]

    def whole(self, values: Mapping[str, float], step: int, errors: Mapping[str, float] = {}) -> dict[str, Reading]:
        """Readings that somebody has merged already."""
        found = {}
        for name, value in values.items():
            known = self.state.readings.get(name)
            if known is None and len(self.state.readings) >= MOST_METRICS:
                continue
            number = known.number + 1 if known is not None else 1
            found[name] = self._keep(name, Reading(value, step, number, error=errors.get(name, 0.0)))
        return found

    def gone(self, taking_part: Collection[str]) -> dict[str, Reading]:
        """Somebody takes part no more: what is whole without it. What it has reported counts."""
        found: dict[str, Reading] = {}
        for name, reports in self.state.reports.items():
            if reports.reporters is not None:
                reports.reporters = [worker for worker in reports.reporters if worker in taking_part]
            found.update(self._read_if_whole(name, reports, taking_part))
        return found

    def _read_if_whole(self, name: str, reports: Reports, taking_part: Collection[str]) -> dict[str, Reading]:
        waited = [w for w in (taking_part if reports.reporters is None else reports.reporters) if w in taking_part]
        missing = [worker for worker in waited if worker not in reports.sums]
        most = max((count for _, _, count in reports.sums.values()), default=0)
        if not reports.sums or (missing and most < MOST_AHEAD):
            return {}
        return self._read(name, reports)

    def _read(self, name: str, reports: Reports) -> dict[str, Reading]:
        ranked = [reports.sums[worker] for worker in sorted(reports.sums, key=by_name)]  # equal runs are bit-equal
        weights = sum(weight for _, weight, _ in ranked)
        value = sum(total for total, _, _ in ranked) / weights if weights else math.nan
        known = self.state.readings.get(name)
        number = known.number + 1 if known is not None else 1
        reports.reporters = list(reports.sums)
        error = reports.errors / weights if weights else 0.0
        reports.sums, reports.errors = {}, 0.0
        return {name: self._keep(name, Reading(value, reports.step, number, weights, error))}

    def _keep(self, name: str, reading: Reading) -> Reading:
        self.state.readings[name] = reading
        self.state.num_readings += 1
        return reading


def rounding_error(value: object, number: float) -> float:
    """How far `number`, the Python float of a reported `value`, may be off because of the value's type.

    45/50 as float32 is 0.89999998. A Python float that is exactly a float32, as `.item()` of a tensor gives it, is
    taken as one: a rule that this misleads has a number that agrees with the value in its first seven digits.
    """
    dtype = getattr(value, "dtype", None)
    bits = _SIGNIFICAND_BITS.get(str(getattr(dtype, "name", dtype)).rpartition(".")[2])
    if bits is None and isinstance(value, float) and not number.is_integer() and _is_float32(number):
        bits = _SIGNIFICAND_BITS["float32"]
    return abs(number) * 2.0**-bits if bits is not None and math.isfinite(number) else 0.0


def _is_float32(number: float) -> bool:
    try:
        return bool(struct.unpack("<f", struct.pack("<f", number))[0] == number)
    except OverflowError:
        return False


def told(values: Mapping[str, float], most: int = 8) -> str:
    """accuracy 0.912, loss 0.31; of many only some."""
    shown = ", ".join(f"{name} {values[name]:.4g}" for name in sorted(values)[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
