"""What the next round will be, by the one before; and what of it has held."""

from __future__ import annotations

from typing import Any

from syncline.core.forecast import PATIENCE, CommitShare, ForecastOutcome, Forecasts

PUSHED = ((0, 4),)


def shares(clock: int, /, **other: Any) -> list[CommitShare]:
    return [
        CommitShare("worker-0", 1, clock, 1.0, PUSHED),
        CommitShare("worker-1", 2, clock + 5, 2.0, PUSHED)._replace(**other),
    ]


def settle(forecasts: Forecasts, found: list[CommitShare], *changed: int, skip: bool = False) -> ForecastOutcome:
    return forecasts.settle(found, changed, 10, skip=skip)


def test_the_next_round_is_like_the_last_with_clocks_that_have_advanced() -> None:
    forecasts = Forecasts()
    assert forecasts.next == () and forecasts.number == 0
    assert settle(forecasts, shares(1)) == ForecastOutcome(0, was_forecast=False)
    assert list(forecasts.next) == shares(2) and forecasts.number == 1
    assert settle(forecasts, shares(2), 3, 4) == ForecastOutcome(
        1, was_forecast=True, held=True, changed=frozenset({3, 4})
    )


def test_what_is_not_as_it_was_forecast_is_added_up_anew() -> None:
    for odd in (
        {"clock": 99}, {"incarnation": 3}, {"weight": 2.5}, {"pushed": ((0, 3),)}, {"worker": "worker-2"},
    ):  # fmt: skip
        forecasts = Forecasts()
        settle(forecasts, shares(1))
        outcome = settle(forecasts, shares(2, **odd))
        assert not outcome.held and outcome.is_anew(7), odd
    for found, skip in ((shares(2)[:1], False), (shares(2)[::-1], False), (shares(2), True)):
        forecasts = Forecasts()
        settle(forecasts, shares(1))
        assert settle(forecasts, found, skip=skip).is_anew(7)
    forecasts = Forecasts()
    nothing = [share._replace(weight=0.0) for share in shares(1)]
    settle(forecasts, nothing)
    assert not settle(forecasts, [share._replace(clock=share.clock + 1) for share in nothing]).held


def test_of_a_forecast_that_held_only_what_was_changed_is_made_anew() -> None:
    outcome = ForecastOutcome(1, was_forecast=True, held=True, changed=frozenset({3}))
    assert outcome.is_anew(3) and not outcome.is_anew(4)
    assert not ForecastOutcome(0, was_forecast=False, changed=frozenset({3})).is_anew(3), (
        "nothing was made of it early"
    )


def test_forecasts_that_do_not_hold_end_and_come_back_when_they_would() -> None:
    forecasts = Forecasts()
    for clock in range(1, 20):
        settle(forecasts, shares(clock, pushed=((0, clock),)))
    assert forecasts.next == ()
    outcome, count = ForecastOutcome(0), 0
    while not outcome.was_forecast:
        count += 1
        outcome = settle(forecasts, shares(19 + count, pushed=((0, 19),)))
        assert outcome.held and not (outcome.is_anew(0) and not outcome.was_forecast)
    assert PATIENCE <= count <= 2 * PATIENCE


def test_one_that_misses_now_and_then_goes_on() -> None:
    forecasts = Forecasts()
    for clock in range(1, 60):
        outcome = settle(forecasts, shares(clock, weight=1.0 if clock % 5 else 0.5))
        assert outcome.was_forecast or clock == 1


def test_changes_of_most_slices_count_as_misses() -> None:
    for num_changed, goes_on in ((5, True), (6, False)):
        forecasts = Forecasts()
        for clock in range(1, 10):
            outcome = settle(forecasts, shares(clock), *range(num_changed))
        assert outcome.was_forecast is goes_on


def test_where_somebody_stages_nothing_early_there_is_no_forecast() -> None:
    forecasts = Forecasts()
    forecasts.settle(shares(1), (), 10, is_early=False)
    assert forecasts.next == ()
    outcome = settle(forecasts, shares(2))
    assert outcome.held and not outcome.was_forecast and not outcome.is_anew(0)
    assert list(forecasts.next) == shares(3)
