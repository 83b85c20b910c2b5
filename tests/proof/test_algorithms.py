"""`make proof`: what the ways to synchronise cost in accuracy and gain in time, and what survives a wrong worker.

Figures for docs/guides/algorithms.md: `make proof ARGS="-k proof/test_algorithms --all-seeds -s"`.
"""

from __future__ import annotations

import pathlib
import re
import statistics
import sys

import pytest
from tests import forked

SCRIPT = pathlib.Path(__file__).parent / "algorithms.py"
#: With one of four workers four times slower.
WAYS: dict[str, list[str]] = {
    "sync": ["--policy", "sync"],
    "async": ["--policy", "async"],
    "async:gather=2": ["--policy", "async:gather=2"],
    "bounded:2": ["--policy", "bounded:2"],
    "async --sync-every 8": ["--policy", "async", "--sync-every", "8"],
}
#: Of one seed the others are in test_slow_worker.py.
QUICK = ("async:gather=2", "async --sync-every 8")
#: One of four workers pushes gradients that are a million times too large.
AGGREGATES = ("median", "trimmed:0.25", "norm-clipped:2.0")


def train(folder: pathlib.Path, options: list[str], *arguments: str) -> tuple[float, float]:
    """Test accuracy in percent, and seconds of training; 0 where no worker's gradients are finite any more."""
    command = [sys.executable, "-m", "syncline", "run", "-w", "4", "-s", "1", *options, str(SCRIPT), *arguments]
    done = forked.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if "all workers are quarantined: their pushes are not finite" in done.stdout + done.stderr:
        return 0.0, 0.0
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy\s+([\d.]+)%", done.stdout)
    seconds = re.search(r"seconds\s+([\d.]+)", done.stdout)
    assert accuracy and seconds, done.stdout
    return float(accuracy[1]), float(seconds[1])


@pytest.mark.proof
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("way", WAYS)
def test_accuracy_with_a_slow_worker(way: str, seeds: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    if len(seeds) == 1 and way not in QUICK:
        pytest.skip("needs --all-seeds; test_slow_worker.py has these policies")
    slow = ("--slow", "worker-3")
    found = [train(tmp_path, WAYS[way], *slow, "--seed", str(seed))[0] for seed in seeds]
    mean, spread = statistics.mean(found), max(found) - min(found)
    print(f"{way:22} {mean:6.2f} % mean of {found}, spread {spread:.2f}", flush=True)
    assert mean >= 78.0
    if len(seeds) == 1:
        return
    stop = ["--stop", "accuracy>=0.85"]
    to_85 = [
        train(tmp_path, [*WAYS[way], *stop], *slow, "--validate", "--epochs", "6", "--seed", str(seed))[1]
        for seed in seeds
    ]
    print(f"{way:22} {statistics.median(to_85):.0f} s to 85 % ({min(to_85):.0f} to {max(to_85):.0f})", flush=True)


@pytest.mark.proof
@pytest.mark.timeout(3000)
def test_a_wrong_worker_harms_the_mean_alone(tmp_path: pathlib.Path) -> None:
    """SGD: of Adam's steps even the mean's would be finite. One epoch is enough to see it."""
    short = ("--epochs", "1", "--rule", "SGD", "--lr", "0.1")
    clean = train(tmp_path, [], *short)[0]
    wrong = (*short, "--wrong", "worker-3")
    with_mean = train(tmp_path, [], *wrong)[0]
    found = {how: train(tmp_path, ["--aggregate", how], *wrong)[0] for how in AGGREGATES}
    print(f"clean {clean:.2f} %; with a wrong worker: mean {with_mean:.2f} %", *found.items(), flush=True)
    assert with_mean < 50.0, "otherwise this proves nothing"
    assert all(accuracy >= clean - 1.0 for accuracy in found.values()), found
