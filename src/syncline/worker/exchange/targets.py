"""Where pulled parameters go: one flat buffer, or the caller's arrays piece by piece."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from syncline.core.layout import ITEM_BYTES, Layout, Slice
from syncline.core.wire.traffic import Committed
from syncline.worker.arrays import Bytes, copy

Clocks = Mapping[str, int]


class Landed(NamedTuple):
    """The content of a slice in a target: its version, and an upper bound of the workers' clocks in it."""

    version: int
    clocks: Clocks
    own: int = 0  # this worker's clock, if it came with the answer to a commit


def landed(version: int, clocks: Clocks, own: int = 0) -> Landed | None:
    """None if the content is unknown."""
    return Landed(version, clocks, own) if clocks or not version else None


class WantedSlices:
    """The slices of one server that a target wants, split by transport: socket or shared memory."""

    def __init__(self, hosted: Sequence[Slice], target: Target, maps: Callable[[Slice], bool]) -> None:
        self.hosted = hosted
        wanted = [(k, part) for k, part in enumerate(hosted) if target.wants(part)]
        self.by_id = {part.id: part for _, part in wanted}
        self.remote = {part.id: part for _, part in wanted if not maps(part)}
        self.pull = list(self.remote)
        #: With their indices among the server's slices, which order the versions in an answer.
        self.mapped = [(k, part) for k, part in wanted if maps(part)]
        #: The last complete answer. It describes all slices at once, because it is set after every commit.
        self.answer: Committed | None = None

    def landed(self) -> dict[int, Landed | None]:
        """The content of the slices that came with that answer."""
        answer = self.answer
        if answer is None or len(answer.versions) != len(self.hosted):
            return {}
        pairs = zip(self.hosted, answer.versions, strict=True)
        return {p.id: landed(v, answer.clocks, answer.clock) for p, v in pairs if p.id in self.by_id}


class Target(Protocol):
    """Takes the bytes of slices."""

    in_parts: bool  #: whether slices are wanted one by one, as soon as each is applied
    wanted: dict[str, WantedSlices]  #: by server; computed by the exchange and cached here
    #: The content of single slices that differ from their server's last answer; None: being written, or unknown. Set
    #: before the first byte of a slice arrives and after the last.
    kept: dict[int, Landed | None]

    def wants(self, part: Slice) -> bool:
        """Whether the target takes this slice."""

    def views(self, part: Slice) -> list[Bytes]:
        """Buffers that together take exactly the bytes of this slice."""

    def filled(self, parts: Sequence[Slice]) -> None:
        """The buffers of these slices are filled."""

    def take(self, parts: Sequence[tuple[Slice, Bytes]]) -> None:
        """Takes new slices from the server's memory, which is not written before this worker's next commit."""

    def fetches(self, part: Slice) -> bool:
        """Whether the target reads this slice itself from the server in this process."""

    def start_over(self) -> None:
        """A replay will deliver the slices of this commit again."""

    def holds(self, part: Slice) -> bool:
        """Whether all bytes of a slice are here."""

    def copy_of(self, part: Slice) -> Bytes | None:
        """All bytes of a slice; None if some are not here. From any thread."""


class HostTarget(abc.ABC):
    """A target in host memory: new parameters are copied into its buffers."""

    in_parts = False

    def __init__(self) -> None:
        self.wanted: dict[str, WantedSlices] = {}
        self.kept: dict[int, Landed | None] = {}

    @abc.abstractmethod
    def views(self, part: Slice) -> list[Bytes]:
        """Buffers that together take exactly the bytes of this slice."""

    def fetches(self, part: Slice) -> bool:
        return False

    def start_over(self) -> None:  # noqa: B027
        pass  # repeated bytes overwrite the earlier ones

    def filled(self, parts: Sequence[Slice]) -> None:  # noqa: B027
        pass  # the bytes are in place already

    def take(self, parts: Sequence[tuple[Slice, Bytes]]) -> None:
        copy([pair for part, source in parts for pair in scattered(source, self.views(part))])


class FlatTarget(HostTarget):
    """Whole segments in their layout."""

    def __init__(self, flats: Mapping[int, Bytes]) -> None:
        super().__init__()
        self._flats = flats

    def wants(self, part: Slice) -> bool:
        return part.segment in self._flats

    def views(self, part: Slice) -> list[Bytes]:
        return [self._flats[part.segment][part.offset : part.offset + part.num_bytes]]

    def holds(self, part: Slice) -> bool:
        return part.segment in self._flats

    def copy_of(self, part: Slice) -> Bytes | None:
        flat = self._flats.get(part.segment)
        return None if flat is None else flat[part.offset : part.offset + part.num_bytes].copy()


#: Memory for bytes that are dropped is kept up to this size.
_FEW_BYTES = 4096


class ArrayTarget(HostTarget):
    """Single parameters by name; bytes between them are dropped."""

    def __init__(self, layout: Layout, targets: Mapping[str, Bytes]) -> None:
        super().__init__()
        self._layout, self._targets = layout, targets
        self._views: dict[int, list[Bytes]] = {}  # by slice, where next to nothing is dropped
        self._slices = self._find_slices()
        self._wanted = {part.id for part in self._slices}

    def slices(self) -> list[Slice]:
        """The slices that hold any of the targets."""
        return self._slices

    def _find_slices(self) -> list[Slice]:
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
        known = self._views.get(part.id)
        if known is not None:
            return known
        found, num_dropped = self._find_views(part)
        if num_dropped <= _FEW_BYTES:
            self._views[part.id] = found
        return found

    def _find_views(self, part: Slice) -> tuple[list[Bytes], int]:
        """With the number of bytes that go nowhere."""
        segment = self._layout.segments[part.segment]
        found: list[Bytes] = []
        end = num_kept = 0
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
                num_kept += found[-1].size
            end = piece.offset + piece.num_items * size
        if end < part.num_bytes:
            found.append(np.empty(part.num_bytes - end, np.uint8))
        return found, part.num_bytes - num_kept

    def holds(self, part: Slice) -> bool:
        return holds_all(self._layout, part, self._targets.__contains__)

    def copy_of(self, part: Slice) -> Bytes | None:
        return gathered(self._layout, part, self._targets.get)


def holds_all(layout: Layout, part: Slice, holds: Callable[[str], bool]) -> bool:
    """Whether every parameter that has a piece in this slice is held."""
    segment = layout.segments[part.segment]
    return all(holds(segment.parameters[piece.parameter].name) for piece in layout.pieces(part))


def gathered(layout: Layout, part: Slice, bytes_of: Callable[[str], Bytes | None]) -> Bytes | None:
    """Assembles a slice from whole parameters; None if one is missing."""
    segment = layout.segments[part.segment]
    found = np.zeros(part.num_bytes, np.uint8)
    for piece in layout.pieces(part):
        parameter = segment.parameters[piece.parameter]
        source, size = bytes_of(parameter.name), ITEM_BYTES[parameter.dtype]
        if source is None:
            return None
        begin, count = piece.start * size, piece.num_items * size
        found[piece.offset : piece.offset + count] = source[begin : begin + count]
    return found


def scattered(source: Bytes, targets: Sequence[Bytes]) -> list[tuple[Bytes, Bytes]]:
    """Pairs (target, source) that copy one run of bytes into buffers, in order."""
    pairs = []
    start = 0
    for target in targets:
        pairs.append((target, source[start : start + target.nbytes]))
        start += target.nbytes
    return pairs
