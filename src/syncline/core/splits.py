"""Which worker takes which positions of an epoch: pure arithmetic, nothing held per sample."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ByRank:
    """The positions of one worker, batch by batch.

    Global batch k covers the next world_size · batch_size positions, of which each rank takes its own
    batch_size. The last global batch may be partial: its positions are cut into world_size parts that differ
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
