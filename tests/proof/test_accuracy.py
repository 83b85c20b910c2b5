"""`make proof`: LeNet on Fashion-MNIST reaches 88 % in ten epochs.

With `--all-seeds` under each policy, mean of three seeds: the figures of docs/internals/performance.md.
"""

from __future__ import annotations

import pathlib
import re
import statistics
import sys

import pytest
from tests import forked

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.proof
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("policy", ["sync", "bounded:2", "async"])
def test_accuracy(policy: str, seeds: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    if policy != "sync" and len(seeds) == 1:
        pytest.skip("needs --all-seeds; test_slow_worker.py has all policies, for fewer epochs")
    found = []
    for seed in seeds:
        command = [sys.executable, "-m", "syncline", "run", "-w", "2", "-s", "1", "--policy", policy]
        script = [str(ROOT / "examples/fashion_mnist.py"), "--epochs", "10", "--seed", str(seed)]
        done = forked.run([*command, *script], cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        accuracy = re.search(r"test accuracy\s+([\d.]+)%", done.stdout)
        assert accuracy, done.stdout
        found.append(float(accuracy[1]))
    mean = statistics.mean(found)
    print(f"{policy}: {mean:.2f} % mean of {found}, spread {max(found) - min(found):.2f}", flush=True)
    assert mean >= 88.0
