"""When the sums of a ring's next round begin during backward, and when what they come to counts."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.core.policy import parse_policy
from syncline.core.rounds import Commit
from syncline.server.reduce.reducer import NextRound
from syncline.server.tasks import RoundTask, StagedCommit


def round_of(clock: int, *, without: str = "", incarnation: int = 1, skip: bool = False, **told: Any) -> RoundTask:
    """Of two workers; `told`: what worker-1 says of its commit that is not as ever."""
    commits = []
    for name, offset in (("worker-0", 0), ("worker-1", 5)):
        item = StagedCommit(1, 0, 0)
        item.pushed, item.is_early = ((0, 4),), True
        if name == "worker-1":
            item.incarnation, item.skip = incarnation, skip
            for key, value in told.items():
                setattr(item, key, value)
        if name != without:
            commits.append(Commit(name, item.incarnation, clock + offset, item))
    return RoundTask(tuple(commits), (), commits[0], parse_policy("sync"), lambda work: None)


def after(*rounds: RoundTask) -> NextRound:
    found = NextRound()
    for work in rounds:
        found.settle(work)
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
    works = [round_of(clock) for clock in (1, 2)]
    for work in works:
        for commit in work.commits:
            commit.item.weight = 0.0
    assert not after(*works).expected
