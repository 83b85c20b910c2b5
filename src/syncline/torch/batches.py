"""Input of torch's loader: the samples of a worker's batches, leased, or by rank in an evaluation."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch.utils.data

from syncline.core.leasing.loader import Loader
from syncline.core.leasing.order import ByRank, ChunkedOrder, Order
from syncline.data.batching import order_of
from syncline.data.source import Batch, ShardSource, Source
from syncline.errors import ConfigError, DataError
from syncline.torch.naming import Read
from syncline.worker.data import loop
from syncline.worker.data.loop import LeasedNumbers, LeasedShards, Loop, OpenShard


class Aim(torch.utils.data.Sampler[list[Any]]):
    """The batch sampler behind a loader: yields the samples of this worker's batches of one epoch."""

    def __init__(self) -> None:
        self.at(iter(()))

    def at(self, batches: Iterator[list[Any]]) -> None:
        """Sets the batches of the next `iter()`; existing iterators keep theirs."""
        self._batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches


class Data(Protocol):
    """A data set, as a loader reads it."""

    dataset: Any  #: passed to torch; indexed with the batches below

    @property
    def num_samples(self) -> int | None:
        """None: known after reading."""

    def loader(self, batch_size: int, drop_last: bool, is_auto: bool, is_global: bool) -> Loader: ...
    def leased(self, loop: Loop, seed: int, epoch: int, shuffle: bool) -> Iterator[list[Any]]: ...
    def by_rank(self, mine: ByRank, seed: int, epoch: int, shuffle: bool) -> Iterator[list[Any]]: ...


class Numbered:
    """Samples by number: a map-style data set, or a source that is read in whole batches."""

    def __init__(self, dataset: Any) -> None:
        self._source = dataset if isinstance(dataset, Source) else None
        self.dataset = dataset if self._source is None else Rows(self._source)
        self._num_samples = len(dataset)

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def loader(self, batch_size: int, drop_last: bool, is_auto: bool, is_global: bool) -> Loader:
        return Loader(self.num_samples, batch_size, drop_last, is_auto, is_global=is_global)

    def leased(self, loop: Loop, seed: int, epoch: int, shuffle: bool) -> Iterator[list[int]]:
        return _Lists(LeasedNumbers(loop, self._order(seed, epoch, shuffle)))

    def by_rank(self, mine: ByRank, seed: int, epoch: int, shuffle: bool) -> Iterator[list[int]]:
        order = self._order(seed, epoch, shuffle)
        num_at_once = max(1, loop.BLOCK_SAMPLES // mine.batch_size)
        for first in range(0, mine.num_batches, num_at_once):
            some = range(first, min(first + num_at_once, mine.num_batches))
            spans = [np.arange(*mine.batch(number), dtype=np.int64) for number in some]
            samples = iter(order.at(np.concatenate(spans)).tolist())
            for span in spans:
                yield list(itertools.islice(samples, span.size))

    def _order(self, seed: int, epoch: int, shuffle: bool) -> Order | ChunkedOrder:
        if self._source is not None:
            return order_of(self._source, shuffle=shuffle, seed=seed, epoch=epoch)
        return Order(self.num_samples, seed, epoch, shuffle)


class _Lists:
    """Not a generator: after an end there may be more, and torch asks again after every batch."""

    def __init__(self, numbers: LeasedNumbers) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        samples = self._numbers.next()
        if samples is None:
            raise StopIteration
        found: list[int] = samples.tolist()
        return found


class Rows(torch.utils.data.Dataset[Any]):
    """A source as a torch data set, read a batch at a time."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Batch:
        return self.source.read(np.array([index], dtype=np.int64))

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.source.read(np.array(indices, dtype=np.int64))


def tensors(batch: Any) -> Any:
    """A source's batch as tensors; texts and other objects are unchanged."""
    try:
        return torch.utils.data.default_convert(batch)
    except TypeError as error:
        named = batch if isinstance(batch, dict) else {f"array {number}": each for number, each in enumerate(batch)}
        for name, values in named.items():
            if values.dtype.kind in "mMV":
                raise DataError(
                    f"DataLoader: '{name}' is {values.dtype}, which cannot become a tensor; leave it out with "
                    "columns=, make it a number with syncline.data.mapped, or give a collate_fn"
                ) from error
        raise


class Sharded:
    """Shards, each read from its first sample: a shard source, or an IterableDataset with `shards`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = AsRead(dataset)
        self._num_shards = len(dataset.shards)
        if not self._num_shards:
            raise ConfigError("DataLoader: the data set has no shards; check the path that they come from")
        self._shards = list(dataset.shards)
        is_source = isinstance(dataset, ShardSource)
        self._open: OpenShard[Any] = dataset.iter_shard if is_source else _opening(dataset, self._shards)

    @property
    def num_samples(self) -> None:
        return None

    def loader(self, batch_size: int, drop_last: bool, is_auto: bool, is_global: bool) -> Loader:
        return Loader(0, batch_size, drop_last, is_auto, self._num_shards, is_global)

    def leased(self, loop: Loop, seed: int, epoch: int, shuffle: bool) -> Iterator[list[Any]]:
        order = self._order(seed, epoch, shuffle)
        reading = _Counting("", iter(()), 0)

        def open_shard(turn: int, skip: int) -> Iterator[Any]:
            nonlocal reading
            reading = self._counting(order[turn], skip)
            return reading

        shards = LeasedShards(loop, open_shard)
        return (reading.read(samples) for samples in iter(shards.next, None))

    def by_rank(self, mine: ByRank, seed: int, epoch: int, shuffle: bool) -> Iterator[list[Any]]:
        for shard in self._order(seed, epoch, shuffle)[mine.rank :: mine.world_size]:
            samples = self._counting(shard, 0)
            while batch := list(itertools.islice(samples, mine.batch_size)):
                yield samples.read(batch)

    def _counting(self, shard: int, skip: int) -> _Counting:
        return _Counting(str(self._shards[shard]), self._open(shard, skip), skip)

    def _order(self, seed: int, epoch: int, shuffle: bool) -> list[int]:
        found: list[int] = Order(self._num_shards, seed, epoch, shuffle).at(np.arange(self._num_shards)).tolist()
        return found


class _Counting:
    """A shard being read, with its position for messages."""

    def __init__(self, name: str, samples: Iterator[Any], number: int) -> None:
        self._name, self._samples, self._number = name, samples, number

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(f"raised for sample {self._number} of {self._name}")
            raise
        self._number += 1
        return sample

    def read(self, samples: list[Any]) -> Read:
        """The last samples read."""
        found = Read(samples)
        found.where = f"samples {self._number - len(samples)} to {self._number - 1} of {self._name}"
        return found


class AsRead(torch.utils.data.Dataset[Any]):
    """Yields samples of shards as they were read."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __getitem__(self, sample: Any) -> Any:
        return sample


def _opening(dataset: Any, shards: Sequence[Any]) -> Callable[[int, int], Iterator[Any]]:
    """Opens a shard of an IterableDataset through a copy that has only this one."""

    def open_shard(index: int, skip: int) -> Iterator[Any]:
        one = copy.copy(dataset)
        try:
            one.shards = [shards[index]]
        except AttributeError:
            raise ConfigError(
                f"DataLoader: {type(dataset).__name__}.shards cannot be set: each worker reads through a copy whose "
                "`shards` is the one that it has leased; make it a plain attribute that __iter__ reads"
            ) from None
        return itertools.islice(iter(one), skip, None)

    return open_shard


def data_of(dataset: Any) -> Data:
    """Wraps a data set; one that cannot be split over workers is refused."""
    if isinstance(dataset, ShardSource) or (
        isinstance(dataset, torch.utils.data.IterableDataset) and hasattr(dataset, "shards")
    ):
        return Sharded(dataset)
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            "DataLoader: an IterableDataset has no positions that could be split over workers; give it `shards`, a "
            "list of files (or whatever names a part) that __iter__ reads in turn; or give a dataset with __len__ "
            "and __getitem__"
        )
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"DataLoader: {type(dataset).__name__} cannot be split over workers without a __len__; add one"
        )
    return Numbered(dataset)
