"""A worker's portion of an epoch: the leases it has, cut into batches front to back, and what of them it gives back.

No waits and no clock: the deterministic simulator runs the same code.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable

from syncline.core.leasing.ranges import Span
from syncline.core.wire.leases import GivenLease


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one batch is to hold: places of a lease, which stand for positions of its span."""

    lease: int
    span: Span
    begin: int
    end: int
    at: int = 0  # how many samples of the epoch are done before it; in rounds the same for all workers of one

    def __len__(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass
class _Own:
    """A lease of this worker: what of it is cut into batches, and where it ends."""

    number: int
    span: Span
    begin: int  # the next place to be read
    end: int
    step: int  # samples of a batch; 0: as the portion says
    origin: int  # samples of the epoch that are done before its first batch
    wide: int  # and with each of its batches


class Portion:
    """Of one loop. The thread that hears the coordinator may have it give back at any time."""

    def __init__(self, batch: int) -> None:
        self.batch = batch  #: samples of a batch of a lease that does not say it
        self.step = 0  #: samples of a batch of the lease that is being cut
        self._lock = threading.Lock()
        self._own: collections.deque[_Own] = collections.deque()
        self._given: dict[int, int] = {}  # leases that end early, and where
        self._size = 0  # of the last lease
        self.numbers: set[int] = set()  # of all leases of this loop
        self.newest = 0  # of them

    def take(self, given: GivenLease) -> None:
        """The next lease."""
        with self._lock:
            if given.lease in self.numbers:
                return  # it was here already
            self.numbers.add(given.lease)
            self.newest = given.lease
            self._size = len(given.span)
            self._own.append(
                _Own(given.lease, given.span, given.begin, self._size, given.step, given.origin, given.wide)
            )

    def cut(self) -> Piece | None:
        """The next batch; None: nothing is left here."""
        with self._lock:
            while self._own and self._own[0].begin >= self._own[0].end:
                self._own.popleft()
            if not self._own:
                return None
            own = self._own[0]
            self.step = own.step or self.batch
            end = min(own.begin + self.step, own.end)
            at = own.origin + own.begin // self.step * own.wide
            piece = Piece(own.number, own.span, own.begin, end, at)
            own.begin = end
            return piece

    @property
    def num_left(self) -> int:
        """Samples that are leased and not cut into batches yet."""
        with self._lock:
            return sum(own.end - own.begin for own in self._own)

    @property
    def is_low(self) -> bool:
        """Whether it is time to ask for more: while a whole lease is still to be read."""
        return self.num_left <= self._size

    def end_shard(self, piece: Piece, num_read: int) -> Piece | None:
        """Of this batch only so much was there: the shard ends with it. What of the batch there is, if anything."""
        end = piece.begin + num_read
        with self._lock:
            for own in self._own:
                if own.number == piece.lease:
                    own.begin = own.end = end
        return dataclasses.replace(piece, end=end) if num_read else None

    def give_back(self, *, keeps_begun: bool) -> list[tuple[int, int]]:
        """What is not cut into batches yet is others'; `keeps_begun`: not of what is begun.

        With all that was given back before: a coordinator may have died before it kept that.
        """
        with self._lock:
            for own in self._own:
                if own.begin < own.end and not (keeps_begun and own.begin):
                    self._given[own.number] = own.end = own.begin
            return list(self._given.items())

    @property
    def given(self) -> list[tuple[int, int]]:
        """All that was given back so far: leases, and the places from which on."""
        with self._lock:
            return list(self._given.items())

    def leave(self, unread: Iterable[Piece]) -> dict[int, int]:
        """The loop is left, and these pieces were not given to the script: all leases that end early by it, where."""
        given = dict(self.give_back(keeps_begun=False))
        for piece in unread:
            given[piece.lease] = min(piece.begin, given.get(piece.lease, piece.begin))
        return given
