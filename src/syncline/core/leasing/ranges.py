"""Ranges of positions in an epoch, and of places along a lease."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

Places = tuple[int, int]


def merged(places: Iterable[Places]) -> list[Places]:
    """Sorted and merged ranges."""
    found: list[Places] = []
    for begin, end in sorted(places):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def without(places: Iterable[Places], gone: Places) -> list[Places]:
    """These ranges without another."""
    found = []
    for begin, end in places:
        found += [(begin, min(end, gone[0])), (max(begin, gone[1]), end)]
    return [(begin, end) for begin, end in found if begin < end]


class Span(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Positions start … stop−1; with a period, the first `width` positions (a tooth) of every `period`. Teeth are
    complete.
    """

    start: int
    stop: int
    period: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a span from {self.start} to {self.stop}")
        if self.period and not (
            0 < self.width < self.period and (self.stop - self.start - self.width) % self.period == 0
        ):
            raise ValueError(f"a comb of {self.width} in {self.period} from {self.start} to {self.stop}")

    @property
    def num_teeth(self) -> int:
        return (self.stop - self.start - self.width) // self.period + 1 if self.period else 1

    def __len__(self) -> int:
        return self.num_teeth * self.width if self.period else self.stop - self.start

    def positions(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
        """The positions from the begin-th to before the end-th."""
        count = np.arange(begin, len(self) if end is None else end, dtype=np.int64)
        if not self.period:
            return self.start + count
        return self.start + count // self.width * self.period + count % self.width

    def cut(self, begin: int, end: int) -> list[Span]:
        """A range of the positions, as spans: part of a tooth, whole teeth, part of a tooth."""
        begin, end = max(0, begin), min(end, len(self))
        if begin >= end:
            return []
        if not self.period:
            return [Span(self.start + begin, self.start + end)]
        first, head = divmod(begin, self.width)
        last, tail = divmod(end, self.width)
        if first == last:
            return [self._in_tooth(first, head, tail)]
        found = []
        if head:
            found.append(self._in_tooth(first, head, self.width))
            first += 1
        if first < last:
            found.append(self._teeth(first, last))
        if tail:
            found.append(self._in_tooth(last, 0, tail))
        return found

    def _in_tooth(self, number: int, begin: int, end: int) -> Span:
        start = self.start + number * self.period
        return Span(start + begin, start + end)

    def _teeth(self, first: int, last: int) -> Span:
        start = self.start + first * self.period
        return comb(start, last - first, self.period, self.width)


def comb(start: int, num_teeth: int, period: int, width: int) -> Span:
    """A span of this many teeth; one tooth, or adjacent teeth, become a plain range."""
    stop = start + (num_teeth - 1) * period + width
    if num_teeth == 1 or width == period:
        return Span(start, stop)
    return Span(start, stop, period, width)


def count(spans: Iterable[Span]) -> int:
    return sum(len(span) for span in spans)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same positions in few spans, in order: adjacent spans are merged. Spans must not overlap."""
    waiting = sorted(spans)
    done: list[Span] = []
    while waiting:
        one = waiting.pop(0)
        for k, other in enumerate(waiting):
            both = _together(one, other)
            if both is not None:
                del waiting[k]
                waiting = sorted([*both, *waiting, *done])  # they may touch earlier ones now
                done = []
                break
        else:
            if len(one):
                done.append(one)
    return done


def _together(one: Span, other: Span) -> list[Span] | None:
    """Merges two spans whose teeth adjoin; None if they do not. A range is one tooth."""
    if not one.period and not other.period:
        return [Span(one.start, other.stop)] if one.stop == other.start else None
    period = one.period or other.period
    for left, right in ((one, other), (other, one)):
        wide = [span.width or len(span) for span in (left, right)]
        if {left.period, right.period} - {0, period} or sum(wide) > period:
            continue
        gap, odd = divmod(right.start - (left.start + wide[0]), period)
        first, last = max(0, gap), min(left.num_teeth, gap + right.num_teeth)
        if not odd and first < last:
            found = [comb(left.start + first * period, last - first, period, sum(wide))]
            found += left.cut(0, first * wide[0]) + left.cut(last * wide[0], len(left))
            return found + right.cut(0, (first - gap) * wide[1]) + right.cut((last - gap) * wide[1], len(right))
    return None
