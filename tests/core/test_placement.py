"""Placement: every server gets its even share of the bytes, and every byte one server."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.layout import ALIGN, Layout, Parameter, Segment, arrange, place
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rule import Rule

CUT = (Rule("Adam", lr=0.1),)
MIXED = (Rule("Adam", lr=0.1), Rule("Adafactor", lr=0.1))
DTYPES = ("float32", "float64", "bfloat16")


def servers_of(count: int) -> list[str]:
    return [f"server-{k}" for k in range(count)]


@st.composite
def models(draw: st.DrawFn, groups: int = 1, largest: int = 50_000) -> list[Parameter]:
    sizes = draw(st.lists(st.integers(0, largest), min_size=1, max_size=12))
    return [
        Parameter(f"p{k}", draw(st.sampled_from(DTYPES)), (size,), draw(st.integers(0, groups - 1)))
        for k, size in enumerate(sizes)
    ]


Placed = tuple[Segment, list[ReplicaSet]]


def loads_of(placed: Placed, servers: list[str]) -> dict[str, int]:
    segment, replica_sets = placed
    where = {replica_set.slice: replica_set.primary for replica_set in replica_sets}
    return {s: sum(part.num_bytes for part in segment.slices if where[part.id] == s) for s in servers}


def check_even(loads: dict[str, int]) -> None:
    """Within 5 % of even; the smallest thing that can be moved is 64 bytes, so a tiny total is even to that."""
    even = sum(loads.values()) / len(loads)
    assert all(abs(load - even) <= max(0.05 * even, ALIGN) for load in loads.values()), loads


@given(models(), st.integers(1, 8), st.sampled_from([64, 4096, 1 << 16, 4 << 20]))
def test_servers_are_within_five_percent_of_even(parameters: list[Parameter], count: int, slice_bytes: int) -> None:
    """The slowest server is the speed of a round: one with twice the bytes halves it."""
    servers = servers_of(count)
    check_even(loads_of(place(arrange(parameters, CUT, "mean"), servers, {}, slice_bytes, 0), servers))


@given(models(), models(), st.integers(2, 8))
def test_a_second_segment_fills_up_what_the_first_left_uneven(
    first: list[Parameter], second: list[Parameter], count: int
) -> None:
    """With two registrations the sum counts; the second one must see what the first one has placed."""
    servers = servers_of(count)
    # One whole tensor makes the first segment as uneven as it gets.
    one = place(arrange([*first, Parameter("whole", "float32", (40_000,), 1)], MIXED, "mean"), servers, {}, 4096, 0)
    before = loads_of(one, servers)
    two = place(arrange(second, CUT, "mean", index=1), servers, before, 4096, len(one[0].slices))
    after = {s: before[s] + load for s, load in loads_of(two, servers).items()}
    # As even as it can be: nobody who was given anything stands above anybody else by more than the granule.
    given = [s for s in servers if after[s] > before[s]]
    assert all(after[s] <= min(after.values()) + 2 * ALIGN for s in given), (before, after)
    if sum(loads_of(two, servers).values()) >= sum(max(before.values()) - load for load in before.values()):
        check_even(after)


@given(models(groups=2), st.integers(1, 6), st.sampled_from([256, 4096, 1 << 20]))
def test_whole_tensors_are_as_even_as_they_allow(parameters: list[Parameter], count: int, slice_bytes: int) -> None:
    """Largest first to the least loaded: the gap is at most one block, and what can be cut fills the gap."""
    servers = servers_of(count)
    loads = loads_of(place(arrange(parameters, MIXED, "mean"), servers, {}, slice_bytes, 0), servers)
    sizes = [-(-p.num_bytes // ALIGN) * ALIGN for p in parameters if p.group == 1]
    block = max([*sizes, slice_bytes // 4] if sizes else [0])  # small whole tensors stay together
    assert max(loads.values()) - min(loads.values()) <= block + ALIGN, loads
    free = sum(-(-p.num_bytes // ALIGN) * ALIGN for p in parameters if p.group == 0)
    if free >= count * block:
        check_even(loads)


@given(models(groups=2), st.integers(1, 6), st.sampled_from([64, 256, 4096, 1 << 16]), st.integers(0, 50))
def test_slices_are_of_the_size_asked_for_and_tile_the_segment(
    parameters: list[Parameter], count: int, slice_bytes: int, first: int
) -> None:
    """A byte in no slice is on no server; one in two slices is on two, and they drift apart."""
    segment, replica_sets = place(arrange(parameters, MIXED, "mean"), servers_of(count), {}, slice_bytes, first)
    assert [replica_set.slice for replica_set in replica_sets] == [part.id for part in segment.slices], (
        "a replica set for every slice"
    )
    assert all(replica_set.primary in servers_of(count) and not replica_set.backups for replica_set in replica_sets)
    assert [part.id for part in segment.slices] == list(range(first, first + len(segment.slices)))
    parts = sorted(segment.slices, key=lambda part: part.offset)
    assert all(one.offset + one.num_bytes == two.offset for one, two in itertools.pairwise(parts))
    assert sum(part.num_bytes for part in parts) == segment.num_bytes
    for part in parts:
        assert part.num_bytes % ALIGN == 0 and part.num_bytes > 0
        if all(segment.rule_of(segment.parameters[p.parameter]).elementwise for p in segment.pieces(part)):
            assert part.num_bytes <= slice_bytes + ALIGN


def test_four_mebibytes_of_one_tensor_over_two_servers() -> None:
    """The picture of the docs: 24 MiB, slices of 4 MiB, three each."""
    segment, replica_sets = place(
        arrange([Parameter("w", "float32", (6 << 20,))], CUT, "mean"), servers_of(2), {}, 4 << 20, 0
    )
    assert [
        (replica_set.primary, part.num_bytes) for replica_set, part in zip(replica_sets, segment.slices, strict=True)
    ] == [
        *[("server-0", 4 << 20)] * 3,
        *[("server-1", 4 << 20)] * 3,
    ]


def test_more_servers_than_granules_leaves_some_empty() -> None:
    """128 bytes on four servers: two have 64 each, two have none, and none of the bytes is lost."""
    servers = servers_of(4)
    placed = place(arrange([Parameter("w", "float32", (32,))], CUT, "mean"), servers, {}, 4 << 20, 0)
    assert sorted(loads_of(placed, servers).values()) == [0, 0, 64, 64]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_equal_models_are_placed_equally(count: int) -> None:
    """A coordinator that comes back must come to the same placement from the same registration."""
    parameters = [Parameter(f"p{k}", DTYPES[k % 3], (k * 997 % 5000,), k % 2) for k in range(20)]
    made = [place(arrange(parameters, MIXED, "mean"), servers_of(count), {}, 4096, 0) for _ in range(2)]
    assert made[0] == made[1]


def test_a_hundred_registrations_stay_even() -> None:
    """Rounding must not add up: with each segment the levels are looked at again."""
    servers, layout = servers_of(3), Layout()
    loads = dict.fromkeys(servers, 0)
    for index in range(100):
        parameters = [Parameter(f"p{index}", "float32", (100 + 7 * index,))]
        bare = arrange(parameters, CUT, "mean", index=index, ordinal=index, first_parameter=index)
        placed = place(bare, servers, loads, 1024, layout.num_slices)
        layout.add(placed[0])
        for server, load in loads_of(placed, servers).items():
            loads[server] += load
    assert max(loads.values()) - min(loads.values()) <= 2 * ALIGN
    assert [part.id for part in layout.slices()] == list(range(layout.num_slices))
