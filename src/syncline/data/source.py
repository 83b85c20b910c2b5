"""What a data set is to us: samples by number, or shards that are read in sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from syncline.errors import DataError

Array: TypeAlias = npt.NDArray[Any]
#: Several samples: arrays of equal length by name, or in the order in which a tuple of arrays was given.
Batch: TypeAlias = dict[str, Array] | tuple[Array, ...]
#: One sample of a shard: values by name.
Sample: TypeAlias = dict[str, Any]


@runtime_checkable
class Source(Protocol):
    """Samples that are there by number: 0 … len−1."""

    def describe(self) -> str:
        """What this is, for people: "3 Parquet files, 1,000,000 rows: columns x, y"."""
        ...

    def __len__(self) -> int:
        """How many samples there are; at least one."""
        ...

    @property
    def chunk_sizes(self) -> Sequence[int]:
        """How many samples each natural piece has: row groups; all samples in one piece for arrays."""
        ...

    def read(self, samples: npt.NDArray[np.int64]) -> Batch:
        """These samples, in the order asked for. The arrays are the caller's own, which it may write to."""
        ...

    def where(self, sample: int) -> str:
        """Where a sample lies, for messages: the file and the row in it."""
        ...


@runtime_checkable
class ShardSource(Protocol):
    """Samples that can only be read one after the other. Their number is not known before."""

    def describe(self) -> str:
        """What this is, for people: "12 tar shards"."""
        ...

    @property
    def shards(self) -> Sequence[str]:
        """The names of the shards; at least one."""
        ...

    def iter_shard(self, index: int, skip: int = 0) -> Iterator[Sample]:
        """The samples of one shard from its sample number `skip` on; what is skipped is not decoded."""
        ...


def check_samples(samples: npt.NDArray[np.int64], num_samples: int) -> npt.NDArray[np.int64]:
    """The numbers as they are, if there is a sample for each."""
    if samples.size and (samples.min() < 0 or samples.max() >= num_samples):
        wrong = samples[(samples < 0) | (samples >= num_samples)][0]
        raise DataError(f"sample {wrong} was asked for; there are {num_samples:,}, from 0 to {num_samples - 1}")
    return samples


def counted(number: int, thing: str) -> str:
    """1 row, 2,000 rows."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def run(rows: npt.NDArray[np.int64]) -> slice | npt.NDArray[np.int64]:
    """Rows in sequence as a slice, which is copied as one piece; others as they are."""
    if rows.size and rows[-1] - rows[0] == rows.size - 1 and bool((rows[1:] > rows[:-1]).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def taken(array: Array, rows: slice | npt.NDArray[np.int64]) -> Array:
    """Rows of an array as a new array."""
    if isinstance(rows, slice):
        return np.array(array[rows], subok=False)
    return np.take(np.asarray(array), rows, axis=0)


def put(
    whole: Array,
    places: slice | npt.NDArray[np.int64],
    array: Array,
    rows: slice | npt.NDArray[np.int64],
) -> None:
    """Rows of an array to their places in another of the same type; where the places are a run, in one copy."""
    if isinstance(places, slice) and not isinstance(rows, slice):
        # "clip" is how NumPy takes without a copy between; the rows are there, so that nothing is clipped.
        np.take(array, rows, axis=0, out=whole[places], mode="clip")
    else:
        whole[places] = array[rows]
