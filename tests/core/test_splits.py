"""The shares of workers: every position taken once, whatever the number of workers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from syncline.core.leasing.order import ByRank

shares = st.fixed_dictionaries(
    {
        "num_samples": st.integers(0, 400),
        "batch_size": st.integers(1, 20),
        "world_size": st.integers(1, 9),
        "drop_last": st.booleans(),
    }
)


def batches(share: ByRank) -> list[list[int]]:
    return [list(range(*share.batch(k))) for k in range(share.num_batches)]


@given(shares)
def test_the_shares_of_all_ranks_cover_every_position_once(given: dict[str, Any]) -> None:
    world = [ByRank(rank=rank, **given) for rank in range(given["world_size"])]
    taken = [position for share in world for batch in batches(share) for position in batch]
    wide = given["batch_size"] * given["world_size"]
    num_expected = given["num_samples"]
    if given["drop_last"]:
        num_expected -= num_expected % wide
    assert sorted(taken) == list(range(num_expected))


@given(shares)
def test_a_global_batch_is_the_same_positions_for_any_number_of_workers(given: dict[str, Any]) -> None:
    """What makes a synchronous job comparable with one process that takes the whole global batch."""
    world = [batches(ByRank(rank=rank, **given)) for rank in range(given["world_size"])]
    alone = ByRank(given["num_samples"], given["batch_size"] * given["world_size"], drop_last=given["drop_last"])
    for k, expected in enumerate(batches(alone)):
        parts = [rank[k] for rank in world if k < len(rank)]
        assert [position for part in parts for position in part] == expected


@given(shares)
def test_no_batch_is_empty_or_too_large_and_only_the_last_is_partial(given: dict[str, Any]) -> None:
    for rank in range(given["world_size"]):
        share = ByRank(rank=rank, **given)
        sizes = [len(batch) for batch in batches(share)]
        assert all(size == given["batch_size"] for size in sizes[:-1])
        assert all(1 <= size <= given["batch_size"] for size in sizes[-1:])
        assert list(range(*share.batch(share.num_batches + 1))) == []


def test_the_last_global_batch_is_shared_evenly() -> None:
    """Ten samples, three workers, batches of two: six whole, then four in parts of 1, 1 and 2."""
    world = [ByRank(10, 2, rank, 3) for rank in range(3)]
    assert [batches(share) for share in world] == [[[0, 1], [6]], [[2, 3], [7]], [[4, 5], [8, 9]]]


def test_a_rank_without_a_part_of_the_last_batch_has_one_batch_less() -> None:
    assert [ByRank(7, 2, rank, 3).num_batches for rank in range(3)] == [1, 1, 2]
    assert [ByRank(1, 4, rank, 3).num_batches for rank in range(3)] == [0, 0, 1]
    assert [ByRank(7, 2, rank, 3, drop_last=True).num_batches for rank in range(3)] == [1, 1, 1]


def test_the_share_of_a_billion_samples_is_arithmetic() -> None:
    share = ByRank(10**9, 64, 7, 8)
    assert share.num_batches == 1_953_125
    assert share.batch(share.num_batches - 1) == (10**9 - 64, 10**9)
