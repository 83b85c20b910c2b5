"""A worker's second life: what it commits counts only where the job knows that it was not made before."""

from __future__ import annotations

import pytest

from syncline.core.wire.control import GivenLife
from syncline.errors import ConfigError
from syncline.worker.steps import CANNOT_RESUME, CannotResume, WorkerLife, checked_step


def test_a_first_life_needs_no_position() -> None:
    life = WorkerLife(GivenLife(1, 500, 0), in_rounds=True)
    life.commits(in_leases=False)
    assert not life.has_position


def test_a_second_life_without_a_position_leaves_and_says_what_would_make_it_restartable() -> None:
    life = WorkerLife(GivenLife(2, 40, 40), in_rounds=True)
    life.commits(in_leases=True)
    with pytest.raises(CannotResume) as left:
        life.commits(in_leases=False)
    assert left.value.code == CANNOT_RESUME and not isinstance(left.value, Exception)
    for word in ("life 2", "40 steps", "DataLoader", "job.steps(n)", "job.resume_at()"):
        assert word in left.value.reason


def test_a_script_that_says_where_it_goes_on_has_a_position() -> None:
    life = WorkerLife(GivenLife(2, 40, 40), in_rounds=True)
    life.has_resumed = True
    life.commits(in_leases=False)
    assert life.has_position


@pytest.mark.parametrize(("step", "own_step", "in_rounds", "needs"), [
    (0, 0, True, False),  # nothing was made yet: all of the script is still to do
    (9, 0, True, True),  # in rounds all make every step, also one that died before its first
    (9, 0, False, False),  # otherwise each makes its own, and it has made none
    (9, 4, False, True),
])  # fmt: skip
def test_what_was_made_before(step: int, own_step: int, in_rounds: bool, needs: bool) -> None:
    assert WorkerLife(GivenLife(2, step, own_step), in_rounds=in_rounds).needs_position == needs


RATES = {"0": [1e-3], "1": [0.0]}


@pytest.mark.parametrize("now", [{"0": 1.9e-3}, {"0": 0.6e-3}, {"1": 0.0}, {"2": 7.0}])
def test_a_learning_rate_near_the_last_one_goes_on(now: dict[str, float]) -> None:
    WorkerLife(GivenLife(2, 9, 9, RATES), in_rounds=False).uses_rates(now, has_restored=False)


@pytest.mark.parametrize("now", [{"0": 2.1e-3}, {"0": 0.4e-3}, {"0": 0.0}, {"1": 1e-9}])
def test_a_schedule_that_began_again_leaves(now: dict[str, float]) -> None:
    """In `async` it would push with the learning rate of step 0."""
    life = WorkerLife(GivenLife(2, 9, 9, RATES), in_rounds=False)
    with pytest.raises(CannotResume) as left:
        life.uses_rates(now, has_restored=False)
    assert 'job.state["sched"]' in left.value.reason and "learning rate" in left.value.reason


def test_only_the_first_step_of_a_second_life_that_restored_nothing_is_looked_at() -> None:
    far = {"0": 1.0}
    WorkerLife(GivenLife(1, 9, 9, RATES), in_rounds=False).uses_rates(far, has_restored=False)
    WorkerLife(GivenLife(2, 9, 9, RATES), in_rounds=False).uses_rates(far, has_restored=True)
    life = WorkerLife(GivenLife(2, 9, 9, RATES), in_rounds=False)
    life.uses_rates({"0": 1e-3, "1": 0.0}, has_restored=False)
    life.uses_rates(far, has_restored=False)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_that_cannot_be(step: object) -> None:
    with pytest.raises(ConfigError, match="number of the next step"):
        checked_step(step)


def test_a_rate_that_others_use_now_goes_on() -> None:
    """By `job.step`, say: the schedule has gone on while this worker was away."""
    life = WorkerLife(GivenLife(2, 9, 9, {"0": [1e-3, 1e-5]}), in_rounds=False)
    life.uses_rates({"0": 1.5e-5}, has_restored=False)


def test_the_rates_of_a_second_optimizer_are_looked_at_too() -> None:
    life = WorkerLife(GivenLife(2, 9, 9, RATES), in_rounds=False)
    life.uses_rates({"1": 0.0}, has_restored=False)
    with pytest.raises(CannotResume):
        life.uses_rates({"0": 1.0}, has_restored=False)
