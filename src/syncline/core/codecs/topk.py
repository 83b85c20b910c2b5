"""topk:R — sends only the largest numbers of each slice with their places: as many as fit into 2 R of the bytes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from syncline.core.codecs.codec import Bytes, Floats
from syncline.core.codecs.packing import Fit, fit, pack, unpack
from syncline.errors import FrameError

#: Sample size for estimating the threshold.
_SAMPLE_ITEMS = 1 << 14
_CHUNK_ITEMS = 1 << 15
#: Factor of candidates above the wanted number.
_MARGIN = 1.3
#: Below this many numbers, packing gains little.
LEAST_PACKED = 64

_Places = npt.NDArray[np.intp]


@dataclasses.dataclass(frozen=True)
class TopK:
    """The `share` of numbers with the largest magnitude, at least one. Packed, about six times the share fits,
    each rounded to a power of two; small slices send just the share, exactly. Of equal numbers the first are sent;
    zeros never. All others become 0.
    """

    share: float
    is_lossy = is_joint = True  # per slice: the largest numbers matter most, whichever parameter they belong to

    @property
    def name(self) -> str:
        return f"topk:{self.share:g}"

    def _least(self, num_items: int) -> int:
        return min(num_items, max(1, math.ceil(self.share * num_items)))

    def bound(self, num_items: int) -> int:
        return 8 * self._least(num_items)

    def packing(self, num_items: int) -> Fit | None:
        """How many numbers are sent at most; None: the share, unpacked."""
        return fit(self.bound(num_items), num_items) if self._least(num_items) >= LEAST_PACKED else None

    @np.errstate(all="ignore")
    def encode(self, values: Floats) -> Bytes:
        packing = self.packing(values.size)
        if packing is not None:
            return pack(values, self._largest(values, packing.num_items), packing.low_bits)
        places = self._largest(values, self._least(values.size))
        found = np.empty(8 * places.size, np.uint8)
        found[: 4 * places.size].view(np.uint32)[:] = places
        found[4 * places.size :].view(np.float32)[:] = values[places]
        return found

    def decode(self, data: Bytes, out: Floats) -> None:
        packing = self.packing(out.size)
        if data.size > self.bound(out.size) or (packing is None and data.size % 8):
            raise FrameError(f"{data.size} bytes of {self.name} for {out.size} numbers")
        if packing is not None:
            unpack(data, packing, out)
            return
        count = data.size // 8
        places, values = data[: 4 * count].view(np.uint32), data[4 * count :].view(np.float32)
        if count and (places[-1] >= out.size or (places[1:] <= places[:-1]).any()):
            raise FrameError(f"{self.name}: places out of order, or beyond {out.size} numbers")
        out.fill(0)
        out[places] = values

    def _largest(self, values: Floats, most: int) -> _Places:
        """The places of this many largest numbers, ascending."""
        if not values.size:
            return np.empty(0, np.intp)
        places = self._candidates(values, self._guess(values, most))
        if places.size < most:  # the estimate was too high
            places = self._candidates(values, np.float32(0))
        sizes = np.abs(values[places])
        if places.size <= most:
            return places
        least = np.partition(sizes, places.size - most)[places.size - most]  # NaN sorts last and counts as largest
        above = ~(sizes <= least)
        is_tied = sizes == least
        is_tied[np.flatnonzero(is_tied)[most - int(above.sum()) :]] = False
        found: _Places = places[above | is_tied]
        return found

    @staticmethod
    def _guess(values: Floats, most: int) -> np.float32:
        """An estimate of the threshold, or less."""
        sample = np.abs(values[:: max(1, values.size // _SAMPLE_ITEMS)])
        count = min(sample.size, math.ceil(sample.size * most / values.size * _MARGIN) + 8)
        return np.float32(np.partition(sample, sample.size - count)[sample.size - count])

    @staticmethod
    def _candidates(values: Floats, least: np.float32) -> _Places:
        """The places of numbers that are not smaller, nor zero. NaN counts as large."""
        if not least > 0:
            return np.flatnonzero(values)
        found = []
        work = np.empty(min(values.size, _CHUNK_ITEMS), np.float32)
        for start in range(0, values.size, _CHUNK_ITEMS):
            part = values[start : start + _CHUNK_ITEMS]
            sizes = work[: part.size]
            np.abs(part, out=sizes)
            found.append(np.flatnonzero(~(sizes < least)) + start)
        return np.concatenate(found)
