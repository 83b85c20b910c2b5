"""A few numbers among many, in few bits: each as a sign and a power of two, its place by the gap before it.

The encoding: how many there are (uint32), the largest power and the step between powers (uint16 each), then bits: the
codes and the low bits of the gaps, one bit of all after the other, and what is above the low bits in unary (Rice's
code). Gaps come to less than all numbers in sum, so that it is known beforehand how many fit into how many bytes,
wherever they lie. A code is a sign and a number of steps below the largest power; a step is as long as it must be to
reach half of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from syncline.core.codecs.codec import Bytes, Floats
from syncline.errors import FrameError

_HEAD_BYTES = 8
_CODE_BITS, _MOST_STEPS = 4, 7
_SIZE, _INF, _HALF_POWER = 0x7FFF_FFFF, 0x7F80_0000, 0x40_0000  # in bits of a float32
_NOT_FINITE = 255
_MOST_LOW_BITS = 24

_Places = npt.NDArray[np.intp]
_Bits = npt.NDArray[np.uint8]
_Whole = npt.NDArray[np.unsignedinteger[Any]]


class Fit(NamedTuple):
    """How many numbers fit, at least, and how many low bits of a gap make it so many."""

    num_items: int
    low_bits: int


def fit(num_bytes: int, num_items: int) -> Fit:
    """Of so many numbers into so many bytes. Each takes its code, low bits and a one; zeros between the ones are
    (num_items - count) >> low_bits at most."""
    room = 8 * (num_bytes - _HEAD_BYTES)
    found = Fit(0, 0)
    for low in range(_MOST_LOW_BITS + 1):
        count = ((room << low) - num_items) // ((_CODE_BITS + low + 1 << low) - 1)
        if count > found.num_items:
            found = Fit(count, low)
    return found._replace(num_items=min(found.num_items, num_items))


def pack(values: Floats, places: _Places, low_bits: int) -> Bytes:
    """The numbers at these places, in ascending order; but what is below the last step waits."""
    bits = values[places].view(np.uint32)
    sizes = bits & _SIZE
    powers = np.minimum((sizes + _HALF_POWER) >> 23, _NOT_FINITE - 1)  # the nearest power of two
    powers[sizes >= _INF] = _NOT_FINITE
    top = int(powers.max(initial=0))
    if not top:
        return np.empty(0, np.uint8)
    half = (powers.size - 1) // 2
    step = max(1, -(-(top - int(np.partition(powers, half)[half])) // _MOST_STEPS))
    steps = (top - powers + (step - 1)) // step  # down, where a step is more than one power
    travels = (steps <= _MOST_STEPS) & (steps * step < top)
    if not travels.all():
        places, steps, bits = places[travels], steps[travels], bits[travels]
    codes = (steps | bits >> 31 << _CODE_BITS - 1).astype(np.uint8)
    gaps = np.diff(places, prepend=-1) - 1
    low = (gaps & (1 << low_bits) - 1).astype(_whole(low_bits))
    ends = np.cumsum((gaps >> low_bits) + 1)
    above = np.zeros(ends[-1], np.uint8)
    above[ends - 1] = 1
    planes = [*_planes(codes, _CODE_BITS), *_planes(low, low_bits), above]
    head = np.array([places.size, top | step << 16], np.uint32)
    return np.concatenate([head.view(np.uint8), np.packbits(np.concatenate(planes))])


def unpack(data: Bytes, known: Fit, out: Floats) -> None:
    """Writes all of `out`: what did not travel is 0."""
    out.fill(0)
    if not data.size:
        return
    if data.size <= _HEAD_BYTES:
        raise FrameError(f"{data.size} bytes of packed numbers")
    count, powers_said = map(int, data[:_HEAD_BYTES].view(np.uint32))
    top, step = powers_said & 0xFFFF, powers_said >> 16
    if not 0 < count <= known.num_items or not 0 < step <= top <= _NOT_FINITE:
        raise FrameError(f"{count} packed numbers, {known.num_items} at most, by steps of {step} from power {top}")
    codes, places = _codes_and_places(data, count, known.low_bits)
    below = (codes & _MOST_STEPS).astype(np.uint32) * step
    if places[-1] >= out.size or int(below.max()) >= top:
        raise FrameError(f"packed numbers beyond {out.size} places, or below all powers")
    powers, signs = top - below, (codes >> _CODE_BITS - 1).astype(np.uint32)
    found = (powers << 23 | signs << 31).view(np.float32)
    found[powers == _NOT_FINITE] = np.nan
    out[places] = found


def _codes_and_places(data: Bytes, count: int, low_bits: int) -> tuple[_Whole, _Places]:
    bits = np.unpackbits(data[_HEAD_BYTES:])
    start = count * (_CODE_BITS + low_bits)
    ends = np.flatnonzero(bits[start:].view(np.bool_))
    if ends.size != count or bits.size - start - int(ends[-1]) > 8:
        raise FrameError(f"{ends.size} places of {count} packed numbers, in {data.size} bytes")
    planes = bits[:start].reshape(-1, count)
    gaps = (np.diff(ends, prepend=-1) - 1 << low_bits) + _joined(planes[_CODE_BITS:])
    return _joined(planes[:_CODE_BITS]), np.cumsum(gaps + 1) - 1


def _whole(num_bits: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if num_bits <= 8 else np.uint32


def _planes(values: _Whole, num_bits: int) -> Iterable[_Bits]:
    """The n-th bit of all, one after the other."""
    return ((values >> bit & 1).astype(np.uint8, copy=False) for bit in range(num_bits))


def _joined(planes: _Bits) -> _Whole:
    kind = _whole(len(planes))
    found = np.zeros(planes.shape[1], kind)
    for bit, plane in enumerate(planes):
        found |= plane.astype(kind, copy=False) << bit
    return found
