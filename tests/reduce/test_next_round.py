"""When the sums of a ring's next round begin during backward, and when what they come to counts."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.reduce.rounds import NextRound, Round
from syncline.reduce.slices import Contribution


def round_of(clock: int, *, without: str = "", skip: bool = False, is_early: bool = True, is_edited: bool = False,
             weights: tuple[float, float] = (1.0, 1.0), **told: Any) -> Round:  # fmt: skip
    """Of two workers; `told`: what is unusual in the contribution of worker-1."""
    usual: dict[str, Any] = {"incarnation": 1, "pushed": ((0, 4),)}
    contributions = [
        Contribution("worker-0", clock=clock, weight=weights[0], **usual),
        Contribution("worker-1", clock=clock + 5, **{**usual, "weight": weights[1], **told}),
    ]
    return Round(
        contributions=tuple(each for each in contributions if each.worker != without),
        skip=skip, is_early=is_early, is_edited=is_edited, summed=lambda sums: None, failed=lambda error: None,
    )  # fmt: skip


def after(*rounds: Round) -> NextRound:
    found = NextRound()
    for each in rounds:
        found.settle(each)
    return found


def test_two_rounds_that_are_alike_are_followed_by_a_third() -> None:
    following = NextRound()
    assert not following.settle(round_of(1)) and not following.expected
    assert not following.settle(round_of(2)), "nothing was begun for it"
    assert [(share.worker, share.clock) for share in following.expected] == [("worker-0", 3), ("worker-1", 8)]
    assert following.settle(round_of(3)) and following.expected and following.number == 3


@pytest.mark.parametrize(
    "odd",
    [
        {"weight": 2.0}, {"pushed": ((0, 3),)}, {"incarnation": 2}, {"without": "worker-1"}, {"is_edited": True},
        {"skip": True},
    ],
    ids=str,
)  # fmt: skip
def test_an_odd_round_is_added_up_again_and_two_that_are_alike_must_follow(odd: dict[str, Any]) -> None:
    following = after(round_of(1), round_of(2))
    assert following.expected
    assert not following.settle(round_of(3, **odd)) and not following.expected
    assert not following.settle(round_of(4)) and not following.expected
    assert not following.settle(round_of(5)) and following.expected
    assert following.settle(round_of(6))


def test_one_that_stages_nothing_during_backward_leaves_nothing_to_begin() -> None:
    """What the others have begun for that round counts all the same."""
    following = after(round_of(1), round_of(2))
    assert following.settle(round_of(3, is_early=False)) and not following.expected


def test_weights_that_always_differ_and_gradients_that_are_always_edited_cost_nothing() -> None:
    for told in ({"weight": 1.0}, {"is_edited": True}):
        following = NextRound()
        for clock in range(1, 9):
            given = {"weight": float(clock)} if "weight" in told else told
            assert not following.settle(round_of(clock, **given)) and not following.expected


def test_a_round_in_which_all_weigh_nothing_is_not_expected() -> None:
    assert not after(*(round_of(clock, weights=(0.0, 0.0)) for clock in (1, 2))).expected


def test_a_contribution_without_weight_is_not_expected_to_be_added_up() -> None:
    following = after(*(round_of(clock, weights=(1.0, 0.0)) for clock in (1, 2)))
    assert [each.worker for each in following.expected] == ["worker-0"]
    assert following.settle(round_of(3, weights=(1.0, 0.0)))
