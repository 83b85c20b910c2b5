"""int8: one byte per number, and a scale per 1024 numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from syncline.core.codecs.codec import Bytes, Floats
from syncline.errors import FrameError

BLOCK_ITEMS = 1024
#: Blocks per chunk, so that a chunk stays in the core's cache.
_CHUNK_BLOCKS = 32
_STEPS = np.float32(127)
#: A block with all numbers below 127 times this counts as zeros: its scale would be inexact.
_LEAST_SCALE = np.finfo(np.float32).tiny

_Codes = npt.NDArray[np.int8]


class Int8:
    """Each number as the nearest of 255 steps (ties to even), off by at most half a step. A step is 1/127 of the
    block's largest number. A block with NaN or Inf becomes NaN.
    """

    name, is_lossy = "int8", True

    def bound(self, num_items: int) -> int:
        return num_items + 4 * _num_blocks(num_items)

    @np.errstate(all="ignore")
    def encode(self, values: Floats) -> Bytes:
        num_blocks = _num_blocks(values.size)
        found = np.empty(values.size + 4 * num_blocks, np.uint8)
        scales, codes = found[: 4 * num_blocks].view(np.float32), found[4 * num_blocks :].view(np.int8)
        whole = values.size // BLOCK_ITEMS
        work = np.empty((min(whole, _CHUNK_BLOCKS) or 1, BLOCK_ITEMS), np.float32)
        blocks = values[: whole * BLOCK_ITEMS].reshape(whole, BLOCK_ITEMS)
        coded = codes[: whole * BLOCK_ITEMS].reshape(whole, BLOCK_ITEMS)
        for start in range(0, whole, _CHUNK_BLOCKS):
            part = slice(start, min(start + _CHUNK_BLOCKS, whole))
            _encode(blocks[part], scales[part], coded[part], work[: part.stop - start])
        if num_blocks > whole:
            rest = values[whole * BLOCK_ITEMS :].reshape(1, -1)
            _encode(rest, scales[whole:], codes[whole * BLOCK_ITEMS :].reshape(1, -1), work[:1, : rest.size])
        return found

    @np.errstate(all="ignore")
    def decode(self, data: Bytes, out: Floats) -> None:
        if data.size != self.bound(out.size):
            raise FrameError(f"{data.size} bytes of int8 for {out.size} numbers")
        num_blocks, whole = _num_blocks(out.size), out.size // BLOCK_ITEMS
        scales, codes = data[: 4 * num_blocks].view(np.float32), data[4 * num_blocks :].view(np.int8)
        end = whole * BLOCK_ITEMS
        coded, blocks = codes[:end].reshape(whole, BLOCK_ITEMS), out[:end].reshape(whole, BLOCK_ITEMS)
        np.multiply(coded, scales[:whole, None], out=blocks)
        if num_blocks > whole:
            np.multiply(codes[end:], scales[whole], out=out[end:])


def _encode(blocks: Floats, scales: Floats, codes: _Codes, work: Floats) -> None:
    np.abs(blocks, out=work)
    work.max(axis=1, out=scales)
    scales /= _STEPS
    scales[scales < _LEAST_SCALE] = 0
    np.multiply(blocks, np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)[:, None], out=work)
    if not np.isfinite(scales).all():
        bad = ~np.isfinite(scales)
        scales[bad], work[bad] = np.nan, 1
    np.rint(work, out=work)
    np.copyto(codes, work, casting="unsafe")


def _num_blocks(num_items: int) -> int:
    return -(-num_items // BLOCK_ITEMS)
