"""Metrics: merges workers' reports into readings of the job, weighted by samples.

Pure. A reading is complete when all reporters of the metric have reported since the last one. The first reading waits
for all participants, until one of them reports a second time: workers without a report by then are not waited for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Set

import msgspec

from syncline.core.members import by_name
from syncline.core.wire.message import Message

#: Limit for the number of metric names.
MOST_METRICS = 1000
#: After this many reports of others without one of its own, a worker is not waited for until it reports again.
MOST_AHEAD = 4
#: Significand bits by type; other types count as Python floats.
_SIGNIFICAND_BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}


class Metrics(Message, frozen=True):
    """A worker's report: value and weight of each metric. Answered with `Steer`.

    `number`: its reports so far in this life; duplicates count once. `is_whole`: each value is a reading of the whole
    job. `step`: the job's, as this worker knows it. `errors`: rounding errors of the values; see `rounding_error`.
    """

    number: int
    values: dict[str, tuple[float, float]]
    step: int = 0
    is_whole: bool = False
    errors: dict[str, float] = msgspec.field(default_factory=dict)


class Steer(Message, frozen=True):
    """To workers: what the job's rules demand. The highest number counts.

    `stop`: why training ends; empty: it goes on. `factor`: on every learning rate.
    """

    number: int = 0
    stop: str = ""
    factor: float = 1.0


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """A metric of the whole job."""

    value: float
    step: int = 0
    number: int = 1  # readings so far
    weight: float = 0.0
    error: float = 0.0  # rounding error due to the types of the reported numbers


class Reports(msgspec.Struct):
    """A metric between two readings."""

    # worker -> sum of weight times value, of weights, number of reports
    sums: dict[str, tuple[float, float, int]] = {}
    reporters: list[str] | None = None  # whom a reading waits for; None: unknown yet, all participants
    step: int = 0
    errors: float = 0.0  # sum of weight times rounding error, over all workers


class MetricState(msgspec.Struct):
    """All metrics of a job; survives the coordinator."""

    readings: dict[str, Reading] = {}  # the newest of each
    reports: dict[str, Reports] = {}
    numbers: dict[str, tuple[int, int]] = {}  # worker -> incarnation and its last report
    num_readings: int = 0


class Merging:
    """Merges reports into readings; all its knowledge is in the state."""

    def __init__(self, state: MetricState) -> None:
        self.state = state
        self.left_out = ""  #: the first metric for which there was no room

    def is_new(self, worker: str, incarnation: int, number: int) -> bool:
        """Whether this report is new; marks it as known."""
        if (incarnation, number) <= self.state.numbers.get(worker, (0, 0)):
            return False
        self.state.numbers[worker] = (incarnation, number)
        return True

    def take(
        self,
        worker: str,
        values: Mapping[str, tuple[float, float]],
        step: int,
        participants: Set[str],
        errors: Mapping[str, float] = {},
    ) -> list[dict[str, Reading]]:
        """Takes a worker's report. Returns the readings completed by it, in order."""
        early: dict[str, Reading] = {}
        found: dict[str, Reading] = {}
        for name, (value, weight) in values.items():
            if name not in self.state.reports and len(self.state.reports) >= MOST_METRICS:
                self.left_out = self.left_out or name
                continue
            reports = self.state.reports.setdefault(name, Reports())
            if reports.reporters is None and worker in reports.sums:
                early.update(self._read(name, reports))  # some workers never report it
            total, weights, count = reports.sums.get(worker, (0.0, 0.0, 0))
            counts = math.isfinite(value) and weight > 0
            reports.sums[worker] = (total + weight * value, weights + weight, count + 1) if counts else (
                total, weights, count + 1,
            )  # fmt: skip
            reports.errors += weight * errors.get(name, 0.0) if counts else 0.0
            reports.step = max(reports.step, step)
            if reports.reporters is not None and worker not in reports.reporters:
                reports.reporters.append(worker)
            found.update(self._read_if_whole(name, reports, participants, count + 1))
        return [each for each in (early, found) if each]

    def whole(self, values: Mapping[str, float], step: int, errors: Mapping[str, float] = {}) -> dict[str, Reading]:
        """Takes readings that are already merged."""
        found = {}
        for name, value in values.items():
            known = self.state.readings.get(name)
            if known is None and len(self.state.readings) >= MOST_METRICS:
                self.left_out = self.left_out or name
                continue
            number = known.number + 1 if known is not None else 1
            found[name] = self._keep(name, Reading(value, step, number, error=errors.get(name, 0.0)))
        return found

    def gone(self, participants: Set[str]) -> dict[str, Reading]:
        """A worker takes part no more: returns the readings that are complete without it. Its reports count."""
        found: dict[str, Reading] = {}
        for name, reports in self.state.reports.items():
            if reports.reporters is not None:
                reports.reporters = [worker for worker in reports.reporters if worker in participants]
            most = max((count for _, _, count in reports.sums.values()), default=0)
            found.update(self._read_if_whole(name, reports, participants, most))
        return found

    def _read_if_whole(self, name: str, reports: Reports, participants: Set[str], most: int) -> dict[str, Reading]:
        """`most`: reports of one worker; for the others this was looked at when they came."""
        if not reports.sums:
            return {}
        # Those who were last before are the most likely to be missing: with hundreds of workers the order counts.
        waited = participants if reports.reporters is None else reversed(reports.reporters)
        if most < MOST_AHEAD and any(worker not in reports.sums and worker in participants for worker in waited):
            return {}
        return self._read(name, reports)

    def _read(self, name: str, reports: Reports) -> dict[str, Reading]:
        # sorted: equal runs are bit-equal
        ranked = [reports.sums[worker] for worker in sorted(reports.sums, key=by_name)]
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
    """The rounding error of `number`, the Python float of a reported `value`, due to the value's type.

    45/50 as float32 is 0.89999998. A Python float that is exactly a float32, as `.item()` gives it, counts as one:
    that only misleads rules whose number agrees with the value in seven digits.
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
    """accuracy 0.912, loss 0.31; only some if there are many."""
    shown = ", ".join(f"{name} {values[name]:.4g}" for name in sorted(values)[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")


def weighted_means(reports: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The mean of each value, given with a weight. What is not finite, or has no weight, does not count."""
    sums: dict[str, tuple[float, float]] = {}
    for report in reports:
        for name, (value, weight) in report.items():
            if math.isfinite(value) and weight > 0:
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + weight * value, weights + weight)
    return {name: total / weights for name, (total, weights) in sums.items()}
