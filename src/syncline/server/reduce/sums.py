"""A round's sums, as a process group or a hierarchical reducer makes them: gradients of some workers, added up in
memory of their own."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from syncline.core.layout import Piece, Segment, Slice
from syncline.core.rounds import Commit
from syncline.reduce.kernels import narrow, sum_dtype, weighted_sum
from syncline.server.replicate import Region
from syncline.server.rules import Source
from syncline.server.slices import HostedSlice, RoundSums
from syncline.server.tasks import RoundTask, StagedCommit

#: Slices are added up together until they have so many bytes: each call has its price.
BUCKET_BYTES = 16 << 20


class Pending(Protocol):
    """An addition under way."""

    def wait(self) -> object: ...


#: Adds up a tensor over all servers, in place.
Reduce = Callable[[torch.Tensor], Pending]


class SumRegion(Region):
    """Slice-shaped memory that nobody else maps, also on a GPU."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.array, self.flat, self._memory = np.empty(0, np.uint8), flat, None


class _Sum(NamedTuple):
    """Where a slice is added up, and where its sum lies then, in the type of the slice."""

    wide: torch.Tensor
    region: SumRegion


class Bucket:
    """Slices of one segment that are added up together."""

    def __init__(self, slots: Sequence[HostedSlice]) -> None:
        first = slots[0]
        kind, device = wide_type(first), first.rules.flat.device
        self.flat = torch.zeros(sum(slot.rules.flat.numel() for slot in slots), dtype=kind, device=device)
        self._sums: list[tuple[HostedSlice, _Sum]] = []
        begin = 0
        for slot in slots:
            flat = slot.rules.flat
            wide = self.flat[begin : begin + flat.numel()]
            region = SumRegion(wide if kind == flat.dtype else torch.zeros_like(flat))
            self._sums.append((slot, _Sum(wide, region)))
            begin += flat.numel()
        self.numbers = [slot.part.id for slot in slots]

    def lay(self, own: Sequence[Commit[StagedCommit]], equal: float | None) -> None:
        """What these, of one server's worker, bring to it."""
        for slot, (wide, _) in self._sums:
            lay_shares(slot, own, wide, equal)

    def awaits(self, own: Sequence[Commit[StagedCommit]]) -> list[int]:
        """The slices of which these bring anything."""
        touched = [slot for slot, _ in self._sums if any(slot.touched_by(commit.item.pushed) for commit in own)]
        return [slot.part.id for slot in touched]

    def read(
        self, counted: Sequence[Commit[StagedCommit]], weight: float, equal: float | None, found: RoundSums
    ) -> None:
        """It is added up: its slices have their sums."""
        for slot, (wide, region) in self._sums:
            has = divide(slot, counted, wide, weight, equal)
            narrow(wide, region.flat)
            found.put(slot, region, has)


class Sums:
    """The memory of one process group: of another one's, something may still be on its way."""

    def __init__(self, slots: Callable[[], Iterable[HostedSlice]]) -> None:
        """`slots`: all copies that are here, of whatever primaries."""
        self._slots = slots
        self._buckets: dict[int, list[Bucket]] = {}  # by segment

    def buckets(self, counted: Sequence[Commit[StagedCommit]]) -> list[Bucket]:
        """Of the segments that any of these has pushed anything of: the same at all servers, in the same order. What
        lies last comes first: backward comes to it first."""
        if not counted:
            return []
        by_segment: dict[int, list[HostedSlice]] = collections.defaultdict(list)
        for slot in self._slots():
            by_segment[slot.part.segment].append(slot)
        found = list[Bucket]()
        for segment, slots in sorted(by_segment.items(), key=_readiness, reverse=True):
            if any(slot.touched_by(commit.item.pushed) for commit in counted for slot in slots):
                found += self._buckets_of(segment, slots)
        return found

    def _buckets_of(self, segment: int, slots: Iterable[HostedSlice]) -> list[Bucket]:
        if segment not in self._buckets:
            groups: list[list[HostedSlice]] = []
            for slot in sorted(slots, key=lambda slot: slot.part.id, reverse=True):
                last = groups[-1] if groups else []
                size = sum(other.part.num_bytes for other in last)
                if last and wide_type(last[0]) == wide_type(slot) and size + slot.part.num_bytes <= BUCKET_BYTES:
                    last.append(slot)
                else:
                    groups.append([slot])
            self._buckets[segment] = [Bucket(group) for group in groups]
        return self._buckets[segment]


def _readiness(item: tuple[int, list[HostedSlice]]) -> tuple[bool, int]:
    """Buffers come last: they are there at the step."""
    number, slots = item
    return not all(all(_assigned(slot.segment, slot.pieces)) for slot in slots), number


def counted_in(work: RoundTask) -> list[Commit[StagedCommit]]:
    """The commits of a round of which anything is added up."""
    return [] if work.skip else [commit for commit in work.commits if commit.item.weight > 0]


def equal_weight(counted: Iterable[Commit[StagedCommit]]) -> float | None:
    """What each of them weighs, where all weigh the same: nothing is weighted then before it is added up."""
    weights = {commit.item.weight for commit in counted}
    return weights.pop() if len(weights) == 1 else None


def averages(segment: Segment, pieces: Sequence[Piece]) -> list[bool]:
    """Of which pieces the mean counts, not the sum."""
    return [segment.reduce == "mean" or assigned for assigned in _assigned(segment, pieces)]


def _assigned(segment: Segment, pieces: Sequence[Piece]) -> list[bool]:
    return [segment.rule_of(segment.parameters[piece.parameter]).name == "Assign" for piece in pieces]


def wide_of(segment: Segment, part: Slice) -> torch.dtype:
    """In which a slice is added up."""
    found: torch.dtype = getattr(torch, sum_dtype(part.dtype, averages=any(averages(segment, segment.pieces(part)))))
    return found


def wide_type(slot: HostedSlice) -> torch.dtype:
    return wide_of(slot.segment, slot.part)


def lay_shares(
    slot: HostedSlice, commits: Sequence[Commit[StagedCommit]], wide: torch.Tensor, equal: float | None
) -> None:
    """What these have pushed, added up in their order, weighted unless all weigh the same; else zeros."""
    sources: list[Source] = []
    for item in (commit.item for commit in commits if commit.item.weight > 0):
        if any(has := slot.has(item.pushed)):
            array = item.arrays(slot.part)
            assert array is not None, "pushed, and not staged"
            sources.append((array, item.weight, has))
    weighs = [equal is None and averaged for averaged in averages(slot.segment, slot.pieces)]
    if sources and all(all(has) for _, _, has in sources) and len(set(weighs)) == 1:
        weighted_sum([(array, weight) for array, weight, _ in sources], wide, weighted=weighs[0])
        return
    wide.zero_()
    for index, weighted in enumerate(weighs):
        here = [(slot.rules.view(array, index), weight) for array, weight, has in sources if has[index]]
        if here:
            weighted_sum(here, slot.rules.view(wide, index), weighted=weighted)


def pieces_of(slot: HostedSlice, commits: Sequence[Commit[StagedCommit]]) -> list[int]:
    """Those of a slice that any of these has pushed."""
    pushed = [slot.has(commit.item.pushed) for commit in commits]
    return [index for index in range(len(slot.pieces)) if any(has[index] for has in pushed)]


def divide(
    slot: HostedSlice, commits: Sequence[Commit[StagedCommit]], wide: torch.Tensor, weight: float, equal: float | None
) -> list[int]:
    """Makes means of sums where means count: by the weight of the whole round; of what is assigned, of those who
    pushed it. Returns the pieces that anybody has pushed."""
    pushed = [(slot.has(commit.item.pushed), commit.item.weight) for commit in commits]
    found, by = [], list[float]()
    means, assigns = averages(slot.segment, slot.pieces), _assigned(slot.segment, slot.pieces)
    for index, (averaged, assigned) in enumerate(zip(means, assigns, strict=True)):
        there = [each for has, each in pushed if has[index]]
        total = sum(there) if assigned else weight
        by.append((total / (equal or 1.0)) if averaged and there else 1.0)
        if there:
            found.append(index)
    if len(set(by)) == 1:
        if by[0] != 1.0:
            wide.div_(by[0])
        return found
    for index, divisor in enumerate(by):
        if divisor != 1.0:
            slot.rules.view(wide, index).div_(divisor)
    return found
