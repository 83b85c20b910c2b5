"""Batches of a source inside a job: leased, so that every sample counts once among all workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from syncline.core.leasing.loader import Loader
from syncline.core.leasing.order import ChunkedOrder, Order
from syncline.data.source import Batch, Sample, ShardSource, Source
from syncline.data.stacking import stacked
from syncline.worker.data.loop import LeasedNumbers, LeasedShards, Loop, TakesSamples


def leased_numbers(
    job: TakesSamples,
    source: Source,
    order: Order | ChunkedOrder,
    batch_size: int,
    *,
    name: str,
    epoch: int,
    drop_last: bool,
) -> Iterator[Batch]:
    """What this worker leases of an epoch, which is opened here and now."""
    loop = Loop(job, name, epoch, Loader(len(source), batch_size, drop_last))
    return _read(loop, source, LeasedNumbers(loop, order))


def _read(loop: Loop, source: Source, numbers: LeasedNumbers) -> Iterator[Batch]:
    with loop:
        while (samples := numbers.next()) is not None:
            batch = source.read(samples)
            loop.hand_out()
            yield batch
            loop.comes_back()


def leased_shards(
    job: TakesSamples, source: ShardSource, order: Order, batch_size: int, *, name: str, epoch: int
) -> Iterator[Batch]:
    """The same of shards."""
    loop = Loop(job, name, epoch, Loader(0, batch_size, num_shards=len(source.shards)))
    turns = order.at(np.arange(len(source.shards))).tolist()
    return _read_shards(loop, LeasedShards(loop, lambda turn, skip: source.iter_shard(turns[turn], skip)))


def _read_shards(loop: Loop, shards: LeasedShards[Sample]) -> Iterator[Batch]:
    with loop:
        while (samples := shards.next()) is not None:
            batch = stacked(samples)
            loop.hand_out()
            yield batch
            loop.comes_back()
