"""The hierarchical reducer through its seam alone: no server, and in a process that cannot import torch."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.reduce.participants import Group

from syncline.reduce.hierarchical import HierarchicalReducer
from syncline.reduce.rounds import Round, SliceSum
from syncline.reduce.slices import Contribution


def reduce_rounds(on: str, num_rounds: int, weights: Sequence[float]) -> None:
    """All servers get the mean of every round, bit by bit the same."""
    with Group(on) as group:
        reducers = group.begin(1)
        for clock in range(1, num_rounds + 1):
            found = play(reducers, [group.round_of(clock, weights) for _ in reducers])
            for number, mean in group.mean(clock, weights).items():
                np.testing.assert_allclose(found[0][number], mean, rtol=1e-6)
                assert all(np.array_equal(each[number], found[0][number]) for each in found)


def play(reducers: Sequence[HierarchicalReducer], rounds: Sequence[Round]) -> list[dict[int, Any]]:
    """Reduces one round, and returns what each server got by slice. `rounds`: the same one, for each server."""
    found: list[dict[int, Any]] = [{} for _ in reducers]
    done, given = threading.Semaphore(0), []

    def summed(rank: int, sums: Sequence[SliceSum]) -> None:
        found[rank] = {each.number: numbers.copy().view(each.part.dtype) for each, numbers in sums}
        done.release()

    for rank, (reducer, each) in enumerate(zip(reducers, rounds, strict=True)):
        given.append(dataclasses.replace(each, summed=functools.partial(summed, rank)))
        reducer.reduce(given[-1])
    assert all(done.acquire(timeout=PATIENCE) for _ in reducers)
    for reducer, each in zip(reducers, given, strict=True):
        assert not active_of(reducer).is_again
        reducer.release(each)
    return found


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (0.5, 2.0, 0.0, 3.0)], ids=["equal", "weighted"])
@pytest.mark.parametrize("on", ["aaaa", "aabb", "abbb", "abcd"])
def test_every_server_gets_the_mean_of_every_slice(on: str, weights: tuple[float, ...]) -> None:
    reduce_rounds(on, 3, weights)


def test_sums_begin_with_what_is_staged_early() -> None:
    """After two rounds that are alike and staged early, a slice is added up before its round is complete."""
    weights = (1.0, 1.0)
    with Group("aa") as group:
        reducers, numbers = group.begin(1), {part.id for part in group.segment.slices}
        for clock in (1, 2, 3):
            complete = dataclasses.replace(group.round_of(clock, weights), is_early=True)
            if clock == 3:
                for each in complete.contributions:
                    for reducer in reducers:
                        reducer.stage_early(each.life, clock, each.numbers, numbers)
                assert all(active_of(reducer).begun and not active_of(reducer).round for reducer in reducers)
            found = play(reducers, [complete] * 2)
            for number, mean in group.mean(clock, weights).items():
                np.testing.assert_allclose(found[0][number], mean, rtol=1e-6)


def active_of(reducer: Any) -> Any:
    assert reducer.host_round.active is not None
    return reducer.host_round.active


def test_contributions_are_equal_if_sums_depend_on_them_in_the_same_way() -> None:
    one, two = (Contribution("worker-0", 1, 2, 1.0, ((0, 1),), lambda part, k=k: k) for k in range(2))  # type: ignore[misc]
    assert one == two and one != Contribution("worker-0", 1, 2, 2.0, ((0, 1),))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from tests.reduce.test_hierarchical import reduce_rounds
reduce_rounds("aabb", 2, (0.5, 2.0, 1.0, 3.0))
"""


def test_it_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
