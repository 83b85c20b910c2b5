"""The live line: what it says through the death of a coordinator, which forgets when it began and who reported."""

from __future__ import annotations

from syncline.cli.screen import TerminalScreen
from syncline.core.control import Report, Standings


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def standings(seconds: float, **samples: int) -> Standings:
    workers = {"worker-0": 1, "worker-1": 2}
    reports = {name.replace("_", "-"): report(count) for name, count in samples.items()}
    return Standings(True, [], seconds, reports, [], "", "", workers, [], {}, [])


def report(samples: int) -> Report:
    return Report(samples // 10, samples, 1.0, 0, 0, 0)


def test_a_coordinator_that_comes_back_does_not_set_the_line_back() -> None:
    clock = Clock()
    screen = TerminalScreen("sync", clock)
    shown = []
    for now, seconds, samples in (
        (0.0, 5.0, {"worker_0": 1000, "worker_1": 1000}),
        (2.0, 7.0, {"worker_0": 1200, "worker_1": 1200}),
        (4.0, 0.5, {}),  # another one
        (6.0, 2.5, {"worker_0": 1600}),
        (8.0, 4.5, {"worker_0": 1800, "worker_1": 1800}),
        (10.0, 6.5, {"worker_0": 2100, "worker_1": 2100}),
        (12.0, 8.5, {"worker_0": 2200, "worker_1": 50}),  # another life of it
        (14.0, 10.5, {"worker_0": 2300, "worker_1": 150}),
    ):
        clock.now = 1000.0 + now
        parts = screen._describe(standings(seconds, **samples)).split(" · ")
        shown.append([part for part in parts if part.endswith((" s", "samples/s"))])
    assert shown == [
        ["5 s"], ["7 s", "200 samples/s"], ["9 s"], ["11 s"], ["13 s"], ["15 s", "300 samples/s"],
        ["17 s"], ["19 s", "100 samples/s"],
    ]  # fmt: skip
