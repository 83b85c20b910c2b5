"""bf16 and fp16: two bytes per number. Integer arithmetic: NumPy's conversions are many times slower."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from syncline.core.codecs.codec import Bytes, Floats
from syncline.errors import FrameError

#: Numbers per chunk, so that a chunk stays in the core's cache.
CHUNK_ITEMS = 1 << 15
_Bits = npt.NDArray[np.uint32]
_Codes = npt.NDArray[np.uint16]


class Bf16:
    """The upper half of a float32, rounded to nearest even. NaN and Inf are kept."""

    name, is_lossy = "bf16", True

    def bound(self, num_items: int) -> int:
        return 2 * num_items

    @np.errstate(all="ignore")
    def encode(self, values: Floats) -> Bytes:
        codes = np.empty(values.size, np.uint16)
        work = np.empty(min(values.size, CHUNK_ITEMS), np.uint32)
        for start in range(0, values.size, CHUNK_ITEMS):
            part = values[start : start + CHUNK_ITEMS]
            bits, rounded, found = part.view(np.uint32), work[: part.size], codes[start : start + part.size]
            _round(bits, 16, 0x7FFF, rounded)
            np.copyto(found, rounded, casting="unsafe")
            if not math.isfinite(part.dot(part)):  # may only be large numbers; then nothing is found
                places = np.flatnonzero(np.isnan(part))  # rounding could make it an Inf or a zero
                found[places] = bits[places] >> 16 | 0x40
        return codes.view(np.uint8)

    def decode(self, data: Bytes, out: Floats) -> None:
        _check(self.name, data, out)
        np.left_shift(data.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


class Fp16:
    """IEEE half precision, rounded to nearest even. Numbers above 65504 become 65504, because an Inf would spoil
    every sum. NaN stays NaN.
    """

    name, is_lossy = "fp16", True

    def bound(self, num_items: int) -> int:
        return 2 * num_items

    @np.errstate(all="ignore")
    def encode(self, values: Floats) -> Bytes:
        codes = np.empty(values.size, np.uint16)
        size = min(values.size, CHUNK_ITEMS)
        work = np.empty((2, size), np.uint32)
        for start in range(0, values.size, CHUNK_ITEMS):
            part = values[start : start + CHUNK_ITEMS]
            found = codes[start : start + part.size]
            _to_half(part.view(np.uint32), found, work[0, : part.size], work[1, : part.size])
            if not math.isfinite(part.dot(part)):
                found[np.isnan(part)] = 0x7E00
        return codes.view(np.uint8)

    def decode(self, data: Bytes, out: Floats) -> None:
        _check(self.name, data, out)
        np.take(_halves(), data.view(np.uint16), out=out, mode="clip")  # "raise" would make a copy


#: In bits of a float32: the largest half, and the least one that is normal.
_LARGEST, _NORMAL = 0x477F_E000, 0x3880_0000
#: 0.5: added to a subnormal half, it leaves its steps in the last bits.
_HALF = 0x3F00_0000


def _to_half(bits: _Bits, codes: _Codes, sizes: _Bits, rounded: _Bits) -> None:
    np.bitwise_and(bits, 0x7FFF_FFFF, out=sizes)
    np.minimum(sizes, _LARGEST, out=sizes)
    is_small = sizes < _NORMAL
    _round(sizes, 13, 0xC800_0FFF, rounded)  # with the other exponent: 112 less
    sizes.view(np.float32)[:] += np.float32(0.5)
    sizes -= _HALF
    np.copyto(rounded, sizes, where=is_small)
    np.right_shift(bits, 16, out=sizes)
    sizes &= 0x8000
    rounded |= sizes
    np.copyto(codes, rounded, casting="unsafe")


def _round(bits: _Bits, shift: int, half: int, out: _Bits) -> None:
    """Shifts right, rounding to nearest even. `half`: one less than half a step, plus any offset."""
    np.right_shift(bits, shift, out=out)
    out &= 1
    out += half
    out += bits
    out >>= shift


@functools.cache
def _halves() -> Floats:
    """Every half as a float32."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _check(name: str, data: Bytes, out: Floats) -> None:
    if data.size != 2 * out.size:
        raise FrameError(f"{data.size} bytes of {name} for {out.size} numbers")
