"""Samples by number that are leased: which ones each batch holds, by the order of the epoch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from syncline.core.leasing.order import ChunkedOrder, Order
from syncline.worker.loop import Loop

#: How many samples the order is evaluated for at once: enough that numpy's cost per call vanishes, little
#: enough that the first batch does not wait (a block takes 1 ms).
BLOCK_SAMPLES = 4096


class LeasedNumbers:
    """The samples of each batch; none when there is no more, for now or at all."""

    def __init__(self, loop: Loop, order: Order | ChunkedOrder) -> None:
        self._loop, self._order = loop, order
        self._lease = self._begin = 0
        self._samples = np.empty(0, dtype=np.int64)  # of that lease, from there on

    def next(self) -> npt.NDArray[np.int64] | None:
        piece = self._loop.next()
        if piece is None:
            return None
        at = piece.begin - self._begin
        if piece.lease != self._lease or at + len(piece) > len(self._samples):
            self._lease, self._begin, at = piece.lease, piece.begin, 0
            upto = min(len(piece.span), max(piece.end, piece.begin + BLOCK_SAMPLES))
            self._samples = self._order.at(piece.span.positions(piece.begin, upto))
        return self._samples[at : at + len(piece)]
