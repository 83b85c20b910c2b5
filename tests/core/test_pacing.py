"""How a pace is told."""

from __future__ import annotations

from syncline.core.wire.pace import Paced, told_paused, told_seconds


def test_what_status_and_why_say() -> None:
    slow, held = Paced(0.2, False, 100.0), Paced(0.0, True, 100.0)
    assert slow.state == "paced: 200 ms" and held.state == "paused"
    assert held.told(112.4) == "is paused by hand since 12 s"
    assert held.told(90.0) == "is paused by hand since 0 s", "a wall clock may be set back"
    assert slow.told(112.0) == "is slowed by hand, 200 ms before each step"
    assert told_seconds(1.5) == "1.5 s" and told_seconds(0.0005) == "0.5 ms"


def test_only_who_is_held_is_named() -> None:
    held = {"worker-10": Paced(0.0, True, 1.0), "worker-2": Paced(0.0, True, 0.0)}
    paces = {**held, "worker-1": Paced(1.0, False, 0.0)}
    assert told_paused(paces, 5.0) == "worker-2 is paused by hand since 5 s, worker-10 is paused by hand since 4 s"
    assert told_paused({}, 5.0) == ""
