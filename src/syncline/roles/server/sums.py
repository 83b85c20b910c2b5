"""A round's sums, as a circle makes them: every server's own worker's gradients, added up in memory of their own."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from syncline.core.layout import INTEGERS
from syncline.core.verdicts import Commit
from syncline.roles.server.hosted import HostedSlice
from syncline.roles.server.replication import Region
from syncline.roles.server.work import Contribution, RoundWork

#: Slices are added up together until they have so many bytes: each call has its price.
BUCKET_BYTES = 16 << 20
_HALF = (torch.float16, torch.bfloat16)


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


class _Bucket:
    """Slices of one segment that are added up together."""

    def __init__(self, slots: Sequence[HostedSlice]) -> None:
        first = slots[0]
        kind, device = wide_type(first), first.rules.flat.device
        self.flat = torch.zeros(sum(slot.rules.flat.numel() for slot in slots), dtype=kind, device=device)
        self.sums: dict[int, _Sum] = {}
        begin = 0
        for slot in slots:
            flat = slot.rules.flat
            wide = self.flat[begin : begin + flat.numel()]
            self.sums[slot.part.id] = _Sum(wide, SumRegion(wide if kind == flat.dtype else torch.zeros_like(flat)))
            begin += flat.numel()


class Sums:
    """The memory of one circle: of another one's, something may still be on its way."""

    def __init__(self, slots: Callable[[], Iterable[HostedSlice]], own_worker: str) -> None:
        """`slots`: all copies that are here, of whatever primaries."""
        self._slots, self._own_worker = slots, own_worker
        self._buckets: dict[int, list[_Bucket]] = {}  # by segment

    def make(self, work: RoundWork, reduce: Reduce) -> RoundSums:
        """All servers call this for the same rounds, in the same order: a round's slices follow from its commits."""
        weights = [commit.item.weight for commit in work.commits if commit.item.weight > 0]
        equal = weights[0] if weights and all(weight == weights[0] for weight in weights) else None
        found = RoundSums()
        if work.skip or not weights:
            return found
        own = next((commit for commit in work.commits if commit.worker == self._own_worker), None)
        counted = [commit for commit in work.commits if commit.item.weight > 0]
        pending: list[tuple[Pending, list[tuple[HostedSlice, _Sum]]]] = []
        for segment, slots in self._touched(counted):
            for bucket in self._buckets_of(segment, slots):
                here = [(slot, bucket.sums[slot.part.id]) for slot in slots if slot.part.id in bucket.sums]
                for slot, (wide, _) in here:
                    lay_own_share(slot, own, wide, equal)
                pending.append((reduce(bucket.flat), here))
        for under_way, here in pending:
            under_way.wait()
            for slot, summed in here:
                has = divide(slot, counted, summed.wide, work.weight, equal)
                if summed.region.flat is not summed.wide:
                    is_mean = slot.part.dtype in INTEGERS and summed.wide.is_floating_point()
                    summed.region.flat.copy_(summed.wide.round_() if is_mean else summed.wide)
                found.put(slot, summed.region, has)
        return found

    def _touched(self, commits: Sequence[Commit[Contribution]]) -> list[tuple[int, list[HostedSlice]]]:
        """The segments of which anybody has pushed anything, with all their slices: the same at all servers."""
        by_segment: dict[int, list[HostedSlice]] = collections.defaultdict(list)
        for slot in self._slots():
            by_segment[slot.part.segment].append(slot)
        found = []
        for segment, slots in sorted(by_segment.items()):
            if any(slot.touched_by(commit.item.pushed) for commit in commits for slot in slots):
                found.append((segment, sorted(slots, key=lambda slot: slot.part.id)))
        return found

    def _buckets_of(self, segment: int, slots: Sequence[HostedSlice]) -> list[_Bucket]:
        if segment not in self._buckets:
            groups: list[list[HostedSlice]] = []
            for slot in slots:
                last = groups[-1] if groups else []
                size = sum(other.part.num_bytes for other in last)
                if last and wide_type(last[0]) == wide_type(slot) and size + slot.part.num_bytes <= BUCKET_BYTES:
                    last.append(slot)
                else:
                    groups.append([slot])
            self._buckets[segment] = [_Bucket(group) for group in groups]
        return self._buckets[segment]


class RoundSums:
    """The sums of one round, by slice."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[SumRegion, list[int]]] = {}

    def put(self, slot: HostedSlice, region: SumRegion, has: list[int]) -> None:
        self._found[slot.part.id] = (region, has)

    def region(self, slot: HostedSlice) -> Region | None:
        found = self._found.get(slot.part.id)
        return found[0] if found is not None else None

    def has(self, slot: HostedSlice) -> list[int]:
        """The pieces of a slice that anybody has pushed."""
        found = self._found.get(slot.part.id)
        return found[1] if found is not None else []

    def gradients(self, slot: HostedSlice) -> list[torch.Tensor | None]:
        region = self.region(slot)
        return slot.rules.as_pieces(region.flat, self.has(slot)) if region is not None else [None] * len(slot.pieces)


def averages(slot: HostedSlice) -> list[bool]:
    """Of which pieces the mean counts, not the sum."""
    segment = slot.segment
    return [segment.reduce == "mean" or assigned for assigned in _assigned(slot)]


def _assigned(slot: HostedSlice) -> list[bool]:
    segment = slot.segment
    return [segment.rule_of(segment.parameters[piece.parameter]).name == "Assign" for piece in slot.pieces]


def wide_type(slot: HostedSlice) -> torch.dtype:
    """In which a slice is added up: halves in single precision, means of integers as fractions."""
    kind = slot.rules.flat.dtype
    if slot.part.dtype in INTEGERS:
        return torch.float64 if any(averages(slot)) else torch.int64
    return torch.float32 if kind in _HALF else kind


def lay_own_share(
    slot: HostedSlice, own: Commit[Contribution] | None, wide: torch.Tensor, equal: float | None
) -> None:
    """What this process's own worker has pushed, weighted unless all weigh the same; else zeros."""
    has = slot.has(own.item.pushed) if own is not None and own.item.weight > 0 else []
    if own is None or not any(has):
        wide.zero_()
        return
    source = own.item.arrays(slot.part)
    assert source is not None, "pushed, and not staged"
    weighs = [equal is None and averaged for averaged in averages(slot)]
    if all(has) and len(set(weighs)) == 1:
        wide.copy_(source)
        if weighs[0]:
            wide.mul_(own.item.weight)
        return
    wide.zero_()
    for index, (pushed, weighted) in enumerate(zip(has, weighs, strict=True)):
        if pushed:
            view = slot.rules.view(wide, index)
            view.copy_(slot.rules.view(source, index))
            if weighted:
                view.mul_(own.item.weight)


def divide(
    slot: HostedSlice, commits: Sequence[Commit[Contribution]], wide: torch.Tensor, weight: float, equal: float | None
) -> list[int]:
    """Makes means of sums where means count: by the weight of the whole round; of what is assigned, of those who
    pushed it. Returns the pieces that anybody has pushed."""
    pushed = [(slot.has(commit.item.pushed), commit.item.weight) for commit in commits]
    found, by = [], list[float]()
    for index, (averaged, assigned) in enumerate(zip(averages(slot), _assigned(slot), strict=True)):
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
