"""Readings: reports of workers, merged by their weights; who is waited for, and who is not."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.metrics import MOST_AHEAD, MOST_METRICS, Merging, MetricState, Reading, rounding_error, told

ALL = ["worker-0", "worker-1", "worker-2"]


def one(value: float, weight: float = 1.0, name: str = "loss") -> dict[str, tuple[float, float]]:
    return {name: (value, weight)}


def take(merging: Merging, worker: str, values: dict[str, tuple[float, float]], step: int = 1) -> dict[str, Reading]:
    """What one report makes whole, where all take part."""
    found = merging.take(worker, values, step, ALL)
    assert len(found) < 2
    return found[0] if found else {}


def test_a_reading_is_whole_when_all_have_reported_and_is_weighted_by_samples() -> None:
    merging = Merging(MetricState())
    assert take(merging, "worker-0", one(1.0, 10), 4) == {}
    assert take(merging, "worker-2", one(4.0, 20), 5) == {}
    assert take(merging, "worker-1", one(10.0, 10), 4) == {"loss": Reading(4.75, 5, 1, 40.0)}
    for worker in ALL[:2]:
        assert take(merging, worker, one(2.0), 6) == {}
    assert take(merging, "worker-2", one(2.0), 6) == {"loss": Reading(2.0, 6, 2, 3.0)}


def test_who_reports_alone_is_not_waited_for_by_others() -> None:
    """The chief alone reports accuracy: its first report waits for the others until it reports again."""
    merging = Merging(MetricState())
    assert take(merging, "worker-0", one(0.1, name="accuracy"), 1) == {}
    early, late = merging.take("worker-0", one(0.2, name="accuracy"), 2, ALL)
    assert early["accuracy"].value == 0.1 and late["accuracy"].value == 0.2
    assert take(merging, "worker-0", one(0.3, name="accuracy"), 3)["accuracy"].value == 0.3


def test_who_has_ceased_to_report_is_waited_for_only_so_long() -> None:
    merging = Merging(MetricState())
    for worker in ALL:
        take(merging, worker, one(1.0), 1)
    found = [take(merging, "worker-0", one(float(n)), n) for n in range(MOST_AHEAD)]
    assert found[:-1] == [{}] * (MOST_AHEAD - 1) and found[-1]["loss"].value == sum(range(MOST_AHEAD)) / MOST_AHEAD
    assert take(merging, "worker-0", one(7.0), 9)["loss"].value == 7.0
    assert take(merging, "worker-1", one(5.0), 9) == {}, "it reports again, and both are waited for"
    assert take(merging, "worker-0", one(7.0), 9)["loss"].value == 6.0


def test_who_leaves_is_not_waited_for_and_what_it_reported_counts() -> None:
    merging = Merging(MetricState())
    take(merging, "worker-0", one(1.0), 1)
    take(merging, "worker-2", one(3.0), 1)
    assert merging.gone(["worker-0", "worker-1"]) == {}
    assert merging.gone(["worker-0"])["loss"].value == 2.0
    assert merging.gone([]) == {}
    assert merging.take("worker-0", one(9.0), 2, ["worker-0"])[0]["loss"].value == 9.0


def test_what_is_not_finite_is_in_no_mean_and_holds_nobody_up() -> None:
    merging = Merging(MetricState())
    merging.take("worker-0", one(math.nan), 1, ALL[:2])
    assert merging.take("worker-1", one(3.0), 1, ALL[:2])[0]["loss"].value == 3.0
    merging.take("worker-0", one(math.inf), 2, ALL[:2])
    assert math.isnan(merging.take("worker-1", one(math.nan), 2, ALL[:2])[0]["loss"].value)


def test_a_report_that_comes_twice_counts_once() -> None:
    merging = Merging(MetricState())
    assert merging.is_new("worker-0", 1, 1) and not merging.is_new("worker-0", 1, 1)
    assert merging.is_new("worker-0", 1, 2) and not merging.is_new("worker-0", 1, 1)
    assert merging.is_new("worker-0", 2, 1), "the next life counts again"
    assert not merging.is_new("worker-0", 1, 3), "and the one before is over"


def test_hundreds_of_workers_are_not_compared_with_each_other() -> None:
    """Each report asks of a few others only whether they are missing: those who came last before."""
    merging, asked = Merging(MetricState()), 0

    class Counting(set[str]):
        def __contains__(self, name: object) -> bool:
            nonlocal asked
            asked += 1
            return super().__contains__(name)

    names = [f"worker-{k}" for k in range(200)]
    everybody = Counting(names)
    for turn in range(3):
        asked = 0
        found = [merging.take(name, one(1.0), turn, everybody) for name in names]
        assert [bool(each) for each in found] == [False] * 199 + [True]
    assert asked < 4 * 200


def test_there_is_a_most() -> None:
    merging = Merging(MetricState())
    for number in range(MOST_METRICS + 5):
        merging.take("worker-0", one(1.0, name=f"m{number}"), 1, ["worker-0"])
    assert len(merging.state.readings) == len(merging.state.reports) == MOST_METRICS


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(-1e6, 1e6), st.integers(1, 100)),
        max_size=40,
    )
)
def test_nothing_is_lost_between_readings(reports: list[tuple[int, float, int]]) -> None:
    """Whatever comes in whatever order: the weights of all readings, and of what waits, are those of all reports."""
    merging, weights, values = Merging(MetricState()), 0.0, 0.0
    for rank, value, weight in reports:
        for found in merging.take(ALL[rank], one(value, weight), 1, ALL):
            weights += found["loss"].weight
            values += found["loss"].weight * found["loss"].value
        # A state that is kept and read again is the same.
        merging = Merging(msgspec.msgpack.decode(msgspec.msgpack.encode(merging.state), type=MetricState))
    waiting = merging.state.reports["loss"].sums.values() if reports else []
    assert weights + sum(w for _, w, _ in waiting) == sum(weight for _, _, weight in reports)
    expected = sum(value * weight for _, value, weight in reports)
    assert math.isclose(values + sum(t for t, _, _ in waiting), expected, rel_tol=1e-9, abs_tol=1e-3)


def test_told() -> None:
    values = {"loss": 0.31416, "accuracy": 0.9}
    assert told(values) == "accuracy 0.9, loss 0.3142" and told(values, 1) == "accuracy 0.9 and 1 more"


def test_a_mean_is_as_exact_as_what_was_reported() -> None:
    """0.88 and 0.92 as float32 have a mean that is no float32 and is off by as much as they are."""
    merging = Merging(MetricState())
    low, high = np.float32(0.88), np.float32(0.92)
    errors = [{"loss": rounding_error(value, float(value))} for value in (low, high)]
    assert merging.take("worker-0", one(float(low), 30), 1, ALL[:2], errors[0]) == []
    (found,) = merging.take("worker-1", one(float(high), 10), 1, ALL[:2], errors[1])
    assert math.isclose(found["loss"].error, 2**-24 * (0.88 * 30 + 0.92 * 10) / 40, rel_tol=1e-6)
    for worker in ALL[:2]:
        again = merging.take(worker, one(0.3), 2, ALL[:2])
    assert again[0]["loss"].error == 0.0, "Python floats, and the sum began again"
    assert merging.whole({"loss": 0.5}, 3, {"loss": 0.25})["loss"].error == 0.25


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (np.float16(0.9), 11),
        (np.float32(0.9), 24),
        (np.float32(0.9).item(), 24),  # as a script reports `.item()`
        (np.array(0.9, np.float32), 24),
        (torch.tensor(0.9), 24),
        (torch.tensor(0.9, dtype=torch.bfloat16), 8),
        (torch.tensor(0.9, dtype=torch.float16), 11),
        (torch.tensor(0.9, dtype=torch.float64), None),
        (np.float64(0.9), None),
        (0.9, None),
        (1e300, None),
        (16777216.0, None),  # counts are exact
        (16777216, None),
        (torch.tensor(7), None),
    ],
)
def test_the_type_of_a_value_says_how_far_it_may_be_off(value: Any, bits: int | None) -> None:
    number = float(value)
    assert rounding_error(value, number) == (abs(number) * 2.0**-bits if bits is not None else 0.0)
