"""Turns: what is counted of them, and gauges that are read after them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from benchmarks.match import play
from benchmarks.row import Effort
from benchmarks.sides import ProcessSide
from benchmarks.task import Task
from benchmarks.turns import Player, Table, take_turns, take_turns_less


def test_the_clock_runs_from_settled_to_settled(tmp_path: Path):
    """Three operations are not counted; what a device still has under way belongs to neither clock."""
    events: list[str] = []
    player, table = Player("ours", 0), Table(tmp_path, lambda: None)

    def play_turns() -> None:
        settle, operation = (lambda event=event: events.append(event) for event in ("settle", "operation"))
        take_turns(table.path, player, operation, settle=settle, num_uncounted=3)

    thread = threading.Thread(target=play_turns)
    thread.start()
    try:
        table.wait_for({player})
        assert table.turn("ours", 2) > 0
    finally:
        table.close()
        thread.join()
    assert events == ["operation"] * 3 + ["settle"] + ["operation"] * 2 + ["settle"]


def test_a_difference_leaves_out_what_the_plain_steps_take(tmp_path: Path):
    """As many of each, the first of ours not counted; where a busy machine makes it negative, it is just small."""
    calls: list[tuple[str, int]] = []
    player, table = Player("ours", 0), Table(tmp_path, lambda: None)
    run, plain = (lambda count, name=name: calls.append((name, count)) for name in ("run", "plain"))

    def slow(count: int) -> None:
        plain(count)
        time.sleep(0.05)

    thread = threading.Thread(target=take_turns_less, args=(table.path, player, run, slow))
    thread.start()
    try:
        table.wait_for({player})
        assert 0 < table.turn("ours", 3) < 1e-3
    finally:
        table.close()
        thread.join()
    assert calls == [("run", 1), ("run", 3), ("plain", 3)]


def test_gauges_are_read_instead_of_the_clock(fast: Effort):
    """Each side's own, once per turn, and told how many operations that had; a side without one has its seconds."""
    seen, told = iter(range(99, 200)), list[int]()
    one, two = (ProcessSide("floors", Task(kind="round trip", num_bytes=64), side=s) for s in ("ours", "reference"))

    def gauge(num_operations: int) -> float:
        told.append(num_operations)
        return float(next(seen))

    samples = play(one, two, fast, gauges={"ours": gauge})
    assert samples.ours == [100.0, 101.0, 102.0, 103.0, 104.0]  # the first look is not counted
    assert len(set(told[1:])) == 1 and told[1] > 1
    assert all(0 < seconds < 100 for seconds in samples.reference)
