"""Jobs whose global batch has a fixed size: killed, taken up by another number of workers, and too small a size."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from tests.launch.saved import break_off

#: Prints, for every round, how many samples it had: `read` counts those of all workers.
SCRIPT = """
import sys, time
import numpy as np
import torch
import syncline
from syncline.torch import DataLoader

pause = float(sys.argv[1])
job = syncline.init()
job.kv.register({"read": np.zeros(1)}, syncline.Rule("Add"), reduce="sum")
loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(720)), global_batch_size=12)
before = float(job.kv.pull(["read"])["read"][0])
for epoch in range(2):
    while epoch and job.world_size < int(sys.argv[2]):
        time.sleep(0.02)  # until one that was killed is back
    for (batch,) in loader:
        after = float(job.kv.push_pull({"read": np.full(1, float(len(batch)))}).wait()["read"][0])
        print("ROUND", job.world_size, int(after - before), len(batch), flush=True)
        before = after
        time.sleep(pause)
job.barrier("end")
print("ALL", float(job.kv.pull(["read"])["read"][0]), flush=True)
"""


def rounds(output: str) -> list[tuple[int, int, int]]:
    found = re.findall(r"^ROUND (\d+) (\d+) (\d+)$", output, re.MULTILINE)
    return [(int(workers), int(size), int(part)) for workers, size, part in found]


@pytest.mark.proof
def test_when_a_worker_is_killed_and_comes_back_the_global_batch_is_the_same_again(commands: Any) -> None:
    process = commands.start("run", "-w", "3", commands.script(SCRIPT), "0.05", "3")
    commands.wait_for("ROUND 3", "worker-0")
    os.kill(commands.members()["worker-1"], signal.SIGKILL)
    result = commands.finish(process)
    assert result.code == 0, result.output
    assert "ALL 1440.0" in result.output, "every sample counted once in both epochs"
    found = rounds(result.output)
    assert {part for _, _, part in found[-10:]} == {4}, "three parts again"
    odd = [size for _, size, _ in found if size != 12]
    assert len(odd) < len(found) / 2, found  # where it died, and where it came back


@pytest.mark.proof
def test_a_resume_on_another_number_of_workers_keeps_the_global_batch(commands: Any) -> None:
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    words = ("run", "--checkpoint", "saves", "--save-every", "4steps")
    process = commands.start(*words, "-w", "2", script, "0.1", "2")
    before = rounds(break_off(commands, process, saves, count=2))
    assert {found[:2] for found in before} == {(2, 12)}
    again = commands.run(*words, "-w", "3", script, "0", "2")
    assert again.code == 0 and "resumes from" in again.output, again.output
    assert "ALL 1440.0" in again.output
    found = rounds(again.output)
    assert {part for _, _, part in found[:-1]} == {4}, found
    assert all(size == 12 for _, size, _ in found[1:]), found  # of the first it is not known where it began


@pytest.mark.proof
def test_fewer_samples_than_workers_ends_the_job_with_the_remedy(commands: Any) -> None:
    script = commands.script(SCRIPT.replace("global_batch_size=12", "global_batch_size=1"))
    result = commands.run("run", "-w", "2", script, "0", "2")
    assert result.code == 1, result.output
    assert "give global_batch_size=2 or more, or start fewer workers (-w)" in result.output
    assert "starts again" not in result.output, result.output
