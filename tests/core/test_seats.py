"""Seats: after any death every slice that somebody has is served, and plans bring all to where it should be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.core.seats import Plan, Seat, Seed, by_source, plan, rehome, without

HOSTS = {"server-0": "a", "server-1": "a", "server-2": "b"}
SIZES = dict.fromkeys(range(8), 100)


def carry_out(seats: list[Seat], wanted: Plan) -> list[Seat]:
    """A seed only ever goes from the slice's primary to a server that has nothing of it."""
    now = {seat.slice: seat for seat in seats}
    for seed in wanted.seeds:
        assert seed.source == now[seed.slice].primary
        assert seed.target not in now[seed.slice].names
    seeded = {(seed.slice, seed.target) for seed in wanted.seeds}
    for seat in wanted.seats:
        before = now[seat.slice]
        for name in seat.names:
            held = name in before.names or (seat.slice, name) in seeded
            assert not name or held, f"{seat} gives {name} a slice that it does not have"
        now[seat.slice] = seat
    return list(now.values())


def settled(
    seats: list[Seat], hosts: dict[str, str], replicas: int, leaving: frozenset[str] = frozenset()
) -> list[Seat]:
    for _ in range(50):
        wanted = plan(seats, SIZES, hosts, replicas=replicas, leaving=leaving)
        if wanted.is_empty:
            return seats
        seats = carry_out(seats, wanted)
    raise AssertionError(f"plans do not come to an end: {wanted}")


def test_a_death_promotes_backups_and_loses_only_what_was_alone() -> None:
    seats = [Seat(0, "server-0", ("server-1",)), Seat(1, "server-1", ("server-0",)), Seat(2, "server-0")]
    after, lost = without(seats, {"server-0"})
    assert after == [Seat(0, "server-1"), Seat(1, "server-1"), Seat(2, "")] and lost == [2]
    after, lost = without(seats, {"server-0", "server-1"})
    assert lost == [0, 1, 2] and all(not seat.primary and not seat.backups for seat in after)


def test_lost_slices_go_where_there_is_the_least() -> None:
    seats = [Seat(0, "server-0"), Seat(1, "server-0"), Seat(2, "server-1"), Seat(3, ""), Seat(4, "")]
    found = rehome(seats, SIZES, HOSTS)
    assert [seat.primary for seat in found] == ["server-0", "server-0", "server-1", "server-2", "server-1"]
    assert rehome(seats, SIZES, []) == seats, "without a server they wait"


def test_a_backup_is_on_another_host_where_there_is_one() -> None:
    seats = settled([Seat(k, "server-0") for k in range(2)], HOSTS, 2)
    assert all(HOSTS[seat.primary] != HOSTS[seat.backups[0]] for seat in seats)
    alone = settled([Seat(0, "server-0")], {"server-0": "a", "server-1": "a"}, 2)
    assert alone == [Seat(0, "server-0", ("server-1",))], "on one host another process still helps"
    assert settled([Seat(0, "server-0")], {"server-0": "a"}, 2) == [Seat(0, "server-0")]


def test_nothing_is_planned_while_a_slice_has_no_primary() -> None:
    wanted = plan([Seat(0, ""), Seat(1, "server-0")], SIZES, HOSTS, replicas=2)
    assert wanted.is_empty and wanted.reason == "waits for a server"


def test_who_leaves_is_relieved_first() -> None:
    seats = [Seat(0, "server-0", ("server-1",)), Seat(1, "server-1", ("server-0",)), Seat(2, "server-0")]
    wanted = plan(seats, SIZES, HOSTS, replicas=2, leaving={"server-0"})
    assert wanted.reason == "server-0 leaves"
    assert wanted.seats[:2] == (Seat(0, "server-1"), Seat(1, "server-1"))
    assert wanted.seeds == (Seed(2, "server-0", "server-2"),)


def test_primaries_are_moved_only_when_it_is_worth_it() -> None:
    even = [Seat(0, "server-0"), Seat(1, "server-1"), Seat(2, "server-0")]
    assert plan(even, SIZES, {"server-0": "a", "server-1": "a"}, replicas=1).is_empty
    uneven = [Seat(k, "server-0") for k in range(4)]
    wanted = plan(uneven, SIZES, {"server-0": "a", "server-1": "a"}, replicas=1)
    assert wanted.reason == "2 slices go from server-0 to server-1"
    wanted = plan(uneven[:2], SIZES, {"server-0": "a", "server-1": "a"}, replicas=1)
    assert wanted.reason == "1 slice goes from server-0 to server-1"


def test_what_is_planned_is_said_of_one_slice_and_of_several() -> None:
    reasons = [plan([Seat(k, "server-0") for k in range(n)], SIZES, HOSTS, replicas=2).reason for n in (1, 2)]
    assert reasons == ["1 slice gets a backup", "2 slices get a backup"]


def test_seeds_are_asked_for_by_source_and_target() -> None:
    seeds = [Seed(0, "server-0", "server-1"), Seed(1, "server-0", "server-2"), Seed(2, "server-0", "server-1")]
    assert by_source(seeds) == {("server-0", "server-1"): [0, 2], ("server-0", "server-2"): [1]}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(1, 2),
    st.sets(st.integers(0, 2), max_size=2),
)
def test_plans_come_to_an_end_with_every_slice_where_it_should_be(
    given: list[tuple[int, int]], replicas: int, leaving: set[int]
) -> None:
    """From any seats, whoever leaves: each plan can be carried out, and after some there is nothing left to do."""
    seats = [Seat(k, f"server-{a}", () if a == b else (f"server-{b}",)) for k, (a, b) in enumerate(given)]
    gone = frozenset(f"server-{k}" for k in leaving)
    after = settled(seats, HOSTS, replicas, gone)
    staying = set(HOSTS) - gone
    for seat in after:
        assert seat.primary in staying
        if replicas == 1 or len(staying) < 2:
            assert not seat.backups
        else:
            assert set(seat.backups) < staying - {seat.primary} or set(seat.backups) == staying - {seat.primary}
