"""The end of `syncline run --profile`: a row per worker, and a sentence that fits the numbers."""

from __future__ import annotations

import pytest

from syncline.config import JobConfig
from syncline.coordinator.status import profile_lines
from syncline.stats import ServerStats, StepTimes


def lines_of(*times: StepTimes, round_seconds: float = 0.0) -> list[str]:
    servers = [ServerStats(name="server-0", num_rounds=100, round_seconds=round_seconds)]
    return profile_lines({f"worker-{k}": own for k, own in enumerate(times)}, servers)


def test_milliseconds_per_step() -> None:
    own = StepTimes(num_steps=100, compute=1.0, stage=0.1, wait=0.3, pull=0.05)
    row = lines_of(own, round_seconds=0.2)[2].split()
    assert row == ["worker-0", "100", "14.50", "10.00", "1.00", "3.00", "2.00", "0.50"]


def test_workers_stand_in_the_order_of_their_numbers_and_those_without_steps_are_left_out() -> None:
    times = {f"worker-{k}": StepTimes(num_steps=k != 1, compute=1.0) for k in range(11)}
    names = [line.split()[0] for line in profile_lines(times, [])[2:-1]]
    assert names == [f"worker-{k}" for k in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10)]


def test_no_step_at_all() -> None:
    assert lines_of(StepTimes()) == ["profile: no step was made"]


@pytest.mark.parametrize(
    ("times", "round_seconds", "sentence"),
    [
        ([StepTimes(num_steps=100, compute=9.0, wait=0.5)], 0.1, "95% of the step is the script's own work"),
        (
            [StepTimes(num_steps=100, compute=5.0, wait=5.0)],
            4.0,
            "rules; try more servers (-s), or --policy async --window 1",
        ),
        ([StepTimes(num_steps=100, compute=5.0, wait=5.0)], 1.0, "for answers; try --policy async --window 1"),
        (
            [StepTimes(num_steps=100, compute=5.0, stage=5.0)],
            0.0,
            "50% of the step is spent on gradients",
        ),
        (
            [StepTimes(num_steps=100, compute=5.0, pull=5.0)],
            0.0,
            "50% of the step is spent on new param",
        ),
        (
            [StepTimes(num_steps=100, compute=1.0, wait=4.0), StepTimes(num_steps=100, compute=5.0)],
            0.1,
            "worker-1 computes longest (50.0 ms a step): the others wait for it",
        ),
    ],
)
def test_what_to_do_next(times: list[StepTimes], round_seconds: float, sentence: str) -> None:
    found = [line for line in lines_of(*times, round_seconds=round_seconds) if line.startswith("profile: ")][1:]
    assert len(found) == 1 and sentence in found[0]


def test_what_is_done_already_is_not_advised() -> None:
    times = {f"worker-{k}": StepTimes(num_steps=10, compute=5.0, wait=3.0, pull=3.0) for k in range(2)}
    for config in (JobConfig(policy="async", window=1), JobConfig(sync_every=4)):
        text = " ".join(profile_lines(times, [], config))
        assert "--sync-every" not in text and ("--window" in text) == (not config.window)
    assert "--sync-every" in " ".join(profile_lines(times, []))


def test_what_auto_has_chosen_is_told() -> None:
    times = {f"worker-{k}": StepTimes(num_steps=10, compute=5.0, steps_per_push=(1, 16)[k]) for k in range(2)}
    text = "\n".join(profile_lines(times, [], JobConfig(sync_every="auto")))
    assert "profile: worker-0 makes 1 local step for a push now (--sync-every auto)" in text
    assert "profile: worker-1 makes 16 local steps for a push now (--sync-every auto)" in text
    assert "local step" not in "\n".join(profile_lines(times, [], JobConfig(sync_every=16)))


def test_a_ring_is_not_told_what_it_cannot_have() -> None:
    times = {f"worker-{k}": StepTimes(num_steps=10, compute=5.0, wait=5.0) for k in range(2)}
    servers = [ServerStats(num_rounds=10, round_seconds=4.0)]
    text = " ".join(profile_lines(times, servers, JobConfig(exchange="ring", workers=2)))
    assert "--exchange servers" in text and "-s)" not in text and "--policy" not in text
