"""Where pulled parameters go: one flat buffer, or the caller's arrays piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from syncline.client.arrays import Bytes
from syncline.core.layout import ITEM_BYTES, Layout, Slice


class Sink(Protocol):
    """Takes the bytes of slices."""

    def wants(self, part: Slice) -> bool:
        """Whether this slice is to be brought at all."""

    def views(self, part: Slice) -> list[Bytes]:
        """Buffers that together take exactly the bytes of this slice."""


class FlatSink:
    """Whole segments, as they are laid out."""

    def __init__(self, flats: Mapping[int, Bytes]) -> None:
        self._flats = flats

    def wants(self, part: Slice) -> bool:
        return part.segment in self._flats

    def views(self, part: Slice) -> list[Bytes]:
        return [self._flats[part.segment][part.offset : part.offset + part.num_bytes]]


class ArraySink:
    """Single parameters by name; what lies between them is dropped."""

    def __init__(self, layout: Layout, targets: Mapping[str, Bytes]) -> None:
        self._layout, self._targets = layout, targets
        self._wanted = {part.id for part in self.slices()}

    def slices(self) -> list[Slice]:
        """The slices that hold any of the targets."""
        wanted = {self._layout.parameter_id(name) for name in self._targets}
        found = []
        for segment in self._layout.segments:
            for part in segment.slices:
                ids = (segment.first_parameter + piece.parameter for piece in self._layout.pieces(part))
                if not wanted.isdisjoint(ids):
                    found.append(part)
        return found

    def wants(self, part: Slice) -> bool:
        return part.id in self._wanted

    def views(self, part: Slice) -> list[Bytes]:
        segment = self._layout.segments[part.segment]
        found: list[Bytes] = []
        end = 0
        for piece in self._layout.pieces(part):
            parameter = segment.parameters[piece.parameter]
            size = ITEM_BYTES[parameter.dtype]
            if piece.offset > end:
                found.append(np.empty(piece.offset - end, np.uint8))
            target = self._targets.get(parameter.name)
            if target is None:
                found.append(np.empty(piece.num_items * size, np.uint8))
            else:
                found.append(target[piece.start * size : (piece.start + piece.num_items) * size])
            end = piece.offset + piece.num_items * size
        if end < part.num_bytes:
            found.append(np.empty(part.num_bytes - end, np.uint8))
        return found


def scatter(source: Bytes, targets: list[Bytes]) -> None:
    """Copies one run of bytes into several buffers, in order."""
    start = 0
    for target in targets:
        target[:] = source[start : start + target.nbytes]
        start += target.nbytes
