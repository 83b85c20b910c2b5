"""Shares: who gets how much of the work, by measured speed. Pure arithmetic; each decision says why."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: A lease lasts this long at most, and whoever has less than this left asks for the next.
LEASE_SECONDS = 60.0
#: Batches of a first lease, when nobody knows yet how fast a worker is.
FIRST_BATCHES = 4
#: Widths are changed when one of them is off by more than this part of it.
WORTH_A_CHANGE = 0.1


def widths(total: int, speeds: Mapping[str, float]) -> dict[str, int]:
    """A global batch cut by speed: whole samples that add up to it, at least one each where there are enough.

    Speeds that nobody knows (0) count as the mean of the known ones.
    """
    names = list(speeds)
    known = [speed for speed in speeds.values() if speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    weights = {name: speeds[name] if speeds[name] > 0 else mean for name in names}
    least = 1 if total >= len(names) else 0
    free, whole = total - least * len(names), sum(weights.values())
    exact = {name: free * weights[name] / whole for name in names}
    found = {name: least + math.floor(exact[name]) for name in names}
    by_rest = sorted(names, key=lambda name: (math.floor(exact[name]) - exact[name], names.index(name)))
    for name in by_rest[: total - sum(found.values())]:
        found[name] += 1
    return found


def worth_a_change(now: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
    """Whether the widths in use are far enough from those that the speeds ask for."""
    if now.keys() != wanted.keys():
        return True
    return any(abs(wanted[name] - now[name]) > max(1.0, WORTH_A_CHANGE * now[name]) for name in now)


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
