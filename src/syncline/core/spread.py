"""Spread: slices of a ring whose pushes go to every server, each of which sums them up for itself.

The other way is by the slice's primary: it gets all pushes, and gives their sum to the others. Between hosts a slice
goes the way that takes fewer bytes: of a push `p` and a sum `s`, among n servers, n(n-1)p by the one and (n-1)(p+s)
by the other. Everyone comes to the same from the seats, so nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from syncline.config import JobConfig
from syncline.core.codecs.named import Codecs
from syncline.core.codecs.pieces import SliceCoder, coder_of
from syncline.core.layout import Segment, Slice
from syncline.core.seats import Seat


class Spread:
    """Of one job."""

    def __init__(self, config: JobConfig, codecs: Codecs) -> None:
        self._is_ring, self._is_tcp = config.is_ring and not config.has_circle, config.transport == "tcp"
        self._push, self.sums = (coder_of(codec, codecs) for codec in (codecs.push, codecs.pull))

    def of(
        self, parts: Iterable[tuple[Segment, Slice]], seats: Mapping[int, Seat], hosts: Mapping[str, str]
    ) -> frozenset[int]:
        """The slices that are spread. `hosts`: of the servers, by name."""
        if not self._is_ring:  # of a circle, every server sums up by itself anyway
            return frozenset()
        return frozenset(part.id for segment, part in parts if self._is_spread(segment, part, seats, hosts))

    def _is_spread(self, segment: Segment, part: Slice, seats: Mapping[int, Seat], hosts: Mapping[str, str]) -> bool:
        seat = seats.get(part.id)
        if seat is None or not seat.primary or not seat.backups:
            return False
        if not self._is_tcp and len({hosts.get(name) for name in seat.names}) == 1:
            return False  # they read each other's memory
        most = len(seat.backups) * _num_bytes(self._push, segment, part)
        return most <= _num_bytes(self.sums, segment, part)


def _num_bytes(coder: SliceCoder | None, segment: Segment, part: Slice) -> int:
    """Of one push or sum of this slice, at most."""
    return part.num_bytes if coder is None else coder.bound(segment, part)
