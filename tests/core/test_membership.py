"""Membership: who is in, who is awaited, and the one verdict with which a job ends."""

from __future__ import annotations

import itertools

import pytest

from syncline.core.membership import Address, Barriers, Membership, Outcome
from syncline.errors import ConfigError


def formed(num_workers: int = 2, num_servers: int = 1) -> Membership:
    members = Membership(num_workers, num_servers)
    for name, role in members.expected.items():
        members.join(role, name, "here", None)
    return members


def test_free_names_are_given_out_in_the_order_of_joining() -> None:
    """Twelve workers started by hand: worker-10 comes after worker-9, not after worker-1."""
    members = Membership(12, 1)
    given = [members.join("worker", "", "here", None).name for _ in range(12)]
    assert given == [f"worker-{k}" for k in range(12)]
    assert members.join("server", "", "here", None).name == "server-0"
    assert [m.name for m in members.ordered()] == ["server-0", *given]
    assert members.workers() == given


def test_a_free_name_is_none_that_somebody_asked_for() -> None:
    members = Membership(3, 0)
    members.join("worker", "worker-0", "here", None)
    assert members.join("worker", "", "here", None).name == "worker-1"
    members.join("worker", "worker-2", "here", None)
    with pytest.raises(ConfigError, match="no worker more is expected: the job has 3 workers and 0 servers"):
        members.join("worker", "", "here", None)


@pytest.mark.parametrize("order", list(itertools.permutations(["server-0", "worker-0", "worker-1"])))
def test_a_job_is_whole_in_any_order_of_joining(order: tuple[str, ...]) -> None:
    """Processes start in any order; only the last one makes the job whole, and generation 1 begins."""
    members = Membership(2, 1)
    for count, name in enumerate(order):
        assert not members.formed and members.generation == 0
        assert members.missing() == [n for n in members.expected if n not in order[:count]]
        members.join(members.expected[name], name, "here", None)
    assert members.formed and members.generation == 1 and members.missing() == []
    assert members.chief == "worker-0"


def test_incarnations_never_come_twice() -> None:
    members = Membership(3, 2)
    numbers = [members.join(role, name, "here", None).incarnation for name, role in members.expected.items()]
    assert sorted(numbers) == list(range(1, 6))


def test_a_member_is_known_as_it_joined() -> None:
    address = Address("@x", "10.0.0.1", 4000)
    member = Membership(1, 1).join("server", "server-0", "a", address)
    assert (member.role, member.host, member.address) == ("server", "a", address)


@pytest.mark.parametrize(
    ("role", "name", "message"),
    [
        ("worker", "worker-0", "worker-0 is in the job already; each name is one process"),
        ("worker", "worker-7", "no worker worker-7 is expected: the job has 2 workers and 1 servers"),
        ("worker", "server-0", "no worker server-0 is expected"),
        ("server", "worker-1", "no server worker-1 is expected"),
        ("launcher", "", "no launcher more is expected"),
        ("worker", "worker-²", "no worker worker-² is expected"),
    ],
)
def test_who_is_not_expected_is_told_why(role: str, name: str, message: str) -> None:
    """Two processes of one name would count every commit of the second as already applied."""
    members = Membership(2, 1)
    members.join("worker", "worker-0", "here", None)
    before = dict(members.members)
    with pytest.raises(ConfigError, match=message):
        members.join(role, name, "elsewhere", None)
    assert members.members == before


def test_the_job_ends_well_when_the_last_worker_has_left() -> None:
    members = formed(2)
    assert members.leave("worker-0") is None
    assert members.workers() == ["worker-1"]
    assert members.chief == "worker-0", "who was chief when the job was formed stays it"
    assert members.leave("worker-0") is None, "saying it again is no second leave"
    assert members.generation == 2
    assert members.leave("worker-1") == Outcome(False, "", "all workers have finished")


def test_a_server_that_leaves_does_not_end_the_job() -> None:
    members = formed()
    assert members.leave("server-0") is None
    assert members.leave("nobody") is None


def test_the_first_death_is_the_verdict() -> None:
    """After one worker's exception the others die of lost connections: the user must read the first reason."""
    members = formed()
    first = members.died("worker-1", "raised ValueError")
    assert first == Outcome(True, "worker-1", "worker-1 raised ValueError")
    assert members.died("worker-0", "lost its connection") == first
    assert members.died("server-0", "was killed by signal 15") == first
    assert members.leave("worker-0") == first
    assert members.outcome == first


def test_a_death_after_the_good_end_changes_nothing() -> None:
    members = formed(1)
    good = members.leave("worker-0")
    assert good is not None and not good.failed
    assert members.died("server-0", "was killed by signal 15") == good


def test_the_end_of_a_member_that_has_left_is_no_death() -> None:
    members = formed()
    members.leave("worker-1")
    generation = members.generation
    assert members.died("worker-1", "exited") is None
    assert members.generation == generation


def test_every_join_leave_and_death_is_a_generation() -> None:
    members = formed()
    assert members.generation == 1
    members.leave("worker-1")
    assert members.generation == 2
    members.died("server-0", "was killed")
    assert members.generation == 3


def test_who_never_came_is_named() -> None:
    """A job that waits must say for whom: all who are missing, by name, and how long it has waited."""
    members = Membership(2, 2)
    members.join("worker", "worker-0", "here", None)
    outcome = members.never_came(2.5)
    assert outcome == Outcome(True, "server-0", "server-0, server-1, worker-1 did not come up within 2.5 s")


def test_a_deadline_that_fires_as_the_last_one_joins_ends_nothing() -> None:
    """The timer and the last join race: once the job is whole, the timer has nothing to say."""
    assert formed().never_came(1.0) is None


def test_a_barrier_is_whole_when_every_worker_is_there() -> None:
    barriers = Barriers()
    barriers.arrive("epoch", 1, "worker-0")
    assert barriers.whole(["worker-0", "worker-1"]) == []
    assert barriers.missing("epoch", 1, ["worker-0", "worker-1"]) == ["worker-1"]
    barriers.arrive("epoch", 1, "worker-1")
    assert barriers.whole(["worker-0", "worker-1"]) == [("epoch", 1)]
    assert barriers.whole(["worker-0", "worker-1"]) == [], "and is forgotten by that"


def test_the_next_turn_of_a_barrier_is_another_one() -> None:
    """A fast worker is at the second turn before the slow one has left the first: turns must not mix."""
    barriers = Barriers()
    for turn, worker in ((1, "worker-0"), (2, "worker-0"), (1, "worker-1")):
        barriers.arrive("epoch", turn, worker)
    barriers.arrive("other", 2, "worker-1")
    assert barriers.whole(["worker-0", "worker-1"]) == [("epoch", 1)]
    assert barriers.missing("epoch", 2, ["worker-0", "worker-1"]) == ["worker-1"]
    assert barriers.missing("never", 1, ["worker-0"]) == ["worker-0"]


def test_a_worker_that_leaves_is_not_waited_for_at_barriers() -> None:
    members, barriers = formed(3), Barriers()
    barriers.arrive("end", 1, "worker-0")
    barriers.arrive("end", 1, "worker-2")
    members.leave("worker-1")
    assert barriers.whole(members.workers()) == [("end", 1)]


def test_behind_a_barrier_a_stretch_begins_that_nobody_was_in() -> None:
    """Workers rest unequally often; the stretch behind the barrier is later than any of theirs, for all alike."""
    barriers, seen = Barriers(), [0, 7, 3]
    for worker, stretch in enumerate(seen):
        barriers.arrive("epoch", 1, f"worker-{worker}", stretch)
    first = barriers.next_stretch()
    assert first > max(seen)
    barriers.arrive("epoch", 2, "worker-0", first + 2)
    assert barriers.next_stretch() > first + 2
