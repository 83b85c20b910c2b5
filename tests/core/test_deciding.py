"""Deciding: what a coordinator does next, also when a server dies in the middle of it, or the coordinator itself."""

from __future__ import annotations

import msgspec
import pytest

from syncline.config import JobConfig
from syncline.core.members import Standing
from syncline.core.membership import JobState, Membership
from syncline.core.reconfigure import Planner, Reconfiguration
from syncline.core.replica_sets import PlacementPlan, ReplicaSet
from syncline.core.wire.control import Entered, Prepared
from syncline.errors import ConfigError

SIZES = {0: 4, 1: 4}


def formed(*replica_sets: ReplicaSet, servers: int = 2, workers: int = 2, replicas: int = 1) -> Planner:
    config = JobConfig(workers=workers, servers=servers, replicas=replicas, most_workers=workers + 2)
    membership = Membership(JobState(config=config))
    for role, count in (("server", servers), ("worker", workers)):
        for k in range(count):
            membership.join(role, f"{role}-{k}", f"host-{k}", None)
    membership.form()
    membership.state.replica_sets = {replica_set.slice: replica_set for replica_set in replica_sets}
    return Planner(membership)


def lose(deciding: Planner, name: str) -> None:
    member = deciding.state.members[name]
    Membership(deciding.state).evict(name, "died")
    deciding.is_out(member)


def seats_of(deciding: Planner) -> list[tuple[str, str]]:
    return [
        (replica_set.primary, ",".join(replica_set.backups)) for replica_set in deciding.state.replica_sets.values()
    ]


def begun(deciding: Planner, wanted: PlacementPlan | None = None) -> Reconfiguration:
    change = deciding.begin(wanted, SIZES)
    assert change is not None
    return change


def carried_out(deciding: Planner, wanted: PlacementPlan | None = None) -> Reconfiguration:
    change = begun(deciding, wanted)
    deciding.install(change)
    deciding.settle(change)
    deciding.finish(change)
    return change


def test_a_dead_worker_is_fenced_and_forgotten_when_every_server_has_it() -> None:
    deciding = formed(ReplicaSet(0, "server-0"))
    lose(deciding, "worker-1")
    assert deciding.is_urgent
    change = begun(deciding)
    assert change.fenced == {"worker-1": 4} and not change.moves and deciding.state.is_changing
    deciding.settle(change)
    assert not deciding.state.fencing and not deciding.state.is_changing
    deciding.finish(change)
    assert not deciding.is_urgent


def test_what_could_not_be_kept_is_done_once_more() -> None:
    """The disk was full when a fence was everywhere: the survivors are told by the next change."""
    deciding = formed(ReplicaSet(0, "server-0"))
    lose(deciding, "worker-1")
    change = begun(deciding)
    deciding.settle(change)
    deciding.reopen()
    assert deciding.is_urgent


def test_whoever_enters_gets_one_place_however_often_it_asks() -> None:
    deciding = formed(ReplicaSet(0, "server-0"))
    member = Membership(deciding.state).join("worker", "worker-2", "host-9", None)
    assert deciding.enter("worker-2", member.incarnation, 0) is None and deciding.is_urgent
    change = begun(deciding)
    assert change.entering == {"worker-2": member.incarnation} and "worker-2" not in change.staying
    for server in change.servers:
        change.prepared(server, Prepared([Standing("worker-0", 3, clock=5, phase=2, phase_began=1)], 0))
    deciding.settle(change)
    assert deciding.finish(change) == {"worker-2": Entered(2, 0)}
    assert deciding.enter("worker-2", member.incarnation, 0) == Entered(2, 0)
    assert not deciding.is_urgent, "it has its place"
    assert deciding.enter("worker-2", member.incarnation + 1, 0) is None, "another process of that name has none"


def test_who_enters_again_stays_and_gets_another_place() -> None:
    """It came late to a barrier, and was away. Until it has its place, it counts as one who takes part."""
    deciding = formed(ReplicaSet(0, "server-0"))
    life = deciding.state.entered["worker-1"]
    assert deciding.enter("worker-1", life, 0) is None
    change = begun(deciding)
    assert change.entering == {"worker-1": life} and change.staying["worker-1"] == life
    for server in change.servers:
        change.prepared(server, Prepared([Standing("worker-1", life, clock=5, phase=2, at_barrier=True)], 0))
    deciding.settle(change)
    assert deciding.finish(change) == {"worker-1": Entered(2, 0)}
    assert deciding.enter("worker-1", life, 0) == Entered(2, 0)
    assert deciding.enter("worker-1", life, 1) is None, "that was the time before"


def test_the_last_server_cannot_retire() -> None:
    deciding = formed(ReplicaSet(0, "server-0"))
    deciding.retire("server-0")
    with pytest.raises(ConfigError, match="server-1 is the last server"):
        deciding.retire("server-1")
    assert deciding.relieved() == []
    assert deciding.plan(SIZES, [0]).reason == "server-0 leaves"
    deciding.state.replica_sets[0] = ReplicaSet(0, "server-1")
    assert deciding.relieved() == ["server-0"]


def test_a_stranger_gets_no_slices_before_it_knows_the_layout() -> None:
    deciding = formed(ReplicaSet(0, "server-0"), ReplicaSet(1, "server-0"), replicas=2)
    deciding.strangers.add("server-1")
    assert deciding.plan(SIZES, [0, 1]).is_empty
    deciding.strangers.clear()
    assert not deciding.plan(SIZES, [0, 1]).is_empty


def test_a_coordinator_that_dies_right_after_a_server_tells_of_the_promotion_when_it_is_back() -> None:
    """The eviction was on disk, the change was not begun: nobody else would ever make the backup a primary."""
    deciding = formed(ReplicaSet(0, "server-0", ("server-1",)), replicas=2)
    Membership(deciding.state).evict("server-0", "died")
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(deciding.state), type=JobState)
    after = Planner(Membership(kept))
    after.resume()
    assert after.is_urgent and after.moves
    assert begun(after).moves


def test_a_death_within_a_change_makes_the_next_one() -> None:
    deciding = formed(ReplicaSet(0, "server-0", ("server-1",)), replicas=2)
    change = begun(deciding)
    lose(deciding, "server-1")
    deciding.settle(change)
    deciding.finish(change)
    assert deciding.is_urgent and deciding.moves and deciding.state.is_changing


# -- plans that have to make way --------------------------------------------------------------------------


def test_a_plan_waits_for_what_is_urgent() -> None:
    deciding = formed(ReplicaSet(0, "server-0"))
    deciding.moves = True
    assert deciding.begin(PlacementPlan((), (ReplicaSet(0, "server-1"),), ""), SIZES) is None
    assert seats_of(deciding) == [("server-0", "")]


def test_a_slice_that_was_to_move_is_not_lost_with_where_it_was_to_go() -> None:
    """No server has installed the new replica set: the old primary has everything, and nothing is to be revoked."""
    deciding = formed(ReplicaSet(0, "server-0"))
    begun(deciding, PlacementPlan((), (ReplicaSet(0, "server-1"),), "moves"))
    lose(deciding, "server-1")
    assert seats_of(deciding) == [("server-0", "")] and not deciding.state.lost
    assert deciding.moves and deciding.is_urgent


def test_once_it_may_be_installed_a_slice_is_lost_with_its_new_primary() -> None:
    deciding = formed(ReplicaSet(0, "server-0"))
    change = begun(deciding, PlacementPlan((), (ReplicaSet(0, "server-1"),), "moves"))
    deciding.install(change)
    lose(deciding, "server-1")
    assert deciding.state.lost == [0]
    assert begun(deciding).replica_sets == [ReplicaSet(0, "server-0")], "a worker's copy goes there"


def test_a_plan_that_is_taken_back_does_not_count_on_a_backup_that_was_let_go() -> None:
    """Asked to prepare a replica set without its backup, a primary acknowledges alone: what the backup has is old by
    now."""
    deciding = formed(ReplicaSet(0, "server-0", ("server-1",)), ReplicaSet(1, "server-1", ("server-0",)), replicas=2)
    begun(
        deciding,
        PlacementPlan((), (ReplicaSet(0, "server-0"), ReplicaSet(1, "server-0", ("server-1",))), "server-1 leaves"),
    )
    assert deciding.moves
    deciding.take_back()
    assert seats_of(deciding) == [("server-0", ""), ("server-1", "server-0")]
    assert not deciding.moves and not deciding.state.is_changing


def test_a_plan_is_taken_back_without_the_servers_that_are_gone() -> None:
    deciding = formed(
        ReplicaSet(0, "server-0", ("server-1",)), ReplicaSet(1, "server-1", ("server-0",)), replicas=2, servers=3
    )
    begun(deciding, PlacementPlan((), (ReplicaSet(0, "server-1", ("server-0",)),), "even"))
    lose(deciding, "server-1")
    assert seats_of(deciding) == [("server-0", ""), ("server-0", "")]
    assert deciding.state.is_changing and deciding.moves


def test_a_plan_that_a_death_has_taken_back_may_be_taken_back_once_more() -> None:
    """A server dies in the moment in which the plan is found to have to wait."""
    deciding = formed(ReplicaSet(0, "server-0", ("server-1",)), replicas=2)
    begun(deciding, PlacementPlan((), (ReplicaSet(0, "server-1", ("server-0",)),), "even"))
    lose(deciding, "server-1")
    deciding.take_back()
    assert seats_of(deciding) == [("server-0", "")] and deciding.moves and deciding.state.is_changing


# -- what is said of losses -------------------------------------------------------------------------------


def losses(deciding: Planner, *answers: Prepared) -> list[str]:
    change = begun(deciding)
    for server, answer in zip(change.servers, answers, strict=True):
        change.prepared(server, answer)
    return [loss.text for loss in deciding.install(change)[1]]


def test_what_is_lost_is_said_once() -> None:
    """Slices remember for as long as they are there, and every change looks at them."""
    deciding = formed(ReplicaSet(0, "server-0"), ReplicaSet(1, "server-1"))
    lose(deciding, "worker-1")
    here = Prepared([], 0, [("worker-1", 4, 5)], [("worker-1", 4, 5, "server-0#1")])
    there = Prepared([], 0, [("worker-1", 4, 4)], [("worker-1", 4, 4, "server-1#2")])
    assert losses(deciding, here, there) == ["step 5 of worker-1 is on some slices and not on others"]
    assert losses(deciding, here, there) == []


def test_what_was_registered_while_a_plan_was_under_way_is_lost_with_its_server_too() -> None:
    """Only the plan's own replica sets are as before it; and a segment that was taken back meanwhile is no
    trouble."""
    deciding = formed(ReplicaSet(0, "server-0"), ReplicaSet(1, "server-1"), replicas=2)
    assert deciding.begin(deciding.plan(SIZES, [0, 1]), SIZES) is not None
    deciding.state.replica_sets[7] = ReplicaSet(7, "server-1")
    del deciding.state.replica_sets[0]
    lose(deciding, "server-1")
    assert set(deciding.state.lost) == {1, 7}


def ring(*replica_sets: ReplicaSet, num: int) -> Planner:
    """`num` processes of a ring, and these replica sets."""
    settings = {"exchange": "ring", "workers": num, "servers": num, "replicas": num, "most_workers": num}
    membership = Membership(JobState(config=JobConfig(**settings)))
    for k in range(num):
        for role in ("worker", "server"):
            membership.join(role, f"{role}-{k}", "here", None)
    membership.form()
    membership.state.replica_sets = {replica_set.slice: replica_set for replica_set in replica_sets}
    return Planner(membership)


BOTH = [ReplicaSet(0, "server-0", ("server-1",)), ReplicaSet(1, "server-1", ("server-0",))]


def test_a_joiner_of_a_ring_counts_for_nothing_before_it_has_everything() -> None:
    """It is given all within the change that names it: of whoever dies meanwhile, others have the slices."""
    deciding = ring(*BOTH, num=3)
    change = begun(deciding, deciding.plan(SIZES, [0, 1]))
    assert [replica_set.names for replica_set in change.replica_sets] == [
        ("server-0", "server-1", "server-2"),
        ("server-1", "server-0", "server-2"),
    ]
    deciding.install(change)
    lose(deciding, "server-0")
    assert seats_of(deciding) == [("server-1", ""), ("server-1", "")] and not deciding.state.lost


def test_when_it_has_everything_it_is_as_good_as_any() -> None:
    deciding = ring(*BOTH, num=3)
    carried_out(deciding, deciding.plan(SIZES, [0, 1]))
    lose(deciding, "server-0")
    assert sorted(name for replica_set in deciding.state.replica_sets.values() for name in replica_set.names) == [
        "server-1", "server-1", "server-2", "server-2",
    ]  # fmt: skip


def test_who_was_about_to_leave_a_ring_may_have_let_go_already() -> None:
    deciding = ring(*[ReplicaSet(k, "server-0", ("server-1", "server-2")) for k in (0, 1)], num=3)
    deciding.retire("server-0")
    change = begun(deciding, deciding.plan(SIZES, [0, 1]))
    deciding.install(change)
    lose(deciding, "server-1")
    assert seats_of(deciding) == [("server-2", ""), ("server-2", "")]


def test_a_coordinator_that_comes_back_does_not_count_on_a_joiner_either() -> None:
    deciding = ring(*BOTH, num=3)
    deciding.install(begun(deciding, deciding.plan(SIZES, [0, 1])))
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(deciding.state), type=JobState)
    Membership(kept).evict("server-0", "died")  # its last word before it died itself
    back = Planner(Membership(kept))
    back.resume()
    assert back.moves and seats_of(back) == [("server-1", ""), ("server-1", "")]


def test_who_has_ended_stays_as_a_second_copy() -> None:
    """Its script has ended: it may leave while two others have everything. Who was told to leave may in any case."""
    three = ("server-1", "server-2")
    deciding = ring(ReplicaSet(0, "server-0", three), ReplicaSet(1, "server-0", three), num=3)
    membership = Membership(deciding.state)
    for name in ("worker-0", "worker-1"):
        membership.leave(name)
    carried_out(deciding)
    deciding.retire("server-0")
    with pytest.raises(ConfigError, match="server-1 stays: else only server-2 would have its slices"):
        deciding.retire("server-1")
    assert [replica_set.names for replica_set in deciding.plan(SIZES, [0, 1]).replica_sets] == [three, three[::-1]]
    lose(deciding, "server-2")
    carried_out(deciding)
    replica_sets = {
        **deciding.state.replica_sets,
        **{replica_set.slice: replica_set for replica_set in deciding.plan(SIZES, [0, 1]).replica_sets},
    }
    assert [sorted(replica_set.names) for replica_set in replica_sets.values()] == [["server-0", "server-1"]] * 2, (
        "and it stays"
    )
    membership.state.finished.clear()  # as where it was told to leave
    deciding.has_left("server-0")
    deciding.retire("server-1")
    assert deciding.plan(SIZES, [0, 1]).reason == "server-1 leaves"


def test_the_last_one_of_a_ring_leaves_when_another_has_everything() -> None:
    """Nothing is seeded before the change in a ring: who is to take it over is a backup first."""
    deciding = ring(*[ReplicaSet(k, "server-0") for k in (0, 1)], num=2)
    deciding.retire("server-0")
    wanted = deciding.plan(SIZES, [0, 1])
    assert [replica_set.names for replica_set in wanted.replica_sets] == [("server-0", "server-1")] * 2
    assert wanted.reason == "2 slices, all on server-0, server-1"
    carried_out(deciding, wanted)
    wanted = deciding.plan(SIZES, [0, 1])
    assert [replica_set.names for replica_set in wanted.replica_sets] == [
        ("server-1",)
    ] * 2 and wanted.reason == "server-0 leaves"
