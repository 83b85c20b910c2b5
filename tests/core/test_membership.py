"""Membership: who is in, who is awaited, and the one verdict with which a job ends."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from syncline.config import JobConfig
from syncline.core.members import Address
from syncline.core.membership import NOT_UP, Barriers, JobState, Membership, Outcome
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import BARRIER_EPOCH
from syncline.core.wire.control import Passed
from syncline.errors import ConfigError


def members_of(num_workers: int, num_servers: int, **settings: int) -> Membership:
    return Membership(JobState(config=JobConfig(workers=num_workers, servers=num_servers, **settings)))


def formed(num_workers: int = 2, num_servers: int = 1, **settings: int) -> Membership:
    members = members_of(num_workers, num_servers, **settings)
    for name in members.missing():
        members.join(name.rpartition("-")[0], name, "here", None, process=name)
    assert members.may_form(False)
    members.form()
    return members


def test_free_names_are_given_out_in_the_order_of_joining() -> None:
    """Twelve workers started by hand: worker-10 comes after worker-9, not after worker-1."""
    members = members_of(12, 1)
    given = [members.join("worker", "", "here", None).name for _ in range(12)]
    assert given == [f"worker-{k}" for k in range(12)]
    assert members.join("server", "", "here", None).name == "server-0"
    assert [m.name for m in members.ordered()] == ["server-0", *given], "before it begins nobody was there first"
    assert members.workers() == given


def test_a_free_name_is_none_that_somebody_asked_for() -> None:
    members = members_of(3, 1)
    members.join("worker", "worker-0", "here", None)
    assert members.join("worker", "", "here", None).name == "worker-1"
    members.join("worker", "worker-2", "here", None)
    with pytest.raises(
        ConfigError, match="no worker more is expected: the job has 3 workers and 0 servers, at most 3"
    ):
        members.join("worker", "", "here", None)


@pytest.mark.parametrize("order", list(itertools.permutations(["server-0", "worker-0", "worker-1"])))
def test_a_job_is_whole_in_any_order_of_joining(order: tuple[str, ...]) -> None:
    """Processes start in any order; only the last one makes the job whole, and generation 1 begins."""
    members = members_of(2, 1)
    for count, name in enumerate(order):
        assert not members.may_form(False) and members.generation == 0
        assert members.missing() == [n for n in ("server-0", "worker-0", "worker-1") if n not in order[:count]]
        members.join(name.rpartition("-")[0], name, "here", None)
    assert members.may_form(False) and members.missing() == []
    members.form()
    assert members.formed and members.generation == 1 and not members.may_form(True)
    assert sorted(members.state.entered) == ["worker-0", "worker-1"]
    assert members.chief == "worker-0"


def test_incarnations_never_come_twice() -> None:
    members = members_of(3, 2)
    numbers = [members.join(n.rpartition("-")[0], n, "here", None).incarnation for n in members.missing()]
    assert sorted(numbers) == list(range(1, 6))


def test_a_member_is_known_as_it_joined() -> None:
    address = Address("@x", "10.0.0.1", 4000)
    member = members_of(1, 1).join("server", "server-0", "a", address)
    assert (member.role, member.host, member.address) == ("server", "a", address)


@pytest.mark.parametrize(
    ("role", "name", "message"),
    [
        ("worker", "worker-0", "worker-0 is in the job already; each name is one process"),
        ("worker", "worker-7", "no worker worker-7 is expected: the job has 1 worker and 0 servers, at most 2"),
        ("worker", "server-0", "no worker server-0 is expected"),
        ("server", "worker-1", "no server worker-1 is expected"),
        ("worker", "worker-²", "no worker worker-² is expected"),
    ],
)
def test_who_is_not_expected_is_told_why(role: str, name: str, message: str) -> None:
    """Two processes of one name would count every commit of the second as already applied."""
    members = members_of(2, 1)
    members.join("worker", "worker-0", "here", None)
    before = msgspec.msgpack.encode(members.state)
    with pytest.raises(ConfigError, match=message):
        members.join(role, name, "elsewhere", None)
    assert msgspec.msgpack.encode(members.state) == before


def test_a_question_asked_again_gets_the_same_answer() -> None:
    """The answer to a join was lost with its connection: the same process must not become a second member."""
    members = members_of(2, 1)
    first = members.join("worker", "worker-0", "here", None, process="one")
    assert members.join("worker", "worker-0", "here", None, process="one") is first
    with pytest.raises(ConfigError, match="worker-0 is in the job already"):
        members.join("worker", "worker-0", "here", None, process="another")


def test_the_job_ends_well_when_the_last_worker_has_left() -> None:
    members = formed(2)
    assert members.leave("worker-0") is None
    assert members.workers() == ["worker-1"]
    assert members.chief == "worker-1", "the one that has been there longest of those who are there"
    assert members.leave("worker-0") is None, "saying it again is no second leave"
    assert members.generation == 2
    assert members.leave("worker-1") == Outcome(False, "", "all workers have finished")


def test_a_job_does_not_end_while_somebody_is_being_started_again() -> None:
    members = formed(2)
    members.evict("worker-1", "was killed")
    members.await_return("worker-1")
    assert members.leave("worker-0") is None
    members.join("worker", "worker-1", "here", None, process="again")
    assert members.leave("worker-1") == Outcome(False, "", "all workers have finished")


def test_a_server_that_leaves_does_not_end_the_job() -> None:
    members = formed()
    assert members.leave("server-0") is None
    assert members.leave("nobody") is None


def test_the_first_verdict_counts() -> None:
    """After one worker's exception the others die of lost connections: the user must read the first reason."""
    members = formed()
    members.give_up_on("worker-1", "raised ValueError")
    first = members.outcome
    assert first == Outcome(True, "worker-1", "worker-1 raised ValueError")
    members.fail("worker-0", "lost its connection")
    assert members.leave("worker-0") == first and members.outcome == first


def test_a_death_after_the_good_end_changes_nothing() -> None:
    members = formed(1)
    good = members.leave("worker-0")
    members.fail("server-0", "was killed by signal 15")
    assert good is not None and not good.failed and members.outcome == good


def test_the_end_of_a_member_that_has_left_is_no_death() -> None:
    members = formed()
    members.leave("worker-1")
    before = msgspec.msgpack.encode(members.state)
    assert members.evict("worker-1", "exited") == []
    assert msgspec.msgpack.encode(members.state) == before


def test_every_join_leave_and_death_is_a_generation() -> None:
    members = formed()
    assert members.generation == 1
    members.leave("worker-1")
    assert members.generation == 2
    members.evict("server-0", "was killed")
    assert members.generation == 3
    members.join("server", "server-0", "here", None)
    assert members.generation == 4


def test_an_evicted_worker_is_to_be_fenced_under_the_incarnation_that_took_part() -> None:
    members = formed()
    incarnation = members.state.entered["worker-1"]
    members.evict("worker-1", "not heard of")
    assert members.state.fencing == {"worker-1": (incarnation, "not heard of")}
    assert "worker-1" not in members.state.entered
    again = members.join("worker", "worker-1", "here", None, process="again")
    assert again.incarnation > incarnation
    members.evict("worker-1", "again")
    assert members.state.fencing["worker-1"] == (incarnation, "not heard of"), "who never entered needs no fence"


def test_a_servers_death_promotes_backups_and_names_what_nobody_has() -> None:
    members = formed(1, 3)
    replica_sets = [
        ReplicaSet(0, "server-0", ("server-1",)),
        ReplicaSet(1, "server-1", ("server-0",)),
        ReplicaSet(2, "server-0"),
    ]
    members.state.replica_sets = {replica_set.slice: replica_set for replica_set in replica_sets}
    assert members.evict("server-0", "was killed") == [2]
    assert list(members.state.replica_sets.values()) == [
        ReplicaSet(0, "server-1"),
        ReplicaSet(1, "server-1"),
        ReplicaSet(2, ""),
    ]
    assert members.state.lost == [2]
    assert members.evict("server-2", "was killed") == [], "what was lost before is not lost again"
    assert members.evict("server-1", "was killed") == [0, 1]
    assert members.state.lost == [2, 0, 1]


def test_ranks_follow_the_time_of_joining() -> None:
    members = formed(3)
    members.evict("worker-0", "was killed")
    members.join("worker", "worker-0", "here", None, process="again")
    assert members.workers() == ["worker-1", "worker-2", "worker-0"]
    assert members.chief == "worker-1"


def test_a_job_begins_with_the_least_number_after_some_patience() -> None:
    members = members_of(4, 1, least_workers=2)
    members.join("server", "", "here", None)
    members.join("worker", "", "here", None)
    assert not members.may_form(True)
    members.join("worker", "", "here", None)
    assert not members.may_form(False) and members.may_form(True)


def test_a_job_grows_to_the_most_and_servers_may_always_come() -> None:
    members = formed(1, 1, most_workers=2)
    assert members.join("worker", "", "here", None).name == "worker-1"
    with pytest.raises(ConfigError, match="at most 2 of these"):
        members.join("worker", "", "here", None)
    assert members.join("server", "", "here", None).name == "server-1"


def test_a_name_that_is_awaited_is_not_given_to_somebody_else() -> None:
    members = formed(2, 1, most_workers=3)
    members.evict("worker-0", "was killed")
    members.await_return("worker-0")
    assert members.join("worker", "", "here", None).name == "worker-2"
    assert members.join("worker", "worker-0", "here", None).name == "worker-0"
    assert members.awaited == {}


def test_the_last_worker_may_leave_for_now() -> None:
    """In a pod that is evicted it comes back: that is no end of the job. If it does not come, the others can end."""
    members = formed(2, 1)
    members.leave("worker-0", True, comes_back=True)
    members.leave("worker-1", True, comes_back=True)
    assert members.outcome is None and members.state.returning == ["worker-0", "worker-1"]
    members.join("worker", "worker-0", "here", None)
    assert members.awaited == {"worker-1": "worker"} and members.state.returning == ["worker-1"]
    members.leave("worker-0")
    assert members.outcome is None, "worker-1 has work left"
    members.has_not_returned("worker-1")
    members.end_if_done()
    assert members.awaited == {} and members.outcome == Outcome(False, "", "all workers have finished")


def test_all_that_counts_outlives_the_coordinator() -> None:
    members = formed(2, 2)
    members.evict("worker-0", "was killed")
    members.state.replica_sets[3] = ReplicaSet(3, "server-0", ("server-1",))
    data = msgspec.msgpack.encode(members.state)
    again = Membership(msgspec.msgpack.decode(data, type=JobState))
    assert again.state == members.state and again.workers() == members.workers()
    fresh = again.join("worker", "worker-0", "here", None, process="x")
    assert fresh.incarnation == members.state.incarnations + 1


def test_who_never_came_is_named() -> None:
    """A job that waits must say for whom: all who are missing, by name, and how long it has waited."""
    members = members_of(2, 2)
    members.join("worker", "worker-0", "here", None)
    outcome = members.never_came(2.5)
    assert outcome == Outcome(
        True, "server-0", f"server-0, server-1, worker-1 did not come up within 2.5 s; {NOT_UP}"
    )
    assert "--start-seconds" in NOT_UP


def test_a_deadline_that_fires_as_the_last_one_joins_ends_nothing() -> None:
    """The timer and the last join race: once the job is whole, the timer has nothing to say."""
    assert formed().never_came(1.0) is None


def test_a_barrier_is_whole_when_every_worker_is_there() -> None:
    barriers = Barriers()
    barriers.arrive("epoch", 1, "worker-0")
    assert barriers.ready(["worker-0", "worker-1"]) == []
    assert barriers.missing("epoch", 1, ["worker-0", "worker-1"]) == ["worker-1"]
    barriers.arrive("epoch", 1, "worker-1")
    assert barriers.ready(["worker-0", "worker-1"]) == [("epoch", 1)]
    barriers.forget([("epoch", 1)])
    assert barriers.ready(["worker-0", "worker-1"]) == []


def test_the_next_turn_of_a_barrier_is_another_one() -> None:
    """A fast worker is at the second turn before the slow one has left the first: turns must not mix."""
    barriers = Barriers()
    for turn, worker in ((1, "worker-0"), (2, "worker-0"), (1, "worker-1")):
        barriers.arrive("epoch", turn, worker)
    barriers.arrive("other", 2, "worker-1")
    assert barriers.ready(["worker-0", "worker-1"]) == [("epoch", 1)]
    assert barriers.missing("epoch", 2, ["worker-0", "worker-1"]) == ["worker-1"]
    assert barriers.missing("never", 1, ["worker-0"]) == ["worker-0"]


def test_a_worker_that_leaves_is_not_waited_for_at_barriers() -> None:
    members, barriers = formed(3), Barriers()
    barriers.arrive("end", 1, "worker-0")
    barriers.arrive("end", 1, "worker-2")
    members.leave("worker-1")
    assert barriers.ready(members.workers()) == [("end", 1)]


def test_behind_a_barrier_a_phase_begins_that_nobody_was_in() -> None:
    """Workers rest unequally often; the phase behind the barrier is later than any of theirs, for all alike."""
    barriers, seen = Barriers(), [0, 7, 3]
    for worker, phase in enumerate(seen):
        barriers.arrive("epoch", 1, f"worker-{worker}", phase)
    first = barriers.next_phase()
    assert first > max(seen)
    barriers.arrive("epoch", 2, "worker-0", first + 2)
    assert barriers.next_phase() > first + 2


def test_a_barrier_that_all_have_passed_is_open() -> None:
    """An answer that was lost, or a coordinator that came back: whoever asks again must not wait for ever."""
    barriers = Barriers()
    assert barriers.arrive("epoch", 1, "worker-0")
    (phase,) = barriers.pass_all(barriers.ready(["worker-0"]))
    again = Barriers(phase, barriers.passed)
    assert not again.arrive("epoch", 1, "worker-0")
    assert again.arrive("epoch", 2, "worker-0") and again.arrive("other", 1, "worker-0")


def test_who_comes_late_to_a_barrier_that_all_have_passed_stays_away() -> None:
    """Rounds went on without it: on one server one round more than on another."""
    assert Barriers.behind_passed(BARRIER_EPOCH + 2, BARRIER_EPOCH) == Passed(BARRIER_EPOCH + 2, is_away=True)
    assert Barriers.behind_passed(BARRIER_EPOCH, BARRIER_EPOCH) == Passed(BARRIER_EPOCH, is_away=True)
    assert Barriers.behind_passed(4, BARRIER_EPOCH) == Passed(BARRIER_EPOCH), (
        "it passed with the others, and has not heard so"
    )


def test_new_slices_go_to_servers_that_know_where_workers_stand() -> None:
    """One that came late has no standings before its first move; when nobody has, all are as good."""
    members = formed(2, 2)
    members.state.replica_sets = {0: ReplicaSet(0, "server-0"), 1: ReplicaSet(1, "server-1")}
    members.evict("server-1", "died")
    members.join("server", "server-1", "here", None, process="again")
    assert members.servers() == ["server-0", "server-1"] and members.hosts() == ["server-0"]
    members.state.replica_sets[1] = ReplicaSet(1, "server-1")
    assert members.hosts() == ["server-0", "server-1"]
    members.state.replica_sets = {}
    members.evict("server-0", "died")
    assert members.hosts() == ["server-1"]
