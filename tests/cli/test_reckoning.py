"""The figures of `syncline chaos`, from runs that are written down by hand."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from syncline.cli.chaos import show, to_json
from syncline.cli.reckoning import Kill, Look, reckon, times_of
from syncline.cli.witness import Step, read_steps
from syncline.core.units import duration
from syncline.errors import ConfigError


def steps(begin: float, count: int, every: float = 0.1, samples: int = 64) -> list[Step]:
    return [Step(begin + every * k, k + 1, samples * (k + 1)) for k in range(count)]


def test_a_worker_that_was_killed() -> None:
    """worker-1 dies at 1.05; worker-0 waits for it until 1.5; its next life steps first at 4."""
    lives = {
        "worker-0": [[*steps(0.0, 11), *[Step(1.5 + 0.1 * k, 12 + k, 64 * (12 + k)) for k in range(30)]]],
        "worker-1": [steps(0.0, 11), steps(4.0, 5)],
    }
    looks = [
        Look(0.0, 1, {"worker-0": 1, "worker-1": 2}, {"worker-0": 1, "worker-1": 2}),
        Look(1.4, 1, {"worker-0": 1}, {"worker-0": 1}),
        Look(3.9, 1, {"worker-0": 1}, {"worker-0": 1, "worker-1": 3}),
    ]
    figures = reckon(lives, [Kill(1.05, "worker", "worker-1", 2, 1)], looks)
    of_workers = figures.roles["worker"]
    assert of_workers.kills == 1 and of_workers.not_back == 0
    assert of_workers.stall.longest == pytest.approx(0.45)
    assert of_workers.out.longest == pytest.approx(0.35)
    assert of_workers.back.longest == pytest.approx(2.95)
    assert figures.steps == 41 + 11 + 5 and figures.samples == 64 * 57
    assert figures.seconds == pytest.approx(4.4) and figures.rate == pytest.approx(64 * 57 / 4.4)
    assert figures.gaps.longest == pytest.approx(0.5)


def test_servers_and_coordinators() -> None:
    lives = {"worker-0": [steps(0.0, 100)]}
    looks = [
        Look(0.0, 1, {"server-0": 1}, {"server-0": 1}),
        Look(2.5, 1, {}, {"server-0": 5}),
        Look(3.0, 1, {"server-0": 5}, {"server-0": 5}),
        Look(6.0, 2, {"server-0": 5}, {"server-0": 5}),
    ]
    kills = [Kill(2.0, "server", "server-0", 1, 1), Kill(5.0, "coordinator", "coordinator", 0, 1)]
    kills.append(Kill(9.0, "server", "server-0", 5, 2))
    figures = reckon(lives, kills, looks, 0)
    assert list(figures.roles) == ["server", "coordinator"]
    assert figures.roles["server"].back.longest == pytest.approx(1.0) and figures.roles["server"].not_back == 1
    assert figures.roles["server"].out.longest == pytest.approx(0.5)
    assert figures.roles["coordinator"].back.longest == pytest.approx(1.0)


def test_ranks() -> None:
    times = times_of([float(k) for k in range(1, 101)])
    assert (times.count, times.p50, times.p99, times.longest) == (100, 50.0, 99.0, 100.0)
    assert times_of([]).count == 0 and times_of([3.0]).p99 == 3.0


def test_nothing_happened() -> None:
    figures = reckon({}, [], [])
    assert figures.rate == 0.0
    assert "0 kills" in show(figures) and "revoked   not known" in show(figures)


def test_what_is_shown() -> None:
    before = reckon({"worker-0": [steps(0.0, 101)]}, [], [], 0)
    after = reckon({"worker-0": [steps(0.0, 101, 0.125)]}, [Kill(1.0, "server", "server-1", 2, 1)], [], 3)
    text = show(after, before)
    assert "server: 1 kill\n" in text and "1 not before the end" in text
    assert "acknowledged updates revoked   3" in text
    assert "unique applied samples/s  517.1, without kills 646.4: 80.0%" in text
    shown = json.loads(to_json(after, before))
    assert shown["ratio"] == pytest.approx(0.8) and shown["run"]["roles"]["server"]["kills"] == 1


def test_a_record_that_was_cut_short(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "worker-0.000000"
    path.write_bytes(bytes(24) + os.urandom(10))
    assert read_steps(path) == [Step(0.0, 0, 0)]


def test_durations() -> None:
    assert [duration("--every", text) for text in ("10s", "1.5m", "2", "1h")] == [10.0, 90.0, 2.0, 3600.0]
    for text in ("", "s", "soon", "-1s", "0", "nan"):
        with pytest.raises(ConfigError, match=r"--every .*: give a duration, e\.g\. 10s"):
            duration("--every", text)
