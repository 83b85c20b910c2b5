"""Shards that are leased: read in sequence, from the sample on at which a lease begins, until they end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from syncline.core.leasing.leases import SHARD_POSITIONS
from syncline.worker.loop import Loop
from syncline.worker.portion import Piece

T = TypeVar("T")
#: The samples of a shard from a sample on.
OpenShard = Callable[[int, int], Iterator[T]]


class LeasedShards(Generic[T]):
    """The samples of each batch; none when there is no more, for now or at all. Batches do not cross shards."""

    def __init__(self, loop: Loop, open_shard: OpenShard[T]) -> None:
        self._loop, self._open_shard = loop, open_shard
        self._samples: Iterator[T] = iter(())
        self._at = (0, 0)  # lease and place that come next in them

    def next(self) -> list[T] | None:
        while (piece := self._loop.next()) is not None:
            samples = self._read(piece)
            if len(samples) == len(piece) or self._loop.ends_shard(len(samples)):
                return samples
        return None

    def _read(self, piece: Piece) -> list[T]:
        if (piece.lease, piece.begin) != self._at:
            self._samples = self._open_shard(*divmod(piece.span.start + piece.begin, SHARD_POSITIONS))
        self._at = (piece.lease, piece.end)
        return list(itertools.islice(self._samples, len(piece)))
