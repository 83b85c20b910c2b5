"""Rounds when generations change: fences, settled steps, those who enter, commits that are made again."""

from __future__ import annotations

import pytest

from syncline.core.members import Standing, merged
from syncline.core.policy import parse_policy
from syncline.core.reconfigure import next_turn
from syncline.core.rounds import BARRIER_EPOCH, Rounds, Verdict
from syncline.errors import FencedError


def rounds_of(policy: str, num_workers: int) -> Rounds[str]:
    return Rounds(parse_policy(policy), [(f"worker-{k}", 10 + k) for k in range(num_workers)])


def commit(rounds: Rounds[str], worker: int, clock: int, item: str = "") -> Verdict[str]:
    return rounds.commit(f"worker-{worker}", 10 + worker, clock, 0, item or f"{worker}@{clock}")


def items(verdict: Verdict[str]) -> list[tuple[str, ...]]:
    return [tuple(commit.item for commit in each) for each in verdict.apply]


def test_a_commit_made_anew_while_its_round_is_open_counts_once_with_what_is_given_last() -> None:
    """After a lost connection a worker stages again: the memory of the first time may be gone."""
    rounds = rounds_of("sync", 2)
    commit(rounds, 0, 1, "first")
    assert commit(rounds, 0, 1, "second").kind == "open"
    assert rounds.open_commit("worker-0", 1) == "second"
    assert items(commit(rounds, 1, 1)) == [("second", "1@1")]
    assert rounds.open_commit("worker-0", 1) is None
    assert commit(rounds, 0, 1).kind == "already applied"


def test_rounds_wait_for_a_fenced_worker_until_it_is_settled_what_counts() -> None:
    """Released before, one server would apply the round without a step that another has with it."""
    rounds = rounds_of("sync", 2)
    commit(rounds, 0, 1)
    rounds.fence("worker-1", 11)
    with pytest.raises(FencedError, match="worker-1, incarnation 11, has been evicted"):
        commit(rounds, 1, 1)
    assert rounds.missing() == ["worker-1"]
    assert items(rounds.leave_fenced("worker-1", 11)) == [("0@1",)]


def test_a_step_that_another_server_has_counts_here_too() -> None:
    rounds = rounds_of("sync", 2)
    commit(rounds, 0, 1)
    rounds.fence("worker-1", 11)
    assert items(rounds.settle("worker-1", 1, 0, "staged")) == [("0@1", "staged")]
    with pytest.raises(FencedError):
        commit(rounds, 1, 2)
    assert items(rounds.leave_fenced("worker-1", 11)) == []


def test_a_settled_step_in_an_open_round_is_an_orphan_and_counts_with_the_round() -> None:
    rounds = rounds_of("sync", 3)
    commit(rounds, 1, 1)
    rounds.fence("worker-1", 11)
    rounds.leave_fenced("worker-1", 11)
    assert rounds.num_orphans() == 1
    rounds.forget_left("worker-1")
    assert "worker-1" in rounds.standings, "it is in a round that is open"
    commit(rounds, 0, 1)
    assert items(commit(rounds, 2, 1)) == [("0@1", "1@1", "2@1")]
    assert rounds.num_orphans() == 0
    rounds.forget_left("worker-1")
    assert "worker-1" not in rounds.standings


def test_an_orphan_is_one_also_when_a_later_life_has_taken_its_place() -> None:
    """Were it not counted, a plan would move slices under it, and it would be on some of them only."""
    rounds = rounds_of("sync", 3)
    commit(rounds, 1, 1)
    rounds.fence("worker-1", 11)
    rounds.leave_fenced("worker-1", 11)
    rounds.enter(Standing("worker-1", 20, phase_began=-1))
    assert rounds.num_orphans() == 1 and rounds.reach("worker-1", 11) == 1 and rounds.reach("worker-1", 20) == 0
    commit(rounds, 0, 1)
    assert items(commit(rounds, 2, 1)) == [("0@1", "1@1", "2@1")]
    assert rounds.num_orphans() == 0


def test_a_fence_of_an_earlier_incarnation_does_not_touch_a_later_one() -> None:
    rounds = rounds_of("sync", 2)
    rounds.fence("worker-1", 9)
    rounds.leave_fenced("worker-1", 9)
    assert rounds.standings["worker-1"].active and not rounds.standings["worker-1"].fenced


def test_who_enters_takes_part_from_its_round_on_and_none_waits_for_it_before() -> None:
    rounds = rounds_of("sync", 1)
    for clock in (1, 2):
        commit(rounds, 0, clock)
    rounds.enter(Standing("worker-1", 11, phase_began=-2))
    assert items(commit(rounds, 1, 1)) == []
    assert items(commit(rounds, 0, 3)) == [("0@3", "1@1")]


def test_who_enters_again_before_its_first_commit_gets_a_later_round() -> None:
    """The answer was lost with the coordinator. Who has begun keeps its place."""
    rounds = rounds_of("sync", 1)
    rounds.enter(Standing("worker-1", 11, phase_began=-2))
    rounds.enter(Standing("worker-1", 11, phase_began=-5))
    assert rounds.standings["worker-1"].turn() == (0, 5)
    commit(rounds, 1, 1)
    rounds.enter(Standing("worker-1", 11, phase_began=-9))
    assert rounds.standings["worker-1"].turn() == (0, 6)
    rounds.enter(Standing("worker-1", 12, phase_began=-9))
    assert rounds.standings["worker-1"].incarnation == 12


def test_who_was_away_and_enters_again_is_in_the_others_rounds() -> None:
    """It came to a barrier that the others had passed: none waited for it, and from its place on all do."""
    rounds = rounds_of("sync", 2)
    for clock in (1, 2):
        commit(rounds, 0, clock)
        commit(rounds, 1, clock)
    rounds.rest("worker-1", 11, 0, at_barrier=True)
    assert items(commit(rounds, 0, 3)) == [("0@3",)]
    rounds.enter(Standing("worker-1", 11, clock=2, phase_began=-1))
    assert items(commit(rounds, 0, 4)) == []
    assert items(commit(rounds, 1, 3)) == [("0@4", "1@3")]


def test_where_slices_came_or_went_open_commits_are_made_anew_from_what_every_slice_has() -> None:
    rounds = rounds_of("sync", 2)
    for clock in (1, 2):
        commit(rounds, 0, clock)
        commit(rounds, 1, clock)
    commit(rounds, 0, 3, "open")
    standings = [
        Standing(s.name, s.incarnation, clock=s.clock, position=s.position) for s in rounds.standings.values()
    ]
    dropped = rounds.reset(standings, {("worker-0", 10): 1, ("worker-1", 11): 1})
    assert [commit.item for commit in dropped] == ["open"]
    assert rounds.clocks() == {"worker-0": (10, 1), "worker-1": (11, 1)}
    commit(rounds, 0, 2)
    assert items(commit(rounds, 1, 2)) == [("0@2", "1@2")], "round 2 again, on the slice that lacked it"
    assert rounds.standings["worker-0"].turn() == (0, 2) and rounds.standings["worker-0"].position == 2


def test_the_word_of_the_server_that_heard_more_counts() -> None:
    here = [Standing("worker-0", 2, clock=5), Standing("worker-1", 3, clock=5, inactive=True)]
    there = [Standing("worker-0", 2, clock=6), Standing("worker-1", 3, clock=5, at_barrier=True, position=9)]
    found = merged([here, there])
    assert found["worker-0"].clock == 6
    assert (found["worker-1"].inactive, found["worker-1"].at_barrier, found["worker-1"].position) == (True, True, 9)
    assert not here[1].at_barrier, "what was reported is not changed"
    assert merged([there, here]) == found
    later = merged([here, [Standing("worker-0", 7)]])
    assert later["worker-0"].incarnation == 7


def test_the_next_round_is_the_highest_that_any_server_has_opened() -> None:
    assert next_turn([]) == (0, 0)
    low, high = Standing("worker-0", 1, clock=9), Standing("worker-1", 2, clock=4, phase=BARRIER_EPOCH, phase_began=3)
    assert next_turn([low, high]) == (BARRIER_EPOCH, 1)


def test_who_enters_behind_a_barrier_keeps_its_round_when_the_first_commit_of_the_era_comes_later() -> None:
    """One server has heard a commit from behind the barrier, this one not yet: both must count alike (seed 205)."""
    heard, not_yet = rounds_of("sync", 1), rounds_of("sync", 1)
    for rounds in (heard, not_yet):
        commit(rounds, 0, 1)
        rounds.rest("worker-0", 10, 0, at_barrier=True)
    heard.commit("worker-0", 10, 2, BARRIER_EPOCH, "0@2")
    for rounds in (heard, not_yet):
        rounds.enter(Standing("worker-1", 11, phase=BARRIER_EPOCH, phase_began=-1))
    assert items(not_yet.commit("worker-0", 10, 2, BARRIER_EPOCH, "0@2")) == [("0@2",)], (
        "it enters with the round after this"
    )
    for rounds in (heard, not_yet):
        rounds.commit("worker-1", 11, 1, BARRIER_EPOCH, "1@1")
        assert items(rounds.commit("worker-0", 10, 3, BARRIER_EPOCH, "0@3")) == [("0@3", "1@1")]


def test_the_first_to_enter_finds_nobody() -> None:
    rounds = rounds_of("sync", 0)
    rounds.enter(Standing("worker-0", 10, phase=BARRIER_EPOCH))
    assert items(rounds.commit("worker-0", 10, 1, BARRIER_EPOCH, "0@1")) == [("0@1",)]


def test_a_late_word_from_before_the_barrier_takes_nobody_out_of_the_new_era() -> None:
    """Said again after a new roster, or replayed: one server would apply the round without a worker (seed 4466)."""
    rounds = rounds_of("sync", 2)
    for worker in (0, 1):
        rounds.rest(f"worker-{worker}", 10 + worker, 0, at_barrier=True)
    rounds.commit("worker-0", 10, 1, BARRIER_EPOCH, "0@1")
    assert items(rounds.rest("worker-1", 11, 0, at_barrier=True)) == []
    assert items(rounds.commit("worker-1", 11, 1, BARRIER_EPOCH, "1@1")) == [("0@1", "1@1")]


def test_a_round_that_is_whole_because_somebody_entered_is_released_then() -> None:
    """It waited for a life that is over: without this it would wait for the next commit of anybody."""
    rounds = rounds_of("sync", 2)
    commit(rounds, 0, 1)
    assert items(rounds.release()) == []
    rounds.enter(Standing("worker-1", 12, phase_began=-1))
    assert items(rounds.release()) == [("0@1",)]
    assert items(rounds.release()) == []


def test_who_enters_behind_a_barrier_ends_the_rounds_of_the_era_before_it() -> None:
    rounds = rounds_of("sync", 2)
    commit(rounds, 0, 1)
    rounds.enter(Standing("worker-2", 12, phase=BARRIER_EPOCH))
    assert items(rounds.release()) == [("0@1",)]


def test_who_enters_behind_a_barrier_in_a_change_of_primaries_takes_all_into_the_new_era() -> None:
    """Else those who were away at the barrier still are, until their first commits: one server would apply a round
    before such a commit comes, without it, another with it (ring, seed 3001301)."""
    rounds = rounds_of("sync", 2)
    at_barrier = [Standing(f"worker-{k}", 10 + k, clock=5, at_barrier=True, position=5) for k in (0, 1)]
    rounds.reset(
        [*at_barrier, Standing("worker-2", 12, phase=BARRIER_EPOCH)], {("worker-0", 10): 5, ("worker-1", 11): 5}
    )
    assert [s.turn() for s in rounds.standings.values()] == [(BARRIER_EPOCH, 0)] * 3
    assert items(rounds.commit("worker-1", 11, 6, BARRIER_EPOCH, "1@6")) == []
    assert items(rounds.commit("worker-2", 12, 1, BARRIER_EPOCH, "2@1")) == [], "worker-0 is in this round"
    assert items(rounds.commit("worker-0", 10, 6, BARRIER_EPOCH, "0@6")) == [("0@6", "1@6", "2@1")]
    again = [Standing("worker-0", 10, clock=6, phase=BARRIER_EPOCH, phase_began=5), Standing("worker-1", 11, clock=5)]
    rounds.reset(again, {("worker-0", 10): 6, ("worker-1", 11): 5})
    assert rounds.standings["worker-0"].turn() == (BARRIER_EPOCH, 1), "who is in the era already stays where it is"
