"""From positions in an epoch's order, which the log of a job names, to samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from syncline.core.leasing.leases import SHARD_POSITIONS
from syncline.core.leasing.order import Order
from syncline.data.batching import order_of
from syncline.data.source import Source


def samples_at(
    data: Any, first: int, last: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0
) -> list[str]:
    """The samples at these positions, the last one included, and where they lie.

    `data` is the source or the data set, the rest as it was given to the loader; `epoch` counts from 0, the log's
    "epoch 1" is 0.
    """
    positions = np.arange(first, last + 1, dtype=np.int64)
    if hasattr(data, "shards"):
        shards = Order(len(data.shards), seed, epoch, shuffle).at(positions // SHARD_POSITIONS).tolist()
        numbers = (positions % SHARD_POSITIONS).tolist()
        return [f"sample {number} of {data.shards[shard]}" for shard, number in zip(shards, numbers, strict=True)]
    if isinstance(data, Source):
        order = order_of(data, shuffle=shuffle, seed=seed, epoch=epoch)
        return [f"sample {number} ({data.where(number)})" for number in order.at(positions).tolist()]
    return [f"sample {number}" for number in Order(len(data), seed, epoch, shuffle).at(positions).tolist()]
