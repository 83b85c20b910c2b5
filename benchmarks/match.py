"""Two sides taking turns, so that whatever else the machine does meets both alike."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping

from benchmarks.row import LEAST_PAIRS, Effort, Samples
from benchmarks.sides import Side, importable
from benchmarks.turns import Player, Table

#: Of a side, after so many operations of its.
Gauge = Callable[[int], float]
#: Is told of a turn: its side, and its number of operations.
Watch = Callable[[str, int], None]
#: Operations in the first, uncounted turn, and in any other at least and at most.
FEW, MOST = 2, 20_000


def play(
    ours: Side,
    reference: Side,
    effort: Effort,
    *,
    gauges: Mapping[str, Gauge] | None = None,
    watch: Watch = lambda side, num_operations: None,
) -> Samples:
    """Starts both sides, lets them take turns, ends them; nothing is left behind.

    A figure is the seconds per operation of a turn, or what the side's gauge (`ours`, `reference`) shows after so
    many operations. `watch` is called after every turn, and once before the first one that counts, without a side.
    """
    sides = {"ours": ours, "reference": reference}

    def look() -> None:
        for side in sides.values():
            side.look()

    with importable(), tempfile.TemporaryDirectory(prefix="syncline-") as name:
        folder = pathlib.Path(name)
        table = Table(folder, look)
        try:
            for side in sides.values():
                side.start(folder, table.path)
            table.wait_for({Player(key, k) for key, side in sides.items() for k in range(side.num_processes)})
            return _take_turns(table, effort, gauges or {}, watch)
        finally:
            table.close()
            for side in sides.values():
                side.stop()


def _take_turns(table: Table, effort: Effort, gauges: Mapping[str, Gauge], watch: Watch) -> Samples:
    began = time.monotonic()
    counts = {side: _count(table.turn(side, FEW), effort) for side in ("ours", "reference")}
    for gauge in gauges.values():
        gauge(1)  # what was before does not count
    watch("", 1)

    def take(side: str) -> float:
        seconds = table.turn(side, counts[side])
        watch(side, counts[side])
        return gauges[side](counts[side]) if side in gauges else seconds

    return take_pairs(take, effort, began)


def take_pairs(take: Callable[[str], float], effort: Effort, began: float) -> Samples:
    """One figure of each side after the other, who comes first in turn; fewer pairs when the row's time is up."""
    taken: dict[str, list[float]] = {"ours": [], "reference": []}
    for number in range(effort.num_pairs):
        if number >= LEAST_PAIRS and time.monotonic() - began > effort.row_seconds:
            break
        order = ("ours", "reference") if number % 2 == 0 else ("reference", "ours")
        for side in order:
            taken[side].append(take(side))
    return Samples(taken["ours"], taken["reference"])


def _count(seconds: float, effort: Effort) -> int:
    """How many operations make a turn."""
    return max(FEW, min(MOST, round(effort.turn_seconds / max(seconds, 1e-9))))
