"""Anything that can be iterated over, as shards: a function per shard that starts it again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from syncline.data.source import Sample, counted
from syncline.errors import ConfigError


class IterableSource:
    """Shards by name, each a function that gives its samples from the first on, the same ones at every call."""

    def __init__(self, shards: Mapping[str, Callable[[], Iterable[Sample]]]) -> None:
        if not shards:
            raise ConfigError("there is no shard to iterate over; give at least one")
        self._shards = dict(shards)

    def describe(self) -> str:
        return counted(len(self._shards), "iterable")

    @property
    def shards(self) -> Sequence[str]:
        return tuple(self._shards)

    def iter_shard(self, index: int, skip: int = 0) -> Iterator[Sample]:
        return itertools.islice(iter(self._shards[self.shards[index]]()), skip, None)
