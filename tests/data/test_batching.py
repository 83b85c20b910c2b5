"""Batches by position: every sample once, in the order of the epoch, however they are cut and read."""

from __future__ import annotations

import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import syncline.data
from syncline.core.leasing.order import ChunkedOrder, Order
from syncline.data import ArraySource, Batch, batches, read_batches
from syncline.errors import ConfigError


class Chunks:
    """A source whose samples are their own numbers, in chunks of given sizes."""

    def __init__(self, chunk_sizes: Sequence[int], bytes_each: int = 8) -> None:
        self.chunk_sizes = chunk_sizes
        self.asked: list[int] = []
        self._width = bytes_each // 8

    def describe(self) -> str:
        return "chunks"

    def __len__(self) -> int:
        return sum(self.chunk_sizes)

    def read(self, samples: npt.NDArray[np.int64]) -> Batch:
        self.asked.append(len(samples))
        return (np.repeat(samples[:, None], self._width, axis=1),)

    def where(self, sample: int) -> str:
        return f"chunks, {sample}"


@given(
    chunk_sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    batch_size=st.integers(1, 50),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_sample_once_in_its_order(
    chunk_sizes: list[int], batch_size: int, shuffle: bool, seed: int, epoch: int
) -> None:
    source = Chunks(chunk_sizes)
    read = [batch[0][:, 0] for batch in batches(source, batch_size, shuffle=shuffle, seed=seed, epoch=epoch)]  # type: ignore[index]
    assert [len(batch) for batch in read[:-1]] == [batch_size] * (len(read) - 1) and len(read[-1]) <= batch_size
    if len(chunk_sizes) == 1:
        order: Order | ChunkedOrder = Order(len(source), seed, epoch, shuffle)
    else:
        order = ChunkedOrder(tuple(chunk_sizes), seed, epoch, shuffle)
    assert np.array_equal(np.concatenate(read), order.at(np.arange(len(source))))


@given(cuts=st.lists(st.integers(0, 30), max_size=10), batch_size=st.integers(1, 12))
def test_positions_are_read_array_by_array(cuts: list[int], batch_size: int) -> None:
    """Leases will give arrays of positions: no batch mixes two of them, and none is read before it is its turn."""
    starts = np.cumsum([0, *cuts])
    source, order = Chunks([max(int(starts[-1]), 1)]), Order(max(int(starts[-1]), 1), 3, 1)
    ranges = [np.arange(first, last) for first, last in itertools.pairwise(starts)]
    whole = [batch[0][:, 0] for batch in read_batches(source, ranges, order)]  # type: ignore[index]
    assert [each.tolist() for each in whole] == [order.at(each).tolist() for each in ranges if each.size]
    cut = [batch[0][:, 0] for batch in read_batches(source, ranges, order, batch_size)]  # type: ignore[index]
    sizes = [min(batch_size, len(each) - at) for each in ranges for at in range(0, len(each), batch_size)]
    assert [len(each) for each in cut] == sizes
    assert [n for each in cut for n in each.tolist()] == [n for each in whole for n in each.tolist()]


def test_small_batches_are_read_many_at_once_and_large_ones_alone() -> None:
    small, large = Chunks([4096]), Chunks([64], bytes_each=1 << 20)
    assert len(list(batches(small, 16))) == 256 and small.asked == [16, 4080]
    assert len(list(batches(large, 8))) == 8 and large.asked == [8] * 8


def test_each_pass_over_a_source_has_an_order_of_its_own() -> None:
    """Without a job too: the n-th call with a source is epoch n, or the one that is asked for."""

    def read(source: ArraySource, **options: Any) -> list[int]:
        return [n for batch in batches(source, 5, shuffle=True, **options) for n in batch[0].tolist()]  # type: ignore[index]

    one, two = ArraySource(np.arange(20)), ArraySource(np.arange(20))
    orders = [Order(20, 0, epoch).at(np.arange(20)).tolist() for epoch in range(8)]
    assert [read(one), read(two), read(one), read(one, alone=True)] == [orders[0], orders[0], orders[1], orders[2]]
    assert [read(one, epoch=6), read(one), read(one, epoch=0)] == [orders[6], orders[7], orders[0]]


def test_batches_that_were_read_together_share_no_memory() -> None:
    first, second, third = list(batches(ArraySource(np.arange(12)), 4))
    second[0][:] = -1  # type: ignore[index]
    assert first[0].tolist() == [0, 1, 2, 3] and third[0].tolist() == [8, 9, 10, 11]  # type: ignore[index]


def test_a_batch_has_at_least_one_sample() -> None:
    with pytest.raises(ConfigError, match="batch_size is 0; a batch has at least one sample"):
        batches(ArraySource(np.arange(3)), 0)
    for wrong in ("4", 2.0, None, True):
        with pytest.raises(ConfigError, match="it is a whole number, the samples of a batch"):
            batches(ArraySource(np.arange(3)), wrong)  # type: ignore[arg-type]
    assert len(list(batches(ArraySource(np.arange(3)), np.int64(2)))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [np.arange(3), (np.arange(3), np.arange(3)), [1, 2], "data/*.parquet"])
def test_what_is_no_source_is_told_how_to_become_one(wrong: Any) -> None:
    kind = type(wrong).__name__
    with pytest.raises(
        ConfigError, match=rf"{kind} is none; give syncline\.data\.ArraySource.*open\(path\) for files"
    ):
        batches(wrong, 2)


def rate(read: Callable[[], int]) -> float:
    start = time.perf_counter()
    return read() / (time.perf_counter() - start)


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_batches_over_parquet_keep_up_with_plain_pyarrow(tmp_path: pathlib.Path) -> None:
    """Rows/s beside pyarrow's own batches of the same columns, turn by turn in this process: 0.8 is the reach.

    The other references give no batches and are printed only: whole row groups one by one, and the whole table.
    """
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, num_rows, batch_size = tmp_path / "rows.parquet", 1_000_000, 1024
    random = np.random.default_rng(0)
    columns = {f"x{n}": random.random(num_rows, dtype=np.float32) for n in range(16)}
    columns["y"] = random.integers(0, 10, num_rows)
    parquet.write_table(arrow.table(columns), path, row_group_size=1 << 16)
    names = list(columns)

    def to_array(column: Any) -> Any:
        return column.to_numpy() if isinstance(column, arrow.ChunkedArray) else column.to_numpy(zero_copy_only=False)

    def arrays(batch: Any) -> int:
        return max(len(to_array(column)) for column in batch.columns)

    def plain() -> int:
        with parquet.ParquetFile(path) as file:
            return sum(arrays(batch) for batch in file.iter_batches(batch_size=batch_size, columns=names))

    def row_groups() -> int:
        with parquet.ParquetFile(path) as file:
            return sum(arrays(file.read_row_group(n, columns=names)) for n in range(file.num_row_groups))

    def whole() -> int:
        return int(parquet.read_table(path, columns=names).num_rows)

    def ours(shuffle: bool) -> int:
        source = syncline.data.open(path, columns=names)
        return sum(len(batch["y"]) for batch in batches(source, batch_size, shuffle=shuffle))  # type: ignore[call-overload]

    sides = {
        "pyarrow": plain,
        "row groups": row_groups,
        "read_table": whole,
        "batches": lambda: ours(False),
        "shuffled": lambda: ours(True),
    }
    turns = [{name: rate(read) for name, read in sides.items()} for _ in range(7)]
    middle = {name: float(np.median([turn[name] for turn in turns])) for name in sides}
    ratio = {name: float(np.median([turn[name] / turn["pyarrow"] for turn in turns])) for name in sides}
    for name in sides:
        print(f"{name:>10}: {middle[name] / 1e6:5.2f} M rows/s, {ratio[name]:.2f} of pyarrow's batches")
    assert min(ratio["batches"], ratio["shuffled"]) >= 0.8
