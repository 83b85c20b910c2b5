"""Parts of a global batch by speed: whole samples, all of them, and no cut whose slowest part is through sooner."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from syncline.core.leasing.shares import widths, worth_a_change

SPEEDS = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=4)


def longest(parts: dict[str, int], speeds: dict[str, float]) -> float:
    return max(parts[name] / speeds[name] for name in parts)


@given(SPEEDS, st.integers(0, 14))
def test_no_other_cut_is_through_sooner(given: list[float], total: int) -> None:
    speeds = {f"worker-{k}": speed for k, speed in enumerate(given)}
    found, least = widths(total, speeds), int(total >= len(speeds))
    assert sum(found.values()) == total and min(found.values()) >= least
    every = itertools.product(range(least, total + 1), repeat=len(speeds))
    others = [dict(zip(speeds, parts, strict=True)) for parts in every if sum(parts) == total]
    assert longest(found, speeds) <= min(longest(parts, speeds) for parts in others) * (1 + 1e-9)


def test_a_slow_worker_gets_no_sample_too_many() -> None:
    """One more than its due would take it a third longer, and everybody with it."""
    speeds = {"worker-0": 4.0, "worker-1": 4.0, "worker-2": 4.0, "worker-3": 1.0}
    assert widths(40, speeds) == {"worker-0": 13, "worker-1": 12, "worker-2": 12, "worker-3": 3}
    too_many = {"worker-0": 12, "worker-1": 12, "worker-2": 12, "worker-3": 4}
    assert worth_a_change(too_many, widths(40, speeds), speeds)
    assert not worth_a_change(widths(40, speeds), too_many, speeds)


def test_a_speed_that_nobody_knows_counts_as_the_mean() -> None:
    assert widths(30, {"worker-0": 0.0, "worker-1": 2.0, "worker-2": 4.0}) == {
        "worker-0": 10, "worker-1": 7, "worker-2": 13,
    }  # fmt: skip
    assert widths(4, {"worker-0": 0.0, "worker-1": 0.0}) == {"worker-0": 2, "worker-1": 2}


def test_a_small_gain_is_not_worth_a_change_and_other_members_are() -> None:
    speeds = {"worker-0": 1.0, "worker-1": 1.05}
    assert not worth_a_change({"worker-0": 50, "worker-1": 50}, widths(100, speeds), speeds)
    assert worth_a_change({"worker-0": 50}, widths(100, speeds), speeds)
