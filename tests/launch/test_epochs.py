"""A worker that is killed and comes back gets the epochs that are left: no mean over nothing, barriers in step."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from tests.launch.saved import break_off

SCRIPT = """
import sys, time
import numpy as np
import torch
import syncline
from syncline.torch import DataLoader

job = syncline.init()
job.kv.register({"read": np.zeros(1)}, syncline.Rule("Add"), reduce="sum")
loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(64)), batch_size=4, shuffle=True)
for epoch in loader.epochs(4):
    while epoch == 2 and job.world_size < 2:
        time.sleep(0.02)  # until one that was killed is back
    train_loss = n = 0
    for (batch,) in loader:
        job.kv.push_pull({"read": np.full(1, float(len(batch)))}).wait()
        train_loss, n = train_loss + float(batch.sum()), n + 1
        time.sleep(float(sys.argv[1]))
    print("EPOCH", epoch, train_loss / n, flush=True)
    job.barrier("epoch")
job.barrier("end")
print("ALL", float(job.kv.pull(["read"])["read"][0]), flush=True)
"""


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_worker_that_comes_back_skips_what_is_finished(commands: Any, policy: str) -> None:
    process = commands.start("run", "-w", "2", "--policy", policy, commands.script(SCRIPT), "0.05")
    commands.wait_for("EPOCH 0", "worker-1")
    os.kill(commands.members()["worker-1"], signal.SIGKILL)
    result = commands.finish(process)
    assert result.code == 0, result.output
    assert "ALL 256.0" in result.output and "ZeroDivisionError" not in result.output, result.output
    mine = re.findall(r"worker-1 \| EPOCH (\d)", result.output)
    assert mine[0] == "0" and "0" not in mine[1:] and sorted(set(mine)) == mine, result.output


@pytest.mark.proof
def test_a_job_that_is_taken_up_goes_on_with_its_epoch(commands: Any) -> None:
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    words = ("run", "--checkpoint", "saves", "--save-every", "4steps", "-w", "2")
    process = commands.start(*words, script, "0.1")
    commands.wait_for("EPOCH 0", "worker-0")
    break_off(commands, process, saves, count=1)
    again = commands.run(*words, script, "0")
    assert again.code == 0 and "resumes from" in again.output, again.output
    assert "ALL 256.0" in again.output
    assert not re.search(r"^EPOCH 0", again.output, re.MULTILINE) and "EPOCH 3" in again.output, again.output
