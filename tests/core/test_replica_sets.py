"""Seats: after any death every slice that somebody has is served, and plans bring all to where it should be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.core.replica_sets import PlacementPlan, ReplicaSet, SeedMove, by_source, plan, rehome, without

HOSTS = {"server-0": "a", "server-1": "a", "server-2": "b"}
SIZES = dict.fromkeys(range(8), 100)


def carry_out(replica_sets: list[ReplicaSet], wanted: PlacementPlan) -> list[ReplicaSet]:
    """A seed only ever goes from the slice's primary to a server that has nothing of it."""
    now = {replica_set.slice: replica_set for replica_set in replica_sets}
    for seed in wanted.seeds:
        assert seed.source == now[seed.slice].primary
        assert seed.target not in now[seed.slice].names
    seeded = {(seed.slice, seed.target) for seed in wanted.seeds}
    for replica_set in wanted.replica_sets:
        before = now[replica_set.slice]
        for name in replica_set.names:
            held = name in before.names or (replica_set.slice, name) in seeded
            assert not name or held, f"{replica_set} gives {name} a slice that it does not have"
        now[replica_set.slice] = replica_set
    return list(now.values())


def settled(
    replica_sets: list[ReplicaSet], hosts: dict[str, str], replicas: int, leaving: frozenset[str] = frozenset()
) -> list[ReplicaSet]:
    for _ in range(50):
        wanted = plan(replica_sets, SIZES, hosts, replicas=replicas, leaving=leaving)
        if wanted.is_empty:
            return replica_sets
        replica_sets = carry_out(replica_sets, wanted)
    raise AssertionError(f"plans do not come to an end: {wanted}")


def test_a_death_promotes_backups_and_loses_only_what_was_alone() -> None:
    replica_sets = [
        ReplicaSet(0, "server-0", ("server-1",)),
        ReplicaSet(1, "server-1", ("server-0",)),
        ReplicaSet(2, "server-0"),
    ]
    after, lost = without(replica_sets, {"server-0"})
    assert after == [ReplicaSet(0, "server-1"), ReplicaSet(1, "server-1"), ReplicaSet(2, "")] and lost == [2]
    after, lost = without(replica_sets, {"server-0", "server-1"})
    assert lost == [0, 1, 2] and all(not replica_set.primary and not replica_set.backups for replica_set in after)


def test_lost_slices_go_where_there_is_the_least() -> None:
    replica_sets = [
        ReplicaSet(0, "server-0"),
        ReplicaSet(1, "server-0"),
        ReplicaSet(2, "server-1"),
        ReplicaSet(3, ""),
        ReplicaSet(4, ""),
    ]
    found = rehome(replica_sets, SIZES, HOSTS)
    assert [replica_set.primary for replica_set in found] == [
        "server-0",
        "server-0",
        "server-1",
        "server-2",
        "server-1",
    ]
    assert rehome(replica_sets, SIZES, []) == replica_sets, "without a server they wait"


def test_a_backup_is_on_another_host_where_there_is_one() -> None:
    replica_sets = settled([ReplicaSet(k, "server-0") for k in range(2)], HOSTS, 2)
    assert all(HOSTS[replica_set.primary] != HOSTS[replica_set.backups[0]] for replica_set in replica_sets)
    alone = settled([ReplicaSet(0, "server-0")], {"server-0": "a", "server-1": "a"}, 2)
    assert alone == [ReplicaSet(0, "server-0", ("server-1",))], "on one host another process still helps"
    assert settled([ReplicaSet(0, "server-0")], {"server-0": "a"}, 2) == [ReplicaSet(0, "server-0")]


def test_nothing_is_planned_while_a_slice_has_no_primary() -> None:
    wanted = plan([ReplicaSet(0, ""), ReplicaSet(1, "server-0")], SIZES, HOSTS, replicas=2)
    assert wanted.is_empty and wanted.reason == "waits for a server"


def test_who_leaves_is_relieved_first() -> None:
    replica_sets = [
        ReplicaSet(0, "server-0", ("server-1",)),
        ReplicaSet(1, "server-1", ("server-0",)),
        ReplicaSet(2, "server-0"),
    ]
    wanted = plan(replica_sets, SIZES, HOSTS, replicas=2, leaving={"server-0"})
    assert wanted.reason == "server-0 leaves"
    assert wanted.replica_sets[:2] == (ReplicaSet(0, "server-1"), ReplicaSet(1, "server-1"))
    assert wanted.seeds == (SeedMove(2, "server-0", "server-2"),)


def test_primaries_are_moved_only_when_it_is_worth_it() -> None:
    even = [ReplicaSet(0, "server-0"), ReplicaSet(1, "server-1"), ReplicaSet(2, "server-0")]
    assert plan(even, SIZES, {"server-0": "a", "server-1": "a"}, replicas=1).is_empty
    uneven = [ReplicaSet(k, "server-0") for k in range(4)]
    wanted = plan(uneven, SIZES, {"server-0": "a", "server-1": "a"}, replicas=1)
    assert wanted.reason == "2 slices go from server-0 to server-1"
    wanted = plan(uneven[:2], SIZES, {"server-0": "a", "server-1": "a"}, replicas=1)
    assert wanted.reason == "1 slice goes from server-0 to server-1"


def test_what_is_planned_is_said_of_one_slice_and_of_several() -> None:
    reasons = [plan([ReplicaSet(k, "server-0") for k in range(n)], SIZES, HOSTS, replicas=2).reason for n in (1, 2)]
    assert reasons == ["1 slice gets a backup", "2 slices get a backup"]


def test_seeds_are_asked_for_by_source_and_target() -> None:
    seeds = [
        SeedMove(0, "server-0", "server-1"),
        SeedMove(1, "server-0", "server-2"),
        SeedMove(2, "server-0", "server-1"),
    ]
    assert by_source(seeds) == {("server-0", "server-1"): [0, 2], ("server-0", "server-2"): [1]}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(1, 2),
    st.sets(st.integers(0, 2), max_size=2),
)
def test_plans_come_to_an_end_with_every_slice_where_it_should_be(
    given: list[tuple[int, int]], replicas: int, leaving: set[int]
) -> None:
    """From any replica sets, whoever leaves: each plan can be carried out, and after some there is nothing left to
    do."""
    replica_sets = [
        ReplicaSet(k, f"server-{a}", () if a == b else (f"server-{b}",)) for k, (a, b) in enumerate(given)
    ]
    gone = frozenset(f"server-{k}" for k in leaving)
    after = settled(replica_sets, HOSTS, replicas, gone)
    staying = set(HOSTS) - gone
    for replica_set in after:
        assert replica_set.primary in staying
        if replicas == 1 or len(staying) < 2:
            assert not replica_set.backups
        else:
            assert set(replica_set.backups) < staying - {replica_set.primary} or set(
                replica_set.backups
            ) == staying - {replica_set.primary}
