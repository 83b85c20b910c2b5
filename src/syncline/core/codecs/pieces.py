"""Encodes slices unit by unit: each parameter separately; exempt ones unencoded.

A codec that selects among numbers (`is_joint`) gets everything encodable of a slice as one unit. On the wire an
encoded slice is the bytes of its units in order, and their sizes; -1: the unit is not sent. No sizes: the slice is
not encoded.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from syncline.core.codecs.codec import Bytes, Codec, Floats
from syncline.core.codecs.named import Codecs
from syncline.core.layout import ITEM_BYTES, Segment, Slice
from syncline.errors import ConfigError, FrameError, SynclineError

#: The size of a unit that is not sent.
NOT_SENT = -1
_EMPTY = np.empty(0, np.uint8)


class PiecePlace(NamedTuple):
    """Where a parameter's piece lies within its slice."""

    parameter: int  # index within the segment
    start: int  # first item, within the parameter
    begin: int  # bytes
    end: int

    @property
    def items(self) -> slice:
        """The same in numbers of float32."""
        return slice(self.begin // 4, self.end // 4)


class Unit(NamedTuple):
    """What is encoded together, or sent unencoded."""

    places: tuple[PiecePlace, ...]
    num_bytes: int
    is_encoded: bool

    def gather(self, data: Bytes) -> Floats:
        """Its numbers; without a copy if they are contiguous."""
        parts = [data[place.begin : place.end].view(np.float32) for place in self.places]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spread(self, values: Floats) -> Iterator[tuple[PiecePlace, Floats]]:
        """Splits gathered numbers by their places."""
        start = 0
        for place in self.places:
            end = start + (place.end - place.begin) // 4
            yield place, values[start:end]
            start = end


class Encoded(NamedTuple):
    """An encoded slice: the sizes of its units, and their bytes."""

    sizes: list[int]
    buffers: list[Bytes]


def coder_of(codec: Codec | None, codecs: Codecs) -> SliceCoder | None:
    """The coder of one direction, if it is encoded."""
    return SliceCoder(codec, codecs) if codec is not None else None


class SliceCoder:
    """One codec, for the slices of a job."""

    def __init__(self, codec: Codec, codecs: Codecs) -> None:
        self.codec, self._codecs = codec, codecs
        self._is_joint = bool(getattr(codec, "is_joint", False))
        self._known: dict[int, tuple[Segment, list[Unit]]] = {}

    def units(self, segment: Segment, part: Slice) -> list[Unit]:
        known = self._known.get(part.id)
        if known is None or known[0] is not segment:  # a registration may have been undone
            known = self._known[part.id] = (segment, self._find_units(segment, part))
        return known[1]

    def _find_units(self, segment: Segment, part: Slice) -> list[Unit]:
        encoded: list[PiecePlace] = []
        found: list[Unit] = []
        for piece in segment.pieces(part):
            parameter = segment.parameters[piece.parameter]
            end = piece.offset + piece.num_items * ITEM_BYTES[parameter.dtype]
            place = PiecePlace(piece.parameter, piece.start, piece.offset, end)
            is_encoded = self._codecs.encodes(segment, parameter)
            if is_encoded and self._is_joint:
                encoded.append(place)
            else:
                found.append(Unit((place,), end - piece.offset, is_encoded))
        joint = [Unit(tuple(encoded), sum(place.end - place.begin for place in encoded), True)] if encoded else []
        return joint + found

    def encodes(self, segment: Segment, part: Slice) -> bool:
        """Whether anything in this slice is encoded."""
        return any(unit.is_encoded for unit in self.units(segment, part))

    def bound(self, segment: Segment, part: Slice) -> int:
        """The maximal encoded size of a slice."""
        if not self.encodes(segment, part):
            return part.num_bytes
        return sum(self._most(unit) for unit in self.units(segment, part))

    def _most(self, unit: Unit) -> int:
        return self.codec.bound(unit.num_bytes // 4) if unit.is_encoded else unit.num_bytes

    def encode(self, segment: Segment, part: Slice, data: Bytes, parameters: Container[int] | None = None) -> Encoded:
        """Encodes a slice, or only the units that contain any of these parameters."""
        found = Encoded([], [])
        for unit in self.units(segment, part):
            if parameters is not None and not any(place.parameter in parameters for place in unit.places):
                found.sizes.append(NOT_SENT)
                continue
            if unit.is_encoded:
                self.add(found, self.encoded(segment, unit, unit.gather(data)))
            else:
                place = unit.places[0]
                self.add(found, data[place.begin : place.end].copy())
        return found

    def encoded(self, segment: Segment, unit: Unit, values: Floats) -> Bytes:
        """Encodes a unit and checks the codec's own bound; receivers would close the connection otherwise."""
        try:
            found = self.codec.encode(values)
            most = self._most(unit)
        except Exception as error:  # a user-defined codec
            raise self._blame(segment, unit, f"{type(error).__name__}: {error}") from error
        if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.ndim != 1:
            what = (
                f"{found.ndim}-dimensional {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__
            )
            raise self._blame(segment, unit, f"an encoding is one-dimensional uint8, and this is {what}")
        if found.size > most:
            raise self._blame(segment, unit, f"{found.size} bytes; its own bound({values.size}) is {most}")
        return found

    def _blame(self, segment: Segment, unit: Unit, why: str) -> ConfigError:
        name = segment.parameters[unit.places[0].parameter].name
        return ConfigError(f"the codec {self.codec.name} failed at {unit.num_bytes // 4} numbers of {name!r}: {why}")

    @staticmethod
    def add(found: Encoded, encoding: Bytes) -> None:
        found.sizes.append(encoding.size)
        if encoding.size:
            found.buffers.append(encoding)

    # -- what comes in ------------------------------------------------------------------------------------

    def room(self, segment: Segment, part: Slice, sizes: Sequence[int]) -> list[Bytes]:
        """Memory for an encoding of these sizes. Invalid sizes raise FrameError before anything is allocated."""
        units = self.units(segment, part)
        if len(sizes) != len(units):
            raise FrameError(f"{len(sizes)} units of slice {part.id}, which has {len(units)}")
        for size, unit in zip(sizes, units, strict=True):
            most = self._most(unit)
            is_size = 0 <= size <= most if unit.is_encoded else size == most
            if not is_size and size != NOT_SENT:
                name = segment.parameters[unit.places[0].parameter].name
                raise FrameError(f"{size} bytes of {self.codec.name} for {name!r} in slice {part.id}; at most {most}")
        return [np.empty(size, np.uint8) for size in sizes if size > 0]

    def decode(self, segment: Segment, part: Slice, encoded: Encoded, out: Bytes) -> None:
        """Decodes the units that were sent; others are unchanged."""
        buffers = iter(encoded.buffers)
        for size, unit in zip(encoded.sizes, self.units(segment, part), strict=True):
            if size == NOT_SENT:
                continue
            data = next(buffers) if size else _EMPTY
            if not unit.is_encoded:
                out[unit.places[0].begin : unit.places[0].end] = data
                continue
            # Decode, then copy: the same bytes may arrive twice while they are being summed.
            for place, values in unit.spread(self.decoded(data, unit)):
                out[place.begin : place.end] = values.view(np.uint8)

    def decoded(self, data: Bytes, unit: Unit) -> Floats:
        """A unit's numbers, in new memory."""
        values = np.empty(unit.num_bytes // 4, np.float32)
        try:
            self.codec.decode(data, values)
        except SynclineError:
            raise
        except Exception as error:  # a user-defined codec
            raise FrameError(f"no encoding by {self.codec.name}: {type(error).__name__}: {error}") from None
        return values
