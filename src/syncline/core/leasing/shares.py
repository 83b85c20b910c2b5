"""Shares: how much work each worker gets, by measured speed. Pure arithmetic; each decision has a reason."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

#: The longest lease; a worker with less than this left requests the next.
LEASE_SECONDS = 60.0
#: Batches of a first lease, before a worker's speed is known.
FIRST_BATCHES = 4
#: Shares change when a round would become this much faster.
WORTH_A_CHANGE = 0.1


def widths(total: int, speeds: Mapping[str, float]) -> dict[str, int]:
    """Splits a global batch by speed: whole samples, at least one per worker if possible.

    It minimizes the time of the slowest share: samples left over by rounding go, one by one, to the worker that
    finishes first. Unknown speeds (0) count as the mean of the known ones.
    """
    known = all_known(speeds)
    whole, least = sum(known.values()), 1 if total >= len(known) else 0
    found = {name: max(least, math.floor(total * speed / whole)) for name, speed in known.items()}
    for _ in range(sum(found.values()) - total):
        found[max((n for n in found if found[n] > least), key=lambda n: found[n] / known[n])] -= 1
    soonest = [((found[name] + 1) / speed, place, name) for place, (name, speed) in enumerate(known.items())]
    heapq.heapify(soonest)
    for _ in range(total - sum(found.values())):
        _, place, name = soonest[0]
        found[name] += 1
        heapq.heapreplace(soonest, ((found[name] + 1) / known[name], place, name))
    return found


def equal_parts(total: int, num_workers: int) -> list[int]:
    """Splits a global batch into shares that differ by at most one sample, larger ones first."""
    least, num_larger = divmod(total, max(1, num_workers))
    return [least + (rank < num_larger) for rank in range(num_workers)]


def all_known(speeds: Mapping[str, float]) -> dict[str, float]:
    """Replaces unknown speeds (0) by the mean of the known ones."""
    known = [speed for speed in speeds.values() if speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    return {name: speed if speed > 0 else mean for name, speed in speeds.items()}


def worth_a_change(now: Mapping[str, int], wanted: Mapping[str, int], speeds: Mapping[str, float]) -> bool:
    """Whether the wanted shares would make a round enough faster than the current ones."""
    if now.keys() != wanted.keys():
        return True
    known = all_known(speeds)
    longest = [max((part[name] / known[name] for name in part), default=0.0) for part in (now, wanted)]
    return longest[0] > longest[1] * (1 + WORTH_A_CHANGE)


def lease_samples(batch: int, num_left: int, speed: float, all_speeds: float, num_workers: int) -> int:
    """The size of a free worker's next lease, in whole batches.

    At most a minute's work, and at most half of its fair part of the rest: leases shrink towards the end, so that all
    workers finish together.
    """
    if speed <= 0:
        return min(FIRST_BATCHES, max(1, num_left // (2 * max(1, num_workers) * batch))) * batch
    fair = num_left * speed / max(all_speeds, speed) / 2
    return max(1, math.floor(min(LEASE_SECONDS * speed, fair) / batch)) * batch


def deal_rounds(period: int, speed: float) -> int:
    """Global batches to deal at once: a minute's work, if the total speed is known."""
    if speed <= 0:
        return 2 * FIRST_BATCHES
    return max(2 * FIRST_BATCHES, math.ceil(LEASE_SECONDS * speed / period))
