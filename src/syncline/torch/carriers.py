"""How gradients get into the arena of the next commit: copied there by the CPU, or by a side stream of a GPU."""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from syncline.core.layout import Segment, Slice
from syncline.net.transport import Memory
from syncline.torch.comparing import Comparison, MirrorCheck, place_of
from syncline.torch.streams import Side, StreamMark
from syncline.worker.arrays import to_bytes
from syncline.worker.exchange.finite import LOOK_BYTES, SMALL_BYTES, copy_digested, copy_finite, is_same
from syncline.worker.exchange.servers import ServersExchange

#: Slices leave a device when they are this many bytes together: each copy takes a while to be queued.
BUCKET_BYTES = 16 << 20


class Carrier(Protocol):
    """The way of one segment's gradients. Slices are named by their position in the segment."""

    @property
    def helps_early(self) -> bool:
        """Whether it helps to carry slices before the commit."""

    def targets(self, indices: Iterable[int]) -> list[torch.Tensor]:
        """Where the gradients of these parameters are copied."""

    def fill(self, gradients: Mapping[int, torch.Tensor]) -> Collection[int]:
        """Copies these gradients there; which of them were found to be finite by the way."""

    def copy_early(self, index: int, gradient: torch.Tensor) -> bool:
        """Copies a gradient there that has become ready; whether it was found to be finite by the way."""

    def carry(self, numbers: Sequence[int]) -> None:
        """A gradient was copied, and these slices (or none) are whole by that: they travel."""

    def same(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        """Which gradients, by the index of their parameter, have the very bits that were copied."""

    def hand_over(self) -> bool:
        """Everything is copied. Whether all of it was found to be finite by that."""

    def finish(self, late: set[int]) -> None:
        """The arena has everything when this returns: also slices that have changed since, or came late."""


class ArenaCarrier:
    """The CPU copies gradients into the arena; early where that helps the exchange."""

    def __init__(self, exchange: ServersExchange, segment: Segment) -> None:
        self._exchange, self._segment = exchange, segment
        self._views: dict[int, list[torch.Tensor]] = {}  # by arena: there is one per slot of the window
        # By parameter: where it was copied early, and the digests of what was, where that pays.
        self._digests: dict[int, tuple[torch.Tensor, Sequence[bytes]]] = {}
        self._bucket: list[Slice] = []  # copied, and not told
        self._is_shared = False
        exchange.is_arena_shared |= segment.index in exchange.carried  # by another optimizer, of the same parameters
        exchange.carried.add(segment.index)

    @property
    def helps_early(self) -> bool:
        return self._segment.num_bytes >= self._exchange.early_bytes

    def targets(self, indices: Iterable[int]) -> list[torch.Tensor]:
        arena = self._exchange.arena(self._segment.index)
        views = self._views.get(id(arena))
        if views is None:
            whole = torch.from_numpy(arena)
            views = [place_of(whole, self._segment, index) for index in range(len(self._segment.parameters))]
            self._views[id(arena)] = views
        return [views[index] for index in indices]

    def share(self) -> Memory:
        """The arena, for gradients that are made in it. Only without a window: there is one, and it stays."""
        self._exchange.is_arena_shared = self._is_shared = True
        return self._exchange.arena_memory(self._segment.index)

    def fill(self, gradients: Mapping[int, torch.Tensor]) -> Collection[int]:
        for index in gradients:
            self._digests.pop(index, None)
        if self._is_shared:
            places = zip(gradients.items(), self.targets(gradients), strict=True)
            gradients = {index: g for (index, g), target in places if not _is_there(g, target)}
        targets = self.targets(gradients)
        pairs = list(zip(targets, gradients.values(), strict=True))
        if (
            self._exchange.checks_finite
            and sum([target.nbytes for target in targets]) >= LOOK_BYTES
            and all(is_plain(gradient, target.dtype) for target, gradient in pairs)
        ):
            dtypes = [self._segment.parameters[index].dtype for index in gradients]
            copies = [(to_bytes(t), to_bytes(g), d) for (t, g), d in zip(pairs, dtypes, strict=True)]
            return gradients.keys() if copy_finite(copies) else ()
        if targets:
            torch._foreach_copy_(targets, list(gradients.values()))
        return ()

    def copy_early(self, index: int, gradient: torch.Tensor) -> bool:
        (target,) = self.targets((index,))
        self._digests.pop(index, None)
        if target.nbytes < SMALL_BYTES or not is_plain(gradient, target.dtype):
            target.copy_(gradient)
            return False
        dtype, look = self._segment.parameters[index].dtype, self._exchange.checks_finite
        copied = copy_digested(to_bytes(target), to_bytes(gradient), dtype, look=look)
        self._digests[index] = (target, copied.digests)
        return copied.is_finite

    def carry(self, numbers: Sequence[int]) -> None:
        self._bucket += [self._segment.slices[number] for number in numbers]
        if self._bucket and _num_bytes(self._bucket) >= self._exchange.early_bytes:
            self._exchange.stage(self._bucket)
            self._bucket = []

    def same(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        pairs = zip(gradients.items(), self.targets(gradients), strict=True)
        return {index for (index, gradient), target in pairs if self._is_same(index, target, gradient)}

    def _is_same(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> bool:
        if index not in self._digests:
            return _same_bits(target, gradient)
        where, digests = self._digests[index]
        is_there = where is target and not self._exchange.is_arena_shared  # else there may be something else by now
        is_like = is_plain(gradient, target.dtype) and gradient.nbytes == target.nbytes
        return is_there and is_like and is_same(to_bytes(gradient), digests)

    def finish(self, late: set[int]) -> None:
        self._bucket = []  # what was not staged by now goes with the commit

    def hand_over(self) -> bool:
        return False


class MirrorCarrier:
    """Gradients are copied into their mirror on the device, and from there by a side stream into the arena."""

    helps_early = True

    def __init__(self, exchange: ServersExchange, segment: Segment, device: torch.device, side: Side) -> None:
        self._exchange, self._segment, self._side = exchange, segment, side
        self._mirror = torch.zeros(segment.num_bytes, dtype=torch.uint8, device=device)
        self._views = [place_of(self._mirror, segment, index) for index in range(len(segment.parameters))]
        self._comparison, self._check = Comparison(segment, self._mirror), MirrorCheck(segment, self._mirror)
        self._streams: set[Hashable] = set()  # that have filled the mirror since the side followed them
        self._bucket: list[Slice] = []
        self._under_way: collections.deque[tuple[StreamMark, list[Slice]]] = collections.deque()  # to a socket

    def targets(self, indices: Iterable[int]) -> list[torch.Tensor]:
        return [self._views[index] for index in indices]

    def fill(self, gradients: Mapping[int, torch.Tensor]) -> Collection[int]:
        torch._foreach_copy_(self.targets(gradients), list(gradients.values()))
        return ()

    def copy_early(self, index: int, gradient: torch.Tensor) -> bool:
        self._views[index].copy_(gradient)
        return False

    def carry(self, numbers: Sequence[int]) -> None:
        self._streams.add(self._side.current())
        self._bucket += [self._segment.slices[number] for number in numbers]
        if _num_bytes(self._bucket) >= BUCKET_BYTES:
            self._empty_bucket()
        self._stage(wait=False)

    def _empty_bucket(self) -> None:
        self._copy(self._bucket)
        if self._bucket and _num_bytes(self._bucket) >= self._exchange.early_bytes:
            self._under_way.append((self._side.mark(), self._bucket))
        self._bucket = []

    def _copy(self, parts: Sequence[Slice]) -> None:
        if not parts:
            return
        for stream in self._streams:
            self._side.follow(stream)
        self._streams.clear()
        arena = self._side.host_memory(self._exchange.arena(self._segment.index))
        for begin, end in _runs(parts):
            self._side.copy(arena[begin:end], self._mirror[begin:end])

    def _stage(self, *, wait: bool) -> None:
        """Sends what has reached the arena, where a socket carries it."""
        while self._under_way and (wait or self._under_way[0][0].done()):
            mark, parts = self._under_way.popleft()
            mark.wait()
            self._exchange.stage(parts)

    def same(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        self._empty_bucket()
        self._stage(wait=True)  # while backward is still at work on the device
        return self._comparison.same(gradients)

    def finish(self, late: set[int]) -> None:
        self._empty_bucket()
        self._under_way.clear()  # what was not staged by now goes with the commit
        self._streams.add(self._side.current())
        self._copy([self._segment.slices[number] for number in late])
        if self._exchange.checks_finite:
            self._check.begin()  # while the last copies are made
        self._side.mark().wait()

    def hand_over(self) -> bool:
        """The host looks only if the device finds something, to say what it is."""
        return self._exchange.checks_finite and self._check.is_finite()


def _num_bytes(parts: Iterable[Slice]) -> int:
    return sum([part.num_bytes for part in parts])


def _runs(parts: Sequence[Slice]) -> list[tuple[int, int]]:
    """The bytes of slices, neighbours in one run."""
    runs: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda part: part.offset):
        if runs and runs[-1][1] == part.offset:
            runs[-1] = (runs[-1][0], part.offset + part.num_bytes)
        else:
            runs.append((part.offset, part.offset + part.num_bytes))
    return runs


def _is_there(gradient: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a gradient was made in the arena."""
    return gradient.data_ptr() == target.data_ptr() and is_plain(gradient, target.dtype)


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether its bytes lie in host memory in a row, as they are."""
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.is_neg()


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype != two.dtype or not one.numel():
        return one.dtype == two.dtype
    pair = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, two.to("cpu").contiguous())]
    # torch compares wide numbers four times as fast; the same bits are equal in any type that has no NaN.
    if all(flat.nbytes % 8 == flat.storage_offset() % 8 == 0 for flat in pair):
        pair = [flat.view(torch.int64) for flat in pair]
    return torch.equal(*pair)
