"""Checks that pushes are finite. The worker refuses one that is not, before it counts anywhere.

A step counts on all servers or on none, and only the worker sees the whole push in time.

Copies with digests use the same pieces: a later comparison with the source then takes one read, not two.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from syncline.config import JobConfig
from syncline.core.layout import FLOATS, Layout, Parameter, Ranges, Segment, aligned, without
from syncline.core.policy import policy_of
from syncline.errors import RuleError
from syncline.worker.arrays import Bytes, count_threads, share
from syncline.worker.exchange.commit import Push

#: Piece size: data just copied or checked is still in the core's cache.
PIECE_BYTES = 512 << 10
#: Data read once in place does not need the cache: longer pieces are read faster.
LONG_BYTES = 4 << 20
SMALL_BYTES = 64 << 10
#: From this size on, data is checked while it is copied; smaller data is still in the cache afterwards.
LOOK_BYTES = 1 << 20
_PIECES_AT_ONCE = 8  # per turn of a thread
SAY_SECONDS = 1.0
_MOST_PLANS = 64  # cached plans
#: The bit pattern of +Inf and the integer types to read it as. Without its sign, a non-finite number is at least
#: that.
_INFINITY: dict[str, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    "float16": (np.int16, np.uint16, 0x7C00),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "float64": (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
}
#: The bytes of a segment's arena in a slot.
Arena = Callable[[Segment, int], Bytes]


class Bits:
    """Floats by their bits: exact."""

    __slots__ = ("_infinity", "_minus_infinity", "_signed", "_unsigned")

    def __init__(self, data: Bytes, dtype: str) -> None:
        signed, unsigned, self._infinity = _INFINITY[dtype]
        self._signed, self._unsigned = data.view(signed), data.view(unsigned)
        self._minus_infinity = self._infinity | 1 << 8 * FLOATS[dtype] - 1

    def is_finite(self) -> bool:
        """Signed, +Inf and positive NaN are the largest; unsigned, the negative ones are."""
        return bool(
            np.maximum.reduce(self._signed) < self._infinity
            and np.maximum.reduce(self._unsigned) < self._minus_infinity
        )


class Halves:
    """Checks float32 at memory speed: the dot product of both halves is finite only if all numbers are.

    float64 is checked by bits: BLAS would start threads, which then spin.
    """

    __slots__ = ("_one", "_two")

    def __init__(self, data: Bytes) -> None:
        values = data.view(np.float32)
        size = (values.size + 1) // 2  # an odd count has its middle number in both halves
        self._one, self._two = values[:size], values[values.size - size :]

    def is_finite(self) -> bool:
        """False also if the product of finite numbers overflows."""
        return math.isfinite(self._one.dot(self._two))


@np.errstate(all="ignore")  # findings are reported by name; the user's settings might warn or raise
def _are_finite(pieces: Sequence[Bits | Halves]) -> bool:
    for piece in pieces:  # noqa: SIM110 - `all` over a generator takes longer than a small piece
        if not piece.is_finite():
            return False
    return True


class PushedPlace(NamedTuple):
    """The location of a pushed parameter that must be finite."""

    parameter: Parameter
    segment: int
    begin: int
    end: int


class FinitePlan:
    """What to check for one set of pushed parameters in one slot."""

    def __init__(self, pushed: Ranges, layout: Layout, arena: Arena, slot: int) -> None:
        self._places = list(_places(pushed, layout))
        segments = {place.segment: layout.segments[place.segment] for place in self._places}
        self._arenas = [(segment, slot, arena(segment, slot)) for segment in segments.values()]
        self._data = {segment.index: array for segment, _, array in self._arenas}
        self._small: list[npt.NDArray[np.float32]] = []
        self._groups: list[list[Bits | Halves]] = []  # threads take one at a time
        self._num_bytes = 0  # total of the groups
        for run in _runs(self._places):
            data, dtype = self._data[run.segment][run.begin : run.end], run.parameter.dtype
            if dtype == "float32" and data.size <= SMALL_BYTES:
                self._small.append(data.view(np.float32))
            else:
                self._num_bytes += data.size
                self._groups += [[*_cut(part, dtype)] for part in _split(data, LONG_BYTES)]
        self.is_empty = not self._places

    def fits(self, arena: Arena) -> bool:
        """Whether the arenas are still the same memory."""
        for segment, slot, array in self._arenas:  # noqa: SIM110 - `all` of a generator takes longer than a small push
            if arena(segment, slot) is not array:
                return False
        return True

    def first_bad(self) -> str | None:
        """The first parameter that is not finite."""
        try:
            # Fastest for a few numbers: the sum of squares is finite only if all numbers are.
            for values in self._small:
                if not values.dot(values) < math.inf:
                    return self._first_bad_exactly()
        except (FloatingPointError, RuntimeWarning):  # depends on the user's NumPy settings
            return self._first_bad_exactly()
        # Bytes between parameters are arbitrary and a product may overflow: only an exact check refuses.
        return self._first_bad_exactly() if self._groups and not self._are_groups_finite() else None

    def _are_groups_finite(self) -> bool:
        if count_threads(self._num_bytes) < 2:
            return all(map(_are_finite, self._groups))
        return share(self._groups, _are_finite, self._num_bytes)

    def _first_bad_exactly(self) -> str | None:
        for parameter, segment, begin, end in self._places:
            if not _are_finite([*_cut(self._data[segment][begin:end], parameter.dtype, exact=True)]):
                return parameter.name
        return None


def _places(pushed: Ranges, layout: Layout) -> Iterator[PushedPlace]:
    """Every pushed parameter that must be finite, in memory order."""
    for segment in layout.segments:
        first, count = segment.first_parameter, len(segment.parameters)
        for start, stop in pushed:
            for index in range(max(start - first, 0), min(stop - first, count)):
                parameter, begin = segment.parameters[index], segment.offsets[index]
                # As at registration: assigned values may contain -inf, as masks do.
                is_free = segment.rule_of(parameter).name == "Assign" or parameter.dtype not in FLOATS
                if parameter.num_bytes and not is_free:
                    yield PushedPlace(parameter, segment.index, begin, begin + parameter.num_bytes)


def _runs(places: list[PushedPlace]) -> Iterator[PushedPlace]:
    """Merges neighbours of one dtype, including the few bytes between them."""
    run: PushedPlace | None = None
    for place in places:
        if run is not None and _are_adjacent(run, place):
            run = run._replace(end=place.end)
        else:
            if run is not None:
                yield run
            run = place
    if run is not None:
        yield run


def _are_adjacent(one: PushedPlace, two: PushedPlace) -> bool:
    same = one.segment == two.segment and one.parameter.dtype == two.parameter.dtype
    return same and aligned(one.end) == two.begin


def look_at(data: Bytes, dtype: str, exact: bool = False) -> Bits | Halves:
    return Halves(data) if dtype == "float32" and not exact else Bits(data, dtype)


def _cut(data: Bytes, dtype: str, exact: bool = False) -> Iterator[Bits | Halves]:
    """Bits are read twice, so pieces must fit into the cache."""
    for piece in _split(data, PIECE_BYTES if exact or dtype != "float32" else LONG_BYTES):
        yield look_at(piece, dtype, exact)


def _split(data: Bytes, num_bytes: int) -> Iterator[Bytes]:
    for start in range(0, data.size, num_bytes):
        yield data[start : start + num_bytes]


Copied = tuple[Bytes, Bytes, str]


def copy_finite(copies: Sequence[Copied]) -> bool:
    """Copies each (target, source) and checks it while it is in the cache. Returns whether all is finite.

    False also if a product of finite numbers overflows. Integers are not checked.
    """
    parts = [
        (target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES], dtype)
        for target, source, dtype in copies
        for start in range(0, target.size, PIECE_BYTES)
    ]
    starts = range(0, len(parts), _PIECES_AT_ONCE)
    told = [True]
    groups = [parts[n : n + _PIECES_AT_ONCE] for n in starts]
    share(groups, functools.partial(_copy_group, told), sum(target.size for target, _, _ in copies))
    return told[0]


@np.errstate(all="ignore")
def _copy_group(told: list[bool], group: Sequence[Copied]) -> bool:
    for target, source, dtype in group:
        target[:] = source
        if dtype in FLOATS and not look_at(target, dtype).is_finite():
            told[0] = False
    return True  # everything is copied in any case


class FiniteCheck:
    """Admits finite pushes and voids others. A worker with repeated non-finite pushes is quarantined."""

    def __init__(
        self, config: JobConfig, who: str, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._who, self._say, self._now = config, who, say, now
        self._others = "the round continues" if policy_of(config).in_rounds else "the job continues"
        self.num_refused = 0  #: pushes that were not finite
        self.is_quarantined = False  #: whether this worker's pushes no longer count
        self._is_on = config.check_finite
        self._in_a_row = 0
        self._said: float | None = None
        self._plans: dict[tuple[Ranges, int, int], FinitePlan] = {}

    def admit(self, push: Push, clock: int, layout: Layout, arena: Arena, slot: int) -> Push:
        """Returns the push, or a void one that only advances the clock."""
        if self.is_quarantined:
            if self._config.workers == 1:
                raise self._for_nothing(f"step {clock} would not count")
            return void(push)
        if push.skip or not self._is_on:  # a scaler's overflow is no fault
            return push
        plan = self.plan(without(push.pushed, push.finite), layout, arena, slot)
        if plan.is_empty and not push.finite:
            return push
        bad = plan.first_bad()
        if bad is None:
            self._in_a_row = 0
            return push
        self._refuse(clock, bad)
        return void(push)

    @property
    def num_plans(self) -> int:
        """Plans that are kept."""
        return len(self._plans)

    def plan(self, pushed: Ranges, layout: Layout, arena: Arena, slot: int) -> FinitePlan:
        key = (pushed, slot, len(layout.segments))
        plan = self._plans.get(key)
        if plan is None or not plan.fits(arena):
            if plan is not None or len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = FinitePlan(pushed, layout, arena, slot)
        return plan

    def _refuse(self, clock: int, name: str) -> None:
        self.num_refused += 1
        self._in_a_row += 1
        self.is_quarantined = self._in_a_row >= self._config.bad_pushes
        if self.is_quarantined and self._config.workers == 1:
            raise self._for_nothing(f"{name!r} is not finite at step {clock}")
        now = self._now()
        if self._said is None or now >= self._said + SAY_SECONDS:
            self._said = now
            self._say(f"the push of step {clock} was refused: {name!r} is not finite; {self._others} without it")
        if self.is_quarantined:
            self._plans.clear()
            self._say(
                f"{self._who} is quarantined: {self._in_a_row} pushes in a row were not finite; "
                "from now on it only pulls"
            )

    def _for_nothing(self, what: str) -> RuleError:
        """The only worker is quarantined: no parameter would change again."""
        return RuleError(
            f"{self._who}: {what}; {self._in_a_row} pushes in a row were not, and there is no other worker to "
            "continue. Lower the learning rate, clip (clip_norm), or look for NaN in the data; "
            "--no-check-finite lets everything through"
        )


def void(push: Push) -> Push:
    """The same commit without gradients. The chief's hyperparameters still count."""
    return dataclasses.replace(push, pushed=(), weight=0.0, squared_norm=0.0, skip=False, finite=())


class Digested(NamedTuple):
    """Digests of a copy's pieces, and whether all of it is finite."""

    digests: Sequence[bytes]
    is_finite: bool


def copy_digested(target: Bytes, source: Bytes, dtype: str, *, look: bool) -> Digested:
    """Copies, and reads each piece again while it is cached. `look`: also check that it is finite."""
    starts = range(0, target.size, PIECE_BYTES)
    digests, told = [b""] * len(starts), [True]
    copy = functools.partial(_copy, target, source, dtype if look and dtype in FLOATS else "", digests, told)
    share(starts, copy, target.size)
    return Digested(digests, look and told[0])


@np.errstate(all="ignore")  # non-finite numbers are reported later, by name
def _copy(target: Bytes, source: Bytes, look: str, digests: list[bytes], told: list[bool], start: int) -> bool:
    piece = target[start : start + PIECE_BYTES]
    piece[:] = source[start : start + PIECE_BYTES]
    digests[start // PIECE_BYTES] = xxhash.xxh3_128_digest(piece.data)
    if look and not look_at(piece, look).is_finite():
        told[0] = False
    return True  # everything is copied in any case


def is_same(source: Bytes, digests: Sequence[bytes]) -> bool:
    """Whether the source still has the bytes that were copied."""

    def looks_so(number: int) -> bool:
        start = number * PIECE_BYTES
        return xxhash.xxh3_128_digest(source[start : start + PIECE_BYTES].data) == digests[number]

    return share(range(len(digests)), looks_so, source.size)
