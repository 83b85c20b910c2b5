"""Shares: who gets how much of the work, by measured speed. Pure arithmetic; each decision says why."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

#: A lease lasts this long at most, and whoever has less than this left asks for the next.
LEASE_SECONDS = 60.0
#: Batches of a first lease, when nobody knows yet how fast a worker is.
FIRST_BATCHES = 4
#: Widths are changed when a round would take this much less of its time by it.
WORTH_A_CHANGE = 0.1


def widths(total: int, speeds: Mapping[str, float]) -> dict[str, int]:
    """A global batch cut by speed: whole samples that add up to it, at least one each where there are enough.

    Of all cuts one whose slowest part is through first: what is left over by rounding down goes, sample by sample, to
    whoever is through with it soonest. Speeds that nobody knows (0) count as the mean of the known ones.
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
    """A global batch in parts that differ by at most one sample, the larger ones first."""
    least, num_larger = divmod(total, max(1, num_workers))
    return [least + (rank < num_larger) for rank in range(num_workers)]


def all_known(speeds: Mapping[str, float]) -> dict[str, float]:
    """With the mean of the known ones in the place of those that nobody knows (0)."""
    known = [speed for speed in speeds.values() if speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    return {name: speed if speed > 0 else mean for name, speed in speeds.items()}


def worth_a_change(now: Mapping[str, int], wanted: Mapping[str, int], speeds: Mapping[str, float]) -> bool:
    """Whether a round with the widths in use takes so much longer, by the speeds, than with those that are wanted."""
    if now.keys() != wanted.keys():
        return True
    known = all_known(speeds)
    longest = [max((part[name] / known[name] for name in part), default=0.0) for part in (now, wanted)]
    return longest[0] > longest[1] * (1 + WORTH_A_CHANGE)


def lease_samples(batch: int, num_left: int, speed: float, all_speeds: float, num_workers: int) -> int:
    """How much a worker that is free takes next, in whole batches.

    At most a minute's work, and at most half of what would be its own if all went on as they do now: the closer the
    end, the smaller the leases, so that all come to it together.
    """
    if speed <= 0:
        return min(FIRST_BATCHES, max(1, num_left // (2 * max(1, num_workers) * batch))) * batch
    fair = num_left * speed / max(all_speeds, speed) / 2
    return max(1, math.floor(min(LEASE_SECONDS * speed, fair) / batch)) * batch


def deal_rounds(period: int, speed: float) -> int:
    """Global batches that are dealt out at once: a minute's, as far as the speed of all together is known."""
    if speed <= 0:
        return 2 * FIRST_BATCHES
    return max(2 * FIRST_BATCHES, math.ceil(LEASE_SECONDS * speed / period))
