"""A source with a function applied to each sample as it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from syncline.data.source import Batch, Sample, ShardSource, Source
from syncline.data.stacking import column, row, stacked
from syncline.errors import DataError

#: Gets one sample, a dict or (from a tuple of arrays) a tuple, and gives one, in either form.
Transform = Callable[[Any], Any]


@overload
def mapped(source: Source, transform: Transform) -> Source: ...
@overload
def mapped(source: ShardSource, transform: Transform) -> ShardSource: ...
def mapped(source: Source | ShardSource, transform: Transform) -> Source | ShardSource:
    """The same samples, each as `transform` returns it. What it raises is a DataError that names the sample."""
    return _Mapped(source, transform) if isinstance(source, Source) else _MappedShards(source, transform)


class _Mapped:
    def __init__(self, source: Source, transform: Transform) -> None:
        self._source, self._transform = source, transform

    def describe(self) -> str:
        return f"{self._source.describe()}, through {_name(self._transform)}"

    def __len__(self) -> int:
        return len(self._source)

    @property
    def chunk_sizes(self) -> Sequence[int]:
        return self._source.chunk_sizes

    def read(self, samples: npt.NDArray[np.int64]) -> Batch:
        batch = self._source.read(samples)
        if not samples.size:
            return batch
        changed = []
        for place, sample in enumerate(samples.tolist()):
            try:
                changed.append(self._transform(row(batch, place)))
            except Exception as error:
                where = self._source.where(sample)
                raise _failed(self._transform, f"sample {sample} ({where})", error) from error
        if len({isinstance(each, dict) for each in changed}) > 1:
            raise DataError(f"{_name(self._transform)} returned a dict for some samples only; return one each time")
        if isinstance(changed[0], dict):
            return stacked(changed)
        tuples = [each if isinstance(each, tuple) else (each,) for each in changed]
        if len(widths := {len(each) for each in tuples}) > 1:
            wrong = " and ".join(map(str, sorted(widths)))
            raise DataError(f"{_name(self._transform)} returned tuples of {wrong} values; return as many each time")
        return tuple(column(values) for values in zip(*tuples, strict=True))

    def where(self, sample: int) -> str:
        return self._source.where(sample)


class _MappedShards:
    def __init__(self, source: ShardSource, transform: Transform) -> None:
        self._source, self._transform = source, transform

    def describe(self) -> str:
        return f"{self._source.describe()}, through {_name(self._transform)}"

    @property
    def shards(self) -> Sequence[str]:
        return self._source.shards

    def iter_shard(self, index: int, skip: int = 0) -> Iterator[Sample]:
        for number, sample in enumerate(self._source.iter_shard(index, skip), skip):
            try:
                changed = self._transform(sample)
            except Exception as error:
                where = f"sample {number} of {self._source.shards[index]}"
                raise _failed(self._transform, where, error) from error
            yield changed


def _failed(transform: Transform, where: str, error: Exception) -> DataError:
    return DataError(f"{_name(transform)} raised {type(error).__name__} on {where}: {error}; fix it, or the sample")


def _name(transform: Transform) -> str:
    return str(getattr(transform, "__qualname__", type(transform).__name__))
