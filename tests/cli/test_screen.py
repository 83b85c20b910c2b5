"""The live line of `syncline run`: samples, epoch, time left, shares."""

from __future__ import annotations

from syncline.cli.screen import TerminalScreen
from syncline.core.control import Report, Standings
from syncline.stats import EpochProgress


def standings(seconds: float, samples: dict[str, int], epochs: list[EpochProgress] | None = None) -> Standings:
    return Standings(
        formed=True, missing=[], seconds=seconds,
        reports={name: Report(7, count, seconds, 0, 0, 0) for name, count in samples.items()},
        left=[], verdict="", culprit="", incarnations=dict.fromkeys(samples, 1), pushed=[], wanted={}, retiring=[],
        epochs=epochs or [],
    )  # fmt: skip


def test_the_line_has_samples_epoch_time_left_and_shares() -> None:
    screen = TerminalScreen("async")
    epoch = EpochProgress(loader="loader-0", epoch=1, num_samples=1000, num_done=380, num_passed_over=20)
    line = screen._describe(standings(10.0, {"worker-0": 300, "worker-1": 100}, [epoch]))
    assert line == (
        "async, 2 workers · 10 s · step 7 · epoch 2 (40 %), 15 s left · 40 samples/s · worker-0 75 %, worker-1 25 %"
    )


def test_a_worker_that_starts_again_makes_no_rate_negative() -> None:
    screen = TerminalScreen("async")
    screen._describe(standings(10.0, {"worker-0": 300, "worker-1": 100}))
    assert "· 5 samples/s" in screen._describe(standings(20.0, {"worker-0": 10, "worker-1": 140}))


def test_of_many_workers_the_least_and_the_largest_share() -> None:
    screen = TerminalScreen("sync")
    line = screen._describe(standings(1.0, {f"worker-{k}": 10 + k for k in range(5)}))
    assert line.endswith("shares 17 to 23 %")


def test_of_shards_it_says_how_many_samples_were_done() -> None:
    epoch = EpochProgress(loader="loader-0", epoch=0, num_samples=0, num_done=1234)
    assert "epoch 1 (1,234 samples)" in TerminalScreen("sync")._describe(standings(1.0, {"worker-0": 9}, [epoch]))
