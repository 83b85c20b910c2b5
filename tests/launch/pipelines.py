"""What tests of pipelines share: the comparison with one process, and the processes of a pipeline."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch
from tests.launch.pipeline_train import WHOLE, make_stages, train_plainly

SCRIPT = str(pathlib.Path(__file__).with_name("pipeline_train.py"))
NUM_STEPS, NUM_MICRO = 20, 6


def trains_as_one_process_does(
    commands: Any, workers: int, stages: int, schedule: str, model: str, dtype: str, optimizer: str, *more: str
) -> float:
    """Asserts that 20 steps of pipelines are those of one process; the largest difference of a parameter."""
    result = commands.run(
        "run", "-w", str(workers), "--stages", str(stages), "--schedule", schedule, "--micro-batches", str(NUM_MICRO),
        *more, SCRIPT, "out.pt", model, dtype, optimizer, str(NUM_STEPS),
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("the script of worker-0") == 1, result.output
    found = torch.load(commands.folder / "out.pt", weights_only=True)
    kind, replicas = getattr(torch, dtype), workers // stages
    wanted = train_plainly(model, kind, optimizer, NUM_STEPS, replicas, NUM_MICRO)
    before = make_stages(model, kind)
    whole = before[0] if model in WHOLE else torch.nn.Sequential(*before)
    assert found["state"].keys() == wanted.keys()
    limit, largest = 1e-10 if dtype == "float64" else 1e-5, 0.0
    learned = dict(whole.named_parameters())
    for name, value in wanted.items():
        if name not in learned and replicas > 1:
            continue  # running means: each replica has seen its own batches
        largest = max(largest, float((found["state"][name] - value).abs().max()))
        assert torch.allclose(found["state"][name], value, rtol=limit, atol=limit), (name, largest)
    assert all(not torch.equal(found["state"][name], value) for name, value in learned.items())
    assert found["output"].dtype == kind and found["output"].shape[0] == 24
    return largest


def processes_of(pid: int) -> list[int]:
    """The children of a process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


def pipeline_of(folder: pathlib.Path, worker: str) -> tuple[int, ...]:
    """The leader and its stage processes, which have the same command line."""
    return next((pid, *found) for pid in members_named(folder, worker) if (found := processes_of(pid)))


def members_named(folder: pathlib.Path, name: str) -> list[int]:
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and pathlib.Path(os.readlink(entry / "cwd")) == folder:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                found += [int(entry.name)] * (name in words)
        except OSError:
            continue
    return found
