"""Which sample comes when: pure arithmetic on positions.

An epoch is a sequence of positions 0 … n−1; an order says which sample stands at a position. `Order` mixes all
samples, `ChunkedOrder` mixes pieces and what is in each piece, for data that is read a piece at a time. Neither
holds anything per sample, so 10⁹ samples cost as little as ten.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
# The increment and the multipliers of splitmix64; the shifts further down are its too.
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# Four rounds look random on large data sets. On tiny ones some orders would still be commoner than others:
# with 6 samples and 36,000 seeds a chi-square test tells 12 rounds from random (7 sigma), but no longer 16.
_NUM_ROUNDS = 16
# Inside a large chunk six do, and a quick order matters there: reading the chunk may cost less than 100 ns a sample.
_FEWER_ROUNDS, _LARGE_CHUNK = 6, 4096
_MOST_SAMPLES = 1 << 62  # a coordinate stays below 2³²: added to 63 random bits it never wraps around


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of the samples in one epoch: a permutation chosen by (seed, epoch), evaluated where needed.

    A Feistel network on a rectangle rows × columns that just holds all samples: each round shifts one
    coordinate by a keyed hash of the other, which can be undone, so no sample is lost or doubled. What lands
    in the few cells beyond the last sample walks on until it lands inside.
    """

    num_samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True  #: False: the samples as they lie in the data set, every epoch

    def __post_init__(self) -> None:
        assert 0 <= self.num_samples <= _MOST_SAMPLES, self.num_samples

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples that stand at these positions, each in 0 … num_samples−1."""
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.num_samples)
        if not self.shuffle:
            return positions.astype(np.int64)
        return _shuffled(positions, self.num_samples, _round_keys(self.seed, self.epoch))


#: Hashes of so many numbers at most are kept as a table: enough for chunks of 16 million samples.
_MOST_TABULATED = 1 << 12


@dataclasses.dataclass(frozen=True)
class ChunkedOrder:
    """An order for samples that are read a chunk at a time: chunks at random, and at random inside each chunk.

    Consecutive positions lie in few chunks, so that a batch reads few row groups; the chunks themselves are
    never mixed with each other. Also a permutation chosen by (seed, epoch) alone; it holds three numbers per chunk.
    """

    chunk_sizes: tuple[int, ...]
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True  #: False: the samples as they lie in the data set, every epoch

    def __post_init__(self) -> None:
        assert all(size >= 0 for size in self.chunk_sizes)
        assert self.num_samples <= _MOST_SAMPLES, self.num_samples

    @functools.cached_property
    def num_samples(self) -> int:
        """How many samples all chunks have together."""
        return sum(self.chunk_sizes)

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples that stand at these positions, each in 0 … num_samples−1."""
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.num_samples)
        if not self.shuffle:
            return positions.astype(np.int64)
        turns = np.searchsorted(self._turns[1], positions, side="right")
        different = np.flatnonzero(np.bincount(turns)).tolist()
        if len(different) == 1:
            return self._inside(different[0], positions)
        samples = np.empty(positions.shape, dtype=np.int64)
        for turn in different:
            here = np.flatnonzero(turns == turn)
            samples[here] = self._inside(turn, positions[here])
        return samples

    def _inside(self, turn: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples at positions that all lie in one chunk, the one that has this turn."""
        chunks, stops, starts = self._turns
        chunk = int(chunks[turn])
        size = self.chunk_sizes[chunk]
        keys = _round_keys(_mixed(operator.index(self.seed)) + chunk + 1, self.epoch)
        num_rounds = _FEWER_ROUNDS if size >= _LARGE_CHUNK else _NUM_ROUNDS
        inside = _shuffled(positions - (int(stops[turn]) - size), size, keys[:num_rounds])
        inside += starts[chunk]
        return inside

    @functools.cached_property
    def _turns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which chunk has which turn, the position where each turn ends, and each chunk's first sample."""
        sizes = np.asarray(self.chunk_sizes, dtype=np.int64)
        chunks = Order(sizes.size, self.seed, self.epoch).at(np.arange(sizes.size))
        return chunks, np.cumsum(sizes[chunks]), np.cumsum(sizes) - sizes


def _shuffled(positions: npt.NDArray[np.int64], num_samples: int, keys: list[int]) -> npt.NDArray[np.int64]:
    """The network on the smallest rectangle, near a square, that holds all samples."""
    rows = math.isqrt(max(num_samples - 1, 0)) + 1
    columns = -(-num_samples // rows)
    if not positions.size:
        return positions.astype(np.int64)
    cells = _permuted(positions.astype(np.uint64), rows, columns, keys)
    while (outside := np.flatnonzero(cells >= num_samples)).size:
        cells[outside] = _permuted(cells[outside], rows, columns, keys)
    return cells.astype(np.int64)


def _permuted(cells: npt.NDArray[np.uint64], rows: int, columns: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    """One pass of the network over cells of a rows × columns rectangle: a bijection of it."""
    column = cells // np.uint64(rows)
    row = cells - column * np.uint64(rows)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            _rotate(row, rows, column, columns, key)
        else:
            _rotate(column, columns, row, rows, key)
    return column * np.uint64(rows) + row


def _rotate(
    values: npt.NDArray[np.uint64], size: int, others: npt.NDArray[np.uint64], num_others: int, key: int
) -> None:
    """Adds a hash of `others`, which are below `num_others`, to values below `size`, modulo `size`."""
    if num_others <= _MOST_TABULATED:
        values += _table(key, num_others, size)[others]
    else:
        values += _hashed(others, key) % np.uint64(size)
    np.minimum(values, values - np.uint64(size), out=values)  # below 0 an unsigned number is very large


@functools.lru_cache(maxsize=64)
def _table(key: int, num_values: int, size: int) -> npt.NDArray[np.uint64]:
    """The hashes of 0 … num_values−1, modulo `size`: a batch has more samples than its rectangle has rows."""
    return _hashed(np.arange(num_values, dtype=np.uint64), key) % np.uint64(size)


def _hashed(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """63 random bits per value: splitmix64 on value + key (uint64 arrays wrap around, as it wants)."""
    mixed = values + np.uint64(key)
    shifted = mixed >> np.uint64(30)
    mixed ^= shifted
    mixed *= np.uint64(_MULTIPLIERS[0])
    mixed ^= np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed *= np.uint64(_MULTIPLIERS[1])
    mixed ^= np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed >>= np.uint64(1)
    return mixed


def _round_keys(seed: int, epoch: int) -> list[int]:
    """One key per round. Seed and epoch are mixed one after the other: (0, 1) and (1, 0) share nothing."""
    key = _mixed(_mixed(operator.index(seed)) + operator.index(epoch))
    return [_mixed(key + number * _GOLDEN) for number in range(_NUM_ROUNDS)]


def _mixed(value: int) -> int:
    """splitmix64 on a Python int of any sign and size (beyond 64 bits it wraps around)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


@dataclasses.dataclass(frozen=True)
class ByRank:
    """The positions of one worker, batch by batch.

    Global batch k covers the next world_size · batch_size positions. Each rank takes its own batch_size of
    them. The last global batch may be partial: its positions are cut into world_size parts that differ
    by at most one, so nothing is padded, lost or repeated; a rank whose part is empty has one batch less.
    `drop_last` leaves out a partial global batch, for all ranks alike.
    """

    num_samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        assert self.num_samples >= 0 and self.batch_size >= 1, self
        assert 0 <= self.rank < self.world_size, self

    @property
    def num_batches(self) -> int:
        """How many batches this rank has in an epoch."""
        start, stop = self.batch(self._num_whole)
        return self._num_whole + (stop > start and not self.drop_last)

    def batch(self, k: int) -> tuple[int, int]:
        """The positions (start, stop) of this rank's part of global batch k; empty behind the last sample."""
        assert k >= 0, k
        wide = self.world_size * self.batch_size
        first = min(k * wide, self.num_samples)
        if k < self._num_whole:
            return first + self.rank * self.batch_size, first + (self.rank + 1) * self.batch_size
        num_left = self.num_samples - first
        return (
            first + num_left * self.rank // self.world_size,
            first + num_left * (self.rank + 1) // self.world_size,
        )

    @property
    def _num_whole(self) -> int:
        return self.num_samples // (self.world_size * self.batch_size)
