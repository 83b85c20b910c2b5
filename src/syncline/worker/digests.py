"""Copies of which a digest is kept: whether a source is still what was copied from it takes one reading, not two."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from syncline.core.layout import FLOATS
from syncline.worker.arrays import Bytes
from syncline.worker.copying import share
from syncline.worker.finite import PIECE_BYTES, look_at


class Digested(NamedTuple):
    """Of a copy: a digest of each piece, and whether all of it was found to be finite by the way."""

    digests: Sequence[bytes]
    is_finite: bool


def copy_digested(target: Bytes, source: Bytes, dtype: str, *, look: bool) -> Digested:
    """Copies, and reads each piece again while it is in the cache. `look`: whether it is finite is asked."""
    starts = range(0, target.size, PIECE_BYTES)
    digests, told = [b""] * len(starts), [True]
    copy = functools.partial(_copy, target, source, dtype if look and dtype in FLOATS else "", digests, told)
    share(starts, copy, target.size)
    return Digested(digests, look and told[0])


@np.errstate(all="ignore")  # what is not finite is told by name, later
def _copy(target: Bytes, source: Bytes, look: str, digests: list[bytes], told: list[bool], start: int) -> bool:
    piece = target[start : start + PIECE_BYTES]
    piece[:] = source[start : start + PIECE_BYTES]
    digests[start // PIECE_BYTES] = xxhash.xxh3_128_digest(piece.data)
    if look and not look_at(piece, look).is_finite():
        told[0] = False
    return True  # everything is copied, whatever it is


def is_same(source: Bytes, digests: Sequence[bytes]) -> bool:
    """Whether it has the bytes that were copied from it."""

    def looks_so(number: int) -> bool:
        start = number * PIECE_BYTES
        return xxhash.xxh3_128_digest(source[start : start + PIECE_BYTES].data) == digests[number]

    return share(range(len(digests)), looks_so, source.size)
