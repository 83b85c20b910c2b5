"""Ranks: who is the chief when workers finish, die and come back."""

from __future__ import annotations

import pytest

from syncline.config import JobConfig
from syncline.core.members import Member
from syncline.core.membership import JobState, Membership
from syncline.core.wire.control import Roster
from syncline.worker.session import place_of, ranked


def worker(number: int, since: int = 1, incarnation: int = 0) -> Member:
    return Member(f"worker-{number}", "worker", incarnation or number + 1, "local", since=since)


def test_the_one_that_was_there_first_comes_first() -> None:
    roster = Roster(3, [worker(0, since=3), worker(1), worker(2)], [])
    assert [member.name for member in ranked(roster)] == ["worker-1", "worker-2", "worker-0"]


def test_the_last_worker_left_is_the_chief_when_the_chief_has_not_finished() -> None:
    """worker-1 finished while worker-0 was the chief; worker-0 died and came back. Nobody evaluated or saved."""
    back = worker(0, since=5, incarnation=9)
    assert place_of(back, Roster(6, [back], [], [worker(1)])) == (0, 2, 0)


def test_a_chief_that_has_finished_keeps_its_rank() -> None:
    """Else the last line of every script would be printed by each worker in turn."""
    roster = Roster(6, [worker(1)], [], [worker(0)], is_chief_done=True)
    assert place_of(worker(1), roster) == (1, 2, 1)


@pytest.mark.parametrize(("first", "done"), [("worker-0", "worker-0"), ("worker-1", "worker-0")])
def test_only_the_chiefs_end_is_that_of_the_chief(first: str, done: str) -> None:
    members = Membership(JobState(config=JobConfig(workers=2)))
    for name in ("server-0", "worker-0", "worker-1"):
        members.join(name.partition("-")[0], name, "local", None)
    members.form()
    members.leave(first)
    assert members.state.chief_done == (first if first == "worker-0" else "")
    members.leave("worker-1" if first == "worker-0" else "worker-0")
    assert members.state.chief_done == done


def test_the_next_worker_is_the_chief_when_the_chief_dies() -> None:
    members = Membership(JobState(config=JobConfig(workers=2)))
    for name in ("server-0", "worker-0", "worker-1"):
        members.join(name.partition("-")[0], name, "local", None)
    members.form()
    members.evict("worker-0", "was killed")
    members.leave("worker-1")
    assert members.state.chief_done == "worker-1"


def test_a_name_that_joins_again_has_one_life_more() -> None:
    members = Membership(JobState(config=JobConfig(workers=1)))
    for name in ("server-0", "worker-0"):
        members.join(name.partition("-")[0], name, "local", None, process=name)
    members.form()
    members.join("worker", "worker-0", "local", None, process="worker-0")  # asked again: the answer was lost
    assert members.state.lives == {"worker-0": 1}
    members.evict("worker-0", "was killed")
    members.join("worker", "worker-0", "local", None, process="another")
    assert members.state.lives == {"worker-0": 2}
