"""A step played through: against a second simulation, against known formulas, and its laws."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.pipelining.played import played

from syncline.core.pipelining.schedules import SCHEDULES, Shape, why_not
from syncline.core.pipelining.simulation import StageTimes, simulate, step_seconds

SECONDS = st.floats(0.0, 10.0, allow_nan=False)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Shape, list[list[float]]]:
    name = draw(st.sampled_from(SCHEDULES))
    workers, total = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    own = draw(st.integers(2, 3)) if name == "interleaved" else 1
    shape = Shape(schedule=name, num_workers=workers, num_micro_batches=total, stages_per_worker=own)
    if why_not(shape):
        shape = dataclasses.replace(shape, num_micro_batches=2 * workers)
    stages = shape.num_stages

    def some(number: int) -> list[float]:
        return draw(st.lists(SECONDS, min_size=number, max_size=number))

    return shape, [some(stages), some(stages), some(stages - 1), some(stages - 1)]


@given(pipelines())
def test_as_in_the_second_simulation(pipeline: tuple[Shape, list[list[float]]]) -> None:
    shape, times = pipeline
    assert simulate(shape, StageTimes.of_one(*times)).step_seconds == pytest.approx(played(shape, *times), rel=1e-12)


@given(pipelines(), st.integers(0, 3), st.integers(0, 11), SECONDS)
def test_what_takes_longer_never_makes_a_step_shorter(
    pipeline: tuple[Shape, list[list[float]]], which: int, index: int, more: float
) -> None:
    """The search relies on it: a bound that counts something as 0 is one."""
    shape, times = pipeline
    before = simulate(shape, StageTimes.of_one(*times)).step_seconds
    if times[which]:
        times[which][index % len(times[which])] += more
    assert simulate(shape, StageTimes.of_one(*times)).step_seconds >= before * (1 - 1e-12)


@given(pipelines())
def test_utilisation_and_bubble_are_what_the_timeline_says(pipeline: tuple[Shape, list[list[float]]]) -> None:
    shape, times = pipeline
    step = simulate(shape, StageTimes.of_one(*times))
    for worker in range(shape.num_workers):
        spans = [span for span in step.spans if span.worker == worker]
        assert all(one.end <= two.begin for one, two in itertools.pairwise(spans))  # one at a time
        assert step.busy_seconds[worker] <= step.step_seconds * (1 + 1e-12)
    work = shape.num_micro_batches * (sum(times[0]) + sum(times[1]))
    assert sum(step.busy_seconds) == pytest.approx(work)
    if step.step_seconds:
        assert step.bubble == pytest.approx(1 - work / step.step_seconds / shape.num_workers, abs=1e-9)


@given(st.lists(pipelines(), min_size=1, max_size=4))
def test_many_at_once_are_as_each_alone(many: list[tuple[Shape, list[list[float]]]]) -> None:
    shape = many[0][0]
    rows = [times for other, times in many if other == shape]
    names = ("forward", "backward", "down", "up")
    columns = (np.array([times[part] for times in rows], np.float64).reshape(len(rows), -1) for part in range(4))
    together = StageTimes(**dict(zip(names, columns, strict=True)))
    alone = [simulate(shape, StageTimes.of_one(*times)).step_seconds for times in rows]
    assert step_seconds(shape, together).tolist() == alone


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_equal_stages_have_the_bubble_of_the_papers(workers: int) -> None:
    """(p-1)/(m+p-1) for GPipe and 1F1B; half of that time with two stages on each worker."""
    total = 8
    for name, own in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        shape = Shape(schedule=name, num_workers=workers, num_micro_batches=total, stages_per_worker=own)
        stages = shape.num_stages
        step = simulate(
            shape,
            StageTimes.of_one([1 / own] * stages, [2 / own] * stages, [0.0] * (stages - 1), [0.0] * (stages - 1)),
        )
        assert step.step_seconds == pytest.approx(3 * (total + (workers - 1) / own))
        assert step.bubble == pytest.approx((workers - 1) / own / (total + (workers - 1) / own))


def test_a_slow_link_is_waited_for() -> None:
    """By hand: two stages of 1 + 1 s, one micro-batch, 10 s through the cut each way."""
    shape = Shape(schedule="gpipe", num_workers=2, num_micro_batches=1)
    step = simulate(shape, StageTimes.of_one([1.0, 1.0], [1.0, 1.0], [10.0], [10.0]))
    assert step.step_seconds == 24.0 and step.utilisation == (2 / 24, 2 / 24)


def test_a_stage_waits_for_each_receive() -> None:
    """A transfer that takes as long as a stage doubles the time of every micro-batch."""
    times = StageTimes.of_one([1.0] * 3, [1.0] * 3, [1.0] * 2, [1.0] * 2)
    found = simulate(Shape(schedule="gpipe", num_workers=3, num_micro_batches=8), times).step_seconds
    assert found == 2 * (1 + 8 * 2 + 2)  # of each kind: the first stage, eight with their receive, the last stage
