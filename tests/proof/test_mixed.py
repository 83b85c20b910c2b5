"""`make proof`, with a GPU at hand: one worker on it and two on processors, their parts by speed.

Their model equals that of one process that makes the same batches, and they get through more samples than the GPU's
worker alone.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from .mixed import LR, data_of, model_of

HAS_GPU = torch.cuda.is_available()  # here, since the first to ask opens descriptors that stay open
SCRIPT = pathlib.Path(__file__).parent / "mixed.py"


def play(folder: pathlib.Path, devices: str, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "syncline", "run", "-w", str(devices.count(",") + 1), "-s", "1", str(SCRIPT)]
    command += ["--devices", devices, "--out", str(folder), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rpartition("| ")[2] for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def rate(said: list[dict[str, Any]]) -> float:
    """Samples a second, all workers together, in the last epoch."""
    last = [one for one in said if one["epoch"] == max(each["epoch"] for each in said)]
    return sum(one["samples"] for one in last) / max(one["seconds"] for one in last)


def rounds_of(folder: pathlib.Path, workers: int) -> dict[int, list[np.ndarray]]:
    """Step of the job: what each worker read for it."""
    found: dict[int, list[np.ndarray]] = {}
    for k in range(workers):
        with np.load(folder / f"worker-{k}.npz") as read:
            for name in read.files:
                if name != "parameters":
                    found.setdefault(int(name), []).append(read[name])
    return found


@pytest.mark.proof
@pytest.mark.parametrize("devices", ["cpu,cpu,cpu", "cuda,cpu,cpu"])
def test_workers_on_different_devices_equal_one_process(devices: str, tmp_path: pathlib.Path) -> None:
    if "cuda" in devices and not HAS_GPU:
        pytest.skip("there is no GPU")
    samples, epochs, width, side = 3000, 2, 8, 6
    sizes = {"--samples": samples, "--epochs": epochs, "--width": width, "--side": side, "--batch": 20}
    play(tmp_path, devices, *(str(word) for pair in sizes.items() for word in pair))
    rounds = rounds_of(tmp_path, 3)
    everything = np.concatenate([rows for each in rounds.values() for rows in each])
    assert np.array_equal(np.bincount(everything, minlength=samples), np.full(samples, epochs)), "each once an epoch"
    model, (x, y) = model_of(width), data_of(samples, side)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in sorted(rounds):
        rows = torch.from_numpy(np.concatenate(rounds[step]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    alone = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    for k in range(3):
        with np.load(tmp_path / f"worker-{k}.npz") as read:
            np.testing.assert_allclose(read["parameters"], alone, rtol=2e-3, atol=2e-5)


@pytest.mark.proof
def test_two_processors_beside_a_gpu_add_to_what_it_does_alone(tmp_path: pathlib.Path) -> None:
    if not HAS_GPU:
        pytest.skip("there is no GPU")
    more = ("--samples", "60000", "--epochs", "3", "--batch")
    found = {
        "cuda, batches of 256": rate(play(tmp_path, "cuda", *more, "256")),
        "cuda, batches of 768": rate(play(tmp_path, "cuda", *more, "768")),
        "cuda and two cpu, of 256 each": rate(play(tmp_path, "cuda,cpu,cpu", *more, "256")),
    }
    for name, each in found.items():
        print(f"{name}: {each:,.0f} samples/s")
    assert found["cuda and two cpu, of 256 each"] >= found["cuda, batches of 256"]
