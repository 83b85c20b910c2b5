"""The order of samples: nothing lost, nothing doubled, nothing kept in memory."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.leasing.order import ChunkedOrder, Order

seeds = st.integers(min_value=-(2**70), max_value=2**70)


def order(
    num_samples: int, seed: int, epoch: int, start: int, stop: int, *, shuffle: bool = True
) -> npt.NDArray[np.int64]:
    """The samples at positions start … stop−1 of an epoch."""
    return Order(num_samples, seed, epoch, shuffle).at(np.arange(start, stop))


@given(num_samples=st.integers(0, 3000), seed=seeds, epoch=st.integers(0, 1000))
def test_an_order_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    samples = order(num_samples, seed, epoch, 0, num_samples)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 8, 9, 10, 15, 16, 17, 99, 100, 101, 65535, 65536, 65537])
def test_an_order_is_a_permutation_around_squares(num_samples: int) -> None:
    """The rectangle behind the network changes its shape at squares: each side of one is looked at."""
    assert np.array_equal(np.sort(order(num_samples, 3, 1, 0, num_samples)), np.arange(num_samples))


@given(num_samples=st.integers(1, 2**62), seed=seeds, data=st.data())
def test_a_range_is_the_same_alone_and_inside_a_larger_one(num_samples: int, seed: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, num_samples - 1))
    last = min(num_samples, first + data.draw(st.integers(1, 50)))
    whole = order(num_samples, seed, 5, first, last)
    pieces = [order(num_samples, seed, 5, at, at + 1) for at in range(first, last)]
    assert np.array_equal(whole, np.concatenate(pieces))
    assert len(set(whole.tolist())) == last - first
    assert whole.min() >= 0 and whole.max() < num_samples


def test_a_billion_samples_cost_no_memory() -> None:
    tracemalloc.start()
    try:
        samples = order(10**9, 0, 0, 10**9 - 1000, 10**9)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert len(set(samples.tolist())) == 1000


def test_the_order_never_changes_between_releases() -> None:
    """A run that is resumed, or repeated a year later with the same seed, sees the same samples."""
    assert order(10, 0, 0, 0, 10).tolist() == [0, 7, 4, 1, 8, 9, 5, 6, 2, 3]
    assert order(60000, 1, 2, 30000, 30004).tolist() == [49860, 9818, 46192, 15245]
    assert order(10**9, 7, 0, 10**9 - 3, 10**9).tolist() == [844817616, 709696562, 470109715]


def test_seed_and_epoch_each_choose_another_order() -> None:
    """(seed 0, epoch 1) and (seed 1, epoch 0) are the pair that a plain sum of the two would confuse."""
    several = [(seed, epoch) for seed in range(-2, 6) for epoch in range(6)]
    starts = {tuple(order(60000, seed, epoch, 0, 8).tolist()) for seed, epoch in several}
    assert len(starts) == len(several)


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    for epoch in range(3):
        assert order(100, 4, epoch, 10, 20, shuffle=False).tolist() == list(range(10, 20))
    assert order(100, 4, 0, 10, 20).tolist() != list(range(10, 20))


@pytest.mark.parametrize("num_samples", [3, 4, pytest.param(5, marks=pytest.mark.proof)])
def test_every_order_of_a_tiny_data_set_is_equally_likely(num_samples: int) -> None:
    """Chi-square over all permutations: a network of too few rounds prefers some of them."""
    num_orders, expected = math.factorial(num_samples), 40
    positions = np.arange(num_samples)
    seen = Counter(tuple(Order(num_samples, seed).at(positions).tolist()) for seed in range(num_orders * expected))
    chi_square = sum(
        (seen[permutation] - expected) ** 2 / expected for permutation in itertools.permutations(range(num_samples))
    )
    freedom = num_orders - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_an_order_looks_random() -> None:
    """Neighbours, fixed points and positions are as independent as in a shuffle: four sigma and no more."""
    num_samples = 100_000
    samples = order(num_samples, 11, 0, 0, num_samples)
    places = np.arange(num_samples)
    assert (samples == places).sum() < 12  # one is expected, whatever the size
    assert abs(np.corrcoef(samples, places)[0, 1]) < 4 / math.sqrt(num_samples)
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 4 / math.sqrt(num_samples)
    # Each tenth of the positions draws evenly from each tenth of the samples.
    table = np.histogram2d(samples, places, bins=10)[0]
    assert ((table - 1000) ** 2 / 1000).sum() < 81 + 4 * math.sqrt(2 * 81)
    # Steps between neighbours do not repeat, as they would with a weak round function.
    assert Counter(np.diff(samples).tolist()).most_common(1)[0][1] < 12


@pytest.mark.parametrize("bit", range(0, 64, 7))
def test_one_bit_of_the_seed_changes_everything(bit: int) -> None:
    num_samples = 2**16
    changed = order(num_samples, 0, 0, 0, 2000) ^ order(num_samples, 1 << bit, 0, 0, 2000)
    flips = np.unpackbits(changed.astype("<u2").view(np.uint8)).mean()
    assert abs(flips - 0.5) < 0.02


chunks = st.lists(st.integers(0, 60), max_size=12).map(tuple)


@given(chunk_sizes=chunks, seed=seeds, epoch=st.integers(0, 1000))
def test_a_chunked_order_is_a_permutation(chunk_sizes: tuple[int, ...], seed: int, epoch: int) -> None:
    num_samples = sum(chunk_sizes)
    samples = ChunkedOrder(chunk_sizes, seed, epoch).at(np.arange(num_samples))
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(num_samples))


@given(chunk_sizes=chunks, seed=seeds)
def test_a_chunk_is_finished_before_the_next_begins(chunk_sizes: tuple[int, ...], seed: int) -> None:
    """What makes a row group be read once: the chunks come one after the other, each whole."""
    samples = ChunkedOrder(chunk_sizes, seed).at(np.arange(sum(chunk_sizes)))
    owner = np.repeat(np.arange(len(chunk_sizes)), chunk_sizes)[samples]
    assert [chunk for chunk, _ in itertools.groupby(owner.tolist())] == list(dict.fromkeys(owner.tolist()))


@given(chunk_sizes=chunks, seed=seeds, data=st.data())
def test_a_chunked_order_is_the_same_at_any_positions(
    chunk_sizes: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    whole = ChunkedOrder(chunk_sizes, seed, 3).at(np.arange(sum(chunk_sizes)))
    positions = data.draw(st.permutations(range(sum(chunk_sizes))))
    some = np.array(positions[: data.draw(st.integers(0, len(positions)))], dtype=np.int64)
    assert np.array_equal(ChunkedOrder(chunk_sizes, seed, 3).at(some), whole[some])


@pytest.mark.parametrize("size", [4095, 4096, 4097, 65536])
def test_large_chunks_with_fewer_rounds_still_look_random(size: int) -> None:
    samples = ChunkedOrder((size, size), 5, 1).at(np.arange(2 * size))
    assert np.array_equal(np.sort(samples), np.arange(2 * size))
    first = samples[:size] % size
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 4 / math.sqrt(size)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 4 / math.sqrt(size)
    assert Counter(np.diff(first).tolist()).most_common(1)[0][1] < 12
    assert not np.array_equal(first, samples[size:] % size)  # each chunk has an order of its own


def test_a_chunked_order_of_a_billion_samples_costs_by_its_chunks() -> None:
    order = ChunkedOrder((10**6,) * 1000, 1, 2)
    tracemalloc.start()
    try:
        samples = order.at(np.arange(10**9 - 1000, 10**9))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert len(set(samples.tolist())) == 1000 and len(set((samples // 10**6).tolist())) == 1


def test_the_chunked_order_never_changes_between_releases() -> None:
    assert ChunkedOrder((3, 0, 4, 2), 0, 0).at(np.arange(9)).tolist() == [7, 8, 5, 3, 6, 4, 1, 2, 0]
    assert ChunkedOrder((5000, 6000), 1, 2).at(np.arange(5998, 6002)).tolist() == [7049, 7313, 1651, 1833]


def test_seed_and_epoch_each_choose_another_chunked_order() -> None:
    several = [(seed, epoch) for seed in range(-2, 6) for epoch in range(6)]
    starts = {tuple(ChunkedOrder((5000, 6000), *each).at(np.arange(8)).tolist()) for each in several}
    assert len(starts) == len(several)


def test_without_shuffle_a_chunked_order_is_the_data_sets() -> None:
    assert ChunkedOrder((3, 4), 1, 1, shuffle=False).at(np.arange(7)).tolist() == list(range(7))
