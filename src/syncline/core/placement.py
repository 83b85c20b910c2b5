"""Placement: where a segment is cut into slices, and which server gets which."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from syncline.core.layout import ALIGN, Segment, Slice, aligned
from syncline.core.seats import Seat

#: A run of bytes of one dtype that goes to one server.
Run = tuple[str, str, int, int]  # server, dtype, offset, num_bytes


def place(
    segment: Segment, servers: Sequence[str], loads: Mapping[str, int], slice_bytes: int, first_slice: int
) -> tuple[Segment, list[Seat]]:
    """The segment with its slices, and a primary for each, so that the servers' bytes come out even.

    What must stay whole goes first, largest first, to the server with the least; what may be cut then fills
    every server up to the same level and is cut into slices of about `slice_bytes`.
    """
    assert servers and slice_bytes >= ALIGN
    level = {server: loads.get(server, 0) for server in servers}
    whole, blocks = _split(segment, slice_bytes)
    runs: list[Run] = []
    for dtype, offset, num_bytes in sorted(whole, key=lambda item: (-item[2], item[1])):
        server = min(servers, key=lambda name: level[name])
        level[server] += num_bytes
        runs.append((server, dtype, offset, num_bytes))
    for dtype, offset, num_bytes in sorted(blocks, key=lambda item: item[2]):
        runs += _pour(dtype, offset, num_bytes, servers, level)
    slices, seats = _cut(segment, runs, slice_bytes, first_slice)
    return msgspec.structs.replace(segment, slices=tuple(slices)), seats


Block = tuple[str, int, int]  # dtype, offset, num_bytes


def _split(segment: Segment, slice_bytes: int) -> tuple[list[Block], list[Block]]:
    """Blocks that stay whole (small whole tensors together), and one block per dtype that may be cut."""
    whole: list[Block] = []
    free: dict[str, list[int]] = {}
    for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
        size = aligned(parameter.num_bytes)
        if segment.rule_of(parameter).elementwise:
            begin_end = free.setdefault(parameter.dtype, [offset, offset])
            begin_end[1] = offset + size
        elif size:
            last = whole[-1] if whole else None
            joins = last and last[0] == parameter.dtype and last[1] + last[2] == offset
            if last and joins and last[2] + size <= slice_bytes // 4:
                whole[-1] = (last[0], last[1], last[2] + size)
            else:
                whole.append((parameter.dtype, offset, size))
    return whole, [(dtype, begin, end - begin) for dtype, (begin, end) in free.items() if end > begin]


def _pour(dtype: str, offset: int, num_bytes: int, servers: Sequence[str], level: dict[str, int]) -> list[Run]:
    """Gives a block to the servers so that their levels become as even as it allows, in contiguous runs."""
    ranked = sorted(servers, key=lambda name: level[name])  # stable: ties by the order of names given
    for count in range(len(ranked), 0, -1):
        target = (num_bytes + sum(level[name] for name in ranked[:count])) / count
        if target >= level[ranked[count - 1]]:
            break
    runs, start, wanted = [], 0, 0.0
    for position, server in enumerate(ranked[:count]):
        wanted += target - level[server]
        stop = num_bytes if position == count - 1 else min(num_bytes, round(wanted / ALIGN) * ALIGN)
        if stop > start:
            runs.append((server, dtype, offset + start, stop - start))
            level[server] += stop - start
            start = stop
    return runs


def _cut(segment: Segment, runs: list[Run], slice_bytes: int, first_slice: int) -> tuple[list[Slice], list[Seat]]:
    slices: list[Slice] = []
    seats: list[Seat] = []
    whole_starts = {
        offset
        for parameter, offset in zip(segment.parameters, segment.offsets, strict=True)
        if parameter.num_bytes and not segment.rule_of(parameter).elementwise
    }
    for server, dtype, offset, num_bytes in sorted(runs, key=lambda run: run[2]):
        count = 1 if offset in whole_starts else max(1, -(-num_bytes // slice_bytes))
        edges = [round(num_bytes * k / count / ALIGN) * ALIGN for k in range(count)] + [num_bytes]
        for begin, end in itertools.pairwise(edges):
            if end > begin:
                number = first_slice + len(slices)
                slices.append(Slice(number, segment.index, dtype, offset + begin, end - begin))
                seats.append(Seat(number, server))
    return slices, seats
