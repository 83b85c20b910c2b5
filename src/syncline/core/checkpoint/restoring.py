"""Maps saved slices to current slices, which may be split differently."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator

from syncline.core.checkpoint.manifest import Manifest, SavedSlice, SavedState
from syncline.core.layout import ITEM_BYTES, Piece, Segment, Slice
from syncline.core.slice_state import Copy, Identity, SliceState, least_clocks, life_of
from syncline.errors import StoreError


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Items of one parameter that lie in both a saved and a current slice."""

    saved: SavedSlice
    old_index: int  # of the piece, in its slice
    old: Piece
    new_slice: int
    new_index: int
    new: Piece
    item_bytes: int

    @property
    def start(self) -> int:
        """The first item, within the parameter."""
        return max(self.old.start, self.new.start)

    @property
    def num_items(self) -> int:
        return min(self.old.start + self.old.num_items, self.new.start + self.new.num_items) - self.start

    def in_old(self) -> tuple[int, int]:
        """Byte range in the saved slice."""
        return _place(self.old, self.start, self.num_items, self.item_bytes)

    def in_new(self) -> tuple[int, int]:
        """Byte range in the current slice."""
        return _place(self.new, self.start, self.num_items, self.item_bytes)

    def states(self) -> Iterator[SavedState]:
        """The rule state of the saved piece."""
        return (state for state in self.saved.states if state.piece == self.old_index)


def _place(piece: Piece, start: int, num_items: int, item_bytes: int) -> tuple[int, int]:
    begin = piece.offset + (start - piece.start) * item_bytes
    return begin, begin + num_items * item_bytes


class Restoring:
    """A checkpoint by parameters: finds the saved slices for a current slice."""

    def __init__(self, manifest: Manifest) -> None:
        self._segments = {p.name: (segment, p) for segment in manifest.segments for p in segment.parameters}
        self._pieces: dict[str, list[tuple[SavedSlice, int, Piece]]] = collections.defaultdict(list)
        saved = {one.id: one for one in manifest.slices}
        for segment in manifest.segments:
            for part in segment.slices:
                for index, piece in enumerate(segment.pieces(part)):
                    name = segment.parameters[piece.parameter].name
                    self._pieces[name].append((saved[part.id], index, piece))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda each: each[2].start)

    def overlaps(self, segment: Segment, part: Slice) -> list[Overlap]:
        """All overlaps of a current slice, by piece; StoreError if the checkpoint lacks any."""
        found = []
        for index, piece in enumerate(segment.pieces(part)):
            parameter = segment.parameters[piece.parameter]
            known = self._segments.get(parameter.name)
            if known is None:
                raise StoreError(f"the checkpoint has no parameter {parameter.name!r}")
            if (known[1].dtype, known[1].shape) != (parameter.dtype, parameter.shape):
                raise StoreError(
                    f"{parameter.name!r} is {parameter.describe()}, in the checkpoint it is {known[1].describe()}"
                )
            end, covered = piece.start + piece.num_items, 0
            for saved, old_index, old in self._pieces[parameter.name]:
                if old.start < end and piece.start < old.start + old.num_items:
                    size = ITEM_BYTES[parameter.dtype]
                    found.append(Overlap(saved, old_index, old, part.id, index, piece, size))
                    covered += found[-1].num_items
            if covered != piece.num_items:
                raise StoreError(f"the checkpoint has {covered} of {piece.num_items} items of {parameter.name!r}")
        return found


def version_of(overlaps: Iterable[Overlap]) -> int:
    """The highest saved version."""
    return max((overlap.saved.version for overlap in overlaps), default=0)


def clocks_of(overlaps: Iterable[Overlap]) -> dict[Identity, int]:
    """Every worker's clock that all of it contains."""
    slices = {overlap.saved.id: overlap.saved for overlap in overlaps}
    return least_clocks(SliceState(clocks={(n, i): clock for n, i, clock in s.clocks}) for s in slices.values())


def is_no_older(saved: SavedSlice, copy: Copy | None) -> bool:
    """Whether to restore a lost slice from a checkpoint rather than from a worker's copy: it loses no more
    updates, no acknowledged commit, and keeps the rule state.
    """
    if copy is None:
        return True
    clocks = {life_of(name, incarnation): clock for name, incarnation, clock in saved.clocks}
    return saved.version >= copy.version and all(clocks.get(life, 0) >= c for life, c in copy.clocks.items())
