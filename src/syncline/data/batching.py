"""Batches from a source: positions of an epoch in, arrays out."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from syncline.core.leasing.order import ChunkedOrder, Order
from syncline.data.leased import leased_numbers, leased_shards
from syncline.data.source import Batch, Sample, ShardSource, Source
from syncline.data.stacking import stacked
from syncline.errors import ConfigError, DataError
from syncline.worker.current import current_job, has_current_job
from syncline.worker.data.samples import Passes

_MOST_POSITIONS = 1 << 13  # positions whose order is computed at once: per batch, the call overhead would dominate
_AT_ONCE_BYTES = 4 << 20  # for the same reason: about the size of a processor's cache
SHARDS_END = (
    "where shards end shows when they are read; leave it out, and pass over small batches in the loop (`continue`), "
    "or give data that has a length"
)
_passes = Passes()  # of this process without a job


def read_batches(
    source: Source,
    positions: Iterable[npt.NDArray[np.int64]],
    order: Order | ChunkedOrder,
    batch_size: int | None = None,
) -> Iterator[Batch]:
    """The samples at these positions: one batch per array, or batches of `batch_size`.

    Small batches of one array are read together and yielded one by one.
    """
    num_at_once = 1
    for some in positions:
        samples = order.at(some)
        size = batch_size or max(len(samples), 1)
        start = 0
        while start < len(samples):
            read = source.read(samples[start : start + num_at_once * size])
            num_read = min(num_at_once * size, len(samples) - start)
            yield from _cut(read, num_read, size)
            start += num_read
            num_at_once = max(1, _AT_ONCE_BYTES * num_read // (size * max(_num_bytes(read), 1)))


def _cut(read: Batch, num_read: int, size: int) -> Iterator[Batch]:
    """Splits what was read into batches: slices of arrays that have no other user."""
    for start in range(0, num_read, size):
        if isinstance(read, dict):
            yield {name: values[start : start + size] for name, values in read.items()}
        else:
            yield tuple(values[start : start + size] for values in read)


def _num_bytes(batch: Batch) -> int:
    return sum(array.nbytes for array in (batch.values() if isinstance(batch, dict) else batch))


def order_of(source: Source, *, shuffle: bool, seed: int = 0, epoch: int = 0) -> Order | ChunkedOrder:
    """The order that suits a source: fully shuffled if samples can be read singly, else chunk by chunk."""
    if len(source.chunk_sizes) == 1:
        return Order(len(source), seed, epoch, shuffle)
    return ChunkedOrder(tuple(source.chunk_sizes), seed, epoch, shuffle)


def batches(
    source: Source | ShardSource,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int | None = None,
    drop_last: bool = False,
    name: str = "",
    alone: bool = False,
) -> Iterator[Batch]:
    """One pass over a source; the last batch may be smaller (`drop_last` leaves it out).

    Of shards, `shuffle` mixes the order; inside a job a batch does not cross them, so that each may end with a small
    one, and `drop_last` is refused.

    Inside a job its workers share the pass: each sample goes to one of them and counts with its next push, also when
    workers die, join or are slow. The n-th call with a source is epoch n of the job, or `epoch` says which: one that
    the job has finished yields nothing, one that is under way what is left. Sources are told apart by the order in
    which they are first read, or by `name`. `alone`: this worker reads all of it by itself, for an evaluation; so
    does a process without a job, whose n-th call with a source is epoch n too.
    """
    batch_size = _checked(source, batch_size)
    if drop_last and not isinstance(source, Source):
        raise ConfigError(f"drop_last cannot be given: {SHARDS_END}")
    if alone or not has_current_job():
        _, number = _passes.next(source, name, epoch)
        return _all(source, batch_size, shuffle=shuffle, seed=seed, epoch=number, drop_last=drop_last)
    job = current_job()
    passes, kind = job.samples.passes, (source.describe(), batch_size, seed)
    name, number = passes.next(source, name, epoch, kind=kind, named=job.samples.name_loader)
    if shuffle and epoch is None and not number and passes.is_gone(kind):
        job.notice(
            "batches over a source that was opened again start with the same order again: open it once, before the "
            "loop over the epochs, and each pass has a new order"
        )
    if isinstance(source, Source):
        order = order_of(source, shuffle=shuffle, seed=seed, epoch=number)
        return leased_numbers(job, source, order, batch_size, name=name, epoch=number, drop_last=drop_last)
    shards = Order(len(source.shards), seed, number, shuffle)
    return leased_shards(job, source, shards, batch_size, name=name, epoch=number)


def _checked(source: object, batch_size: object) -> int:
    """Validates the batch size and that the source can be read in batches."""
    if not isinstance(source, Source | ShardSource):
        raise ConfigError(
            f"batches() needs a source, and {type(source).__name__} is none; give syncline.data.ArraySource(…) "
            "for arrays, IterableSource(…) for what can be iterated over, open(path) for files"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral):
        raise ConfigError(f"batch_size is {batch_size!r}; it is a whole number, the samples of a batch")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; a batch has at least one sample")
    return int(batch_size)


def _all(
    source: Source | ShardSource, batch_size: int, *, shuffle: bool, seed: int, epoch: int, drop_last: bool
) -> Iterator[Batch]:
    if isinstance(source, Source):
        order = order_of(source, shuffle=shuffle, seed=seed, epoch=epoch)
        step = -(-_MOST_POSITIONS // batch_size) * batch_size
        stop = len(source) - (len(source) % batch_size if drop_last else 0)
        starts = range(0, stop, step)
        ranges = (np.arange(start, min(start + step, stop), dtype=np.int64) for start in starts)
        return read_batches(source, ranges, order, batch_size)
    shards = Order(len(source.shards), seed, epoch, shuffle).at(np.arange(len(source.shards))).tolist()
    samples = itertools.chain.from_iterable(source.iter_shard(shard, 0) for shard in shards)
    return _stacked(source, samples, batch_size)


def _stacked(source: ShardSource, samples: Iterator[Sample], batch_size: int) -> Iterator[Batch]:
    some = list(itertools.islice(samples, batch_size))
    if not some:
        raise DataError(f"{source.describe()}: there is no sample in any of them; write some, or check the path")
    while some:
        yield stacked(some)
        some = list(itertools.islice(samples, batch_size))
