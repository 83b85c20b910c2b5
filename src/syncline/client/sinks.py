"""Where pulled parameters go: one flat buffer, or the caller's arrays piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from syncline.client.arrays import Bytes
from syncline.client.copying import copy
from syncline.core.layout import ITEM_BYTES, Layout, Slice


class Wanted:
    """The slices of one server that a sink wants: which come over the socket, which out of shared memory."""

    def __init__(self, hosted: Sequence[Slice], sink: Sink, maps: Callable[[Slice], bool]) -> None:
        self.num_hosted = len(hosted)
        wanted = [(k, part) for k, part in enumerate(hosted) if sink.wants(part)]
        self.by_id = {part.id: part for _, part in wanted}
        self.remote = {part.id: part for _, part in wanted if not maps(part)}
        self.pull = list(self.remote)
        #: With their places among all slices of the server: the order of the versions in an answer.
        self.mapped = [(k, part) for k, part in wanted if maps(part)]


class Sink(Protocol):
    """Takes the bytes of slices."""

    in_parts: bool  #: whether slices are wanted one by one, each as soon as it is applied
    wanted: dict[str, Wanted]  #: by server; worked out by the exchange, and kept with the sink

    def wants(self, part: Slice) -> bool:
        """Whether this slice is to be brought at all."""

    def views(self, part: Slice) -> list[Bytes]:
        """Buffers that together take exactly the bytes of this slice."""

    def filled(self, parts: Sequence[Slice]) -> None:
        """The buffers of these slices hold their new bytes."""

    def take(self, parts: Sequence[tuple[Slice, Bytes]]) -> None:
        """New bytes of slices, in the server's own memory, where nobody writes before this worker's next commit."""


class HostSink:
    """A sink in this process's memory: whatever comes is copied into its buffers, and that is all."""

    in_parts = False

    def __init__(self) -> None:
        self.wanted: dict[str, Wanted] = {}

    def views(self, part: Slice) -> list[Bytes]:
        raise NotImplementedError

    def filled(self, parts: Sequence[Slice]) -> None:
        pass

    def take(self, parts: Sequence[tuple[Slice, Bytes]]) -> None:
        copy([pair for part, source in parts for pair in scattered(source, self.views(part))])


class FlatSink(HostSink):
    """Whole segments, as they are laid out."""

    def __init__(self, flats: Mapping[int, Bytes]) -> None:
        super().__init__()
        self._flats = flats

    def wants(self, part: Slice) -> bool:
        return part.segment in self._flats

    def views(self, part: Slice) -> list[Bytes]:
        return [self._flats[part.segment][part.offset : part.offset + part.num_bytes]]


class ArraySink(HostSink):
    """Single parameters by name; what lies between them is dropped."""

    def __init__(self, layout: Layout, targets: Mapping[str, Bytes]) -> None:
        super().__init__()
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


def scattered(source: Bytes, targets: Sequence[Bytes]) -> list[tuple[Bytes, Bytes]]:
    """One run of bytes and the buffers that take it, in order, as pairs to be copied."""
    pairs = []
    start = 0
    for target in targets:
        pairs.append((target, source[start : start + target.nbytes]))
        start += target.nbytes
    return pairs
