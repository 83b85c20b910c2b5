"""`make proof`: LeNet on Fashion-MNIST, three epochs: each codec, and local steps, within a point of none.

With `--all-seeds` all of them, mean of three seeds: the figures of docs/guides/codecs.md.
"""

from __future__ import annotations

import pathlib
import re
import statistics
import sys

import pytest
from tests import forked

ROOT = pathlib.Path(__file__).parents[2]
DILOCO = "SGD(lr=0.7, momentum=0.9, nesterov=True)"
WAYS: dict[str, list[str]] = {
    "none": [],
    "bf16": ["--codec", "bf16"],
    "fp16": ["--codec", "fp16"],
    "int8": ["--codec", "int8"],
    "topk:0.01": ["--codec", "topk:0.01"],
    "int8, down bf16": ["--codec", "int8", "--pull-codec", "bf16"],
    "sync-every 8": ["--sync-every", "8"],
    "sync-every 8, outer": ["--sync-every", "8", "--outer", DILOCO],
}
#: Of one seed only these.
QUICK = ("none", "int8, down bf16", "topk:0.01", "sync-every 8, outer")


def run(options: list[str], seed: int, folder: pathlib.Path) -> tuple[float, float]:
    """Accuracy in percent, and bytes pushed per step."""
    command = [sys.executable, "-m", "syncline", "run", "-w", "2", "-s", "1", "--transport", "tcp", *options]
    script = [str(ROOT / "examples/fashion_mnist.py"), "--epochs", "3", "--seed", str(seed)]
    done = forked.run([*command, *script], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy\s+([\d.]+)%", done.stdout)
    sent = re.search(r"bytes/step\s+([\d,]+)", done.stdout)
    assert accuracy and sent, done.stdout
    return float(accuracy[1]), float(sent[1].replace(",", ""))


@pytest.mark.proof
@pytest.mark.timeout(6000)
def test_codecs_and_local_steps_are_as_good(seeds: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    means: dict[str, float] = {}
    for name, options in WAYS.items():
        if len(seeds) == 1 and name not in QUICK:
            continue
        found = [run(options, seed, tmp_path) for seed in seeds]
        accuracies = [accuracy for accuracy, _ in found]
        means[name] = statistics.mean(accuracies)
        sent = statistics.mean(num_bytes for _, num_bytes in found)
        print(f"{name:22} {means[name]:6.2f} % mean of {accuracies}  {sent:12,.0f} bytes/step", flush=True)
    worse = {name: means["none"] - mean for name, mean in means.items() if mean < means["none"] - 1.0}
    assert not worse, "a point is the reach (docs/guides/codecs.md)"
