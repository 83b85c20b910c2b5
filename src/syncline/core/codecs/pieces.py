"""Slices encoded piece by piece: each parameter's numbers by themselves, what is exempt as it is.

On the wire an encoded slice is the bytes of its pieces, one after the other, and their sizes; -1: this piece does
not travel. No sizes at all: the slice is as it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from syncline.core.codecs.codec import Bytes, Codec
from syncline.core.codecs.named import Codecs
from syncline.core.layout import ITEM_BYTES, Segment, Slice
from syncline.errors import FrameError, SynclineError

#: The size of a piece that does not travel.
NOT_SENT = -1
_EMPTY = np.empty(0, np.uint8)


class Place(NamedTuple):
    """A piece within its slice."""

    parameter: int  # index within the segment
    begin: int  # bytes
    end: int
    is_encoded: bool


class Encoded(NamedTuple):
    """A slice on its way: the sizes of its pieces, and their bytes where there are any."""

    sizes: list[int]
    buffers: list[Bytes]


def coder_of(codec: Codec | None, codecs: Codecs) -> SliceCoder | None:
    """For one way of a job, if it is encoded."""
    return SliceCoder(codec, codecs) if codec is not None else None


class SliceCoder:
    """One codec, for the slices of a job."""

    def __init__(self, codec: Codec, codecs: Codecs) -> None:
        self.codec, self._codecs = codec, codecs
        self._known: dict[int, tuple[Segment, list[Place]]] = {}

    def places(self, segment: Segment, part: Slice) -> list[Place]:
        known = self._known.get(part.id)
        if known is None or known[0] is not segment:  # a registration may have been taken back
            found = []
            for piece in segment.pieces(part):
                parameter = segment.parameters[piece.parameter]
                end = piece.offset + piece.num_items * ITEM_BYTES[parameter.dtype]
                is_encoded = self._codecs.encodes(segment, parameter)
                found.append(Place(piece.parameter, piece.offset, end, is_encoded))
            known = self._known[part.id] = (segment, found)
        return known[1]

    def encodes(self, segment: Segment, part: Slice) -> bool:
        """Whether there is anything in this slice to encode; if not, it goes as it lies."""
        return any(place.is_encoded for place in self.places(segment, part))

    def encode(self, segment: Segment, part: Slice, data: Bytes) -> Encoded:
        """All of a slice."""
        found = Encoded([], [])
        for place in self.places(segment, part):
            piece = data[place.begin : place.end]
            self.add(found, self.codec.encode(piece.view(np.float32)) if place.is_encoded else piece.copy())
        return found

    @staticmethod
    def add(found: Encoded, encoding: Bytes) -> None:
        found.sizes.append(encoding.size)
        if encoding.size:
            found.buffers.append(encoding)

    # -- what comes in ------------------------------------------------------------------------------------

    def room(self, segment: Segment, part: Slice, sizes: Sequence[int]) -> list[Bytes]:
        """Memory for an encoding of these sizes; a FrameError, and nothing allocated, for sizes that cannot be."""
        places = self.places(segment, part)
        if len(sizes) != len(places):
            raise FrameError(f"{len(sizes)} pieces of slice {part.id}, which has {len(places)}")
        for size, place in zip(sizes, places, strict=True):
            num_bytes = place.end - place.begin
            most = self.codec.bound(num_bytes // 4) if place.is_encoded else num_bytes
            is_size = 0 <= size <= most if place.is_encoded else size == most
            if not is_size and size != NOT_SENT:
                name = segment.parameters[place.parameter].name
                raise FrameError(f"{size} bytes of {self.codec.name} for {name!r} in slice {part.id}; at most {most}")
        return [np.empty(size, np.uint8) for size in sizes if size > 0]

    def decode(self, segment: Segment, part: Slice, encoded: Encoded, out: Bytes) -> None:
        """Writes the pieces that have come; others are left alone."""
        buffers = iter(encoded.buffers)
        for size, place in zip(encoded.sizes, self.places(segment, part), strict=True):
            if size == NOT_SENT:
                continue
            data, target = next(buffers) if size else _EMPTY, out[place.begin : place.end]
            if not place.is_encoded:
                target[:] = data
                continue
            try:
                # Beside, then copied: the same bytes may come twice, and be summed up meanwhile.
                values = np.empty(target.size // 4, np.float32)
                self.codec.decode(data, values)
            except SynclineError:
                raise
            except Exception as error:  # a codec of the user's own
                raise FrameError(f"no encoding by {self.codec.name}: {type(error).__name__}: {error}") from None
            target[:] = values.view(np.uint8)
