"""`make proof`, with a GPU at hand: one worker on it and two on processors, their parts by speed.

Their model equals that of one process that makes the same batches, and they get through more samples than the GPU's
worker alone.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests import forked

from .mixed import LR, data_of, model_of

HAS_GPU = torch.cuda.is_available()  # here, since the first to ask opens descriptors that stay open
SCRIPT = pathlib.Path(__file__).parent / "mixed.py"


def play(folder: pathlib.Path, devices: str, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "syncline", "run", "-w", str(devices.count(",") + 1), "-s", "1", str(SCRIPT)]
    command += ["--devices", devices, "--out", str(folder), *arguments]
    done = forked.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rpartition("| ")[2] for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def rate(said: list[dict[str, Any]]) -> float:
    """Samples a second, all workers together, in all epochs but the first, in which speeds are not known yet."""
    epochs = sorted({one["epoch"] for one in said})[1:]
    seconds = sum(max(one["seconds"] for one in said if one["epoch"] == epoch) for epoch in epochs)
    return sum(one["samples"] for one in said if one["epoch"] in epochs) / seconds


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
    sizes["--dtype"] = "float64"  # in float32 a hundred steps make a last digit of a sum one of the parameters
    play(tmp_path, devices, *(str(word) for pair in sizes.items() for word in pair))
    rounds = rounds_of(tmp_path, 3)
    everything = np.concatenate([rows for each in rounds.values() for rows in each])
    assert np.array_equal(np.bincount(everything, minlength=samples), np.full(samples, epochs)), "each once an epoch"
    model, (x, y) = model_of(width).double(), data_of(samples, side)
    x = x.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in sorted(rounds):
        rows = torch.from_numpy(np.concatenate(rounds[step]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    alone = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    for k in range(3):
        with np.load(tmp_path / f"worker-{k}.npz") as read:
            np.testing.assert_allclose(read["parameters"], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.parametrize(("width", "side"), [(16, 8), (16, 16), (64, 32)])
def test_two_processors_beside_a_gpu_add_to_what_it_does_alone(width: int, side: int, tmp_path: pathlib.Path) -> None:
    """The largest model is one of which a processor does a hundredth of what the GPU does: printed only."""
    if not HAS_GPU:
        pytest.skip("there is no GPU")
    more = ("--samples", "60000", "--epochs", "4", "--width", str(width), "--side", str(side), "--batch")
    alone = {batch: rate(play(tmp_path, "cuda", *more, batch)) for batch in ("256", "768")}
    together = rate(play(tmp_path, "cuda,cpu,cpu", *more, "256"))
    words = ", ".join(f"{each:,.0f} alone with batches of {batch}" for batch, each in alone.items())
    print(f"{width} channels, {side} x {side}: {together:,.0f} samples/s together; {words}")
    assert width > 16 or together >= alone["256"]
