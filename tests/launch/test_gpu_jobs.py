"""Jobs of real processes on one GPU: worker and servers share its memory, and each may die while it is mapped."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from tests.patience import JOB_PATIENCE

from syncline.config import num_gpus

from .conftest import Commands

pytestmark = pytest.mark.skipif(num_gpus() == 0, reason="there is no GPU here")

# Every step adds whole numbers, so that the end tells whether each counted once.
SCRIPT = """
import os, sys, time
import torch, syncline
from syncline.torch import DistributedOptimizer

job = syncline.init()
model = torch.nn.Linear(300, 1000, bias=False).to(job.device)
torch.nn.init.zeros_(model.weight)
opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
loader = syncline.torch.DataLoader(torch.utils.data.TensorDataset(torch.arange(400)), batch_size=4)
for epoch in loader.epochs(4):
    for (number,) in loader:
        opt.zero_grad()
        (-model.weight * number.sum().to(job.device)).sum().backward()
        opt.step()
        if epoch == 1:
            print("STEPPING", flush=True)
        time.sleep(float(os.environ.get("PAUSE", "0")))
opt.pull()
channel = job.exchange.routes.device_channel
print("RESULT", job.rank, sorted(channel.segments) if channel else None, model.weight.unique().tolist(), flush=True)
"""
TOTAL = 4.0 * sum(range(400))
EACH = ("--device", "cuda", "--server-device", "cuda")


def results(text: str) -> list[tuple[str, str]]:
    return re.findall(r"RESULT \d+ (\S+) \[([-\d.]+)\]", text)


IN_ASYNC = ("--policy", "async")


@pytest.mark.parametrize(
    ("num_workers", "settings"),
    [(1, ()), (1, ("-s", "2")), (2, IN_ASYNC), (2, (*IN_ASYNC, "--window", "1")), (2, (*IN_ASYNC, "-s", "2"))],
)
def test_every_sample_counts_once(commands: Commands, num_workers: int, settings: tuple[str, ...]) -> None:
    done = commands.run("run", "-w", str(num_workers), *settings, *EACH, commands.script(SCRIPT))
    assert done.code == 0, done.output
    assert results(done.output) == [("[0]", str(TOTAL))] * num_workers, done.output


@pytest.mark.parametrize("victim", ["worker-0", "server-0"])
def test_a_member_that_is_killed_while_its_memory_is_mapped(
    commands: Commands, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process goes at once; the other side has its memory mapped, or was mapped by it."""
    monkeypatch.setenv("PAUSE", "0.02")
    script = commands.script(SCRIPT)
    process = commands.start("run", "-w", "2", "-s", "1", *IN_ASYNC, *EACH, script)
    deadline = time.monotonic() + JOB_PATIENCE
    while victim not in commands.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    commands.wait_for("STEPPING", "worker-1")
    os.kill(commands.members()[victim], signal.SIGKILL)
    done = commands.finish(process)
    assert done.code == 0, done.output
    assert "SIGKILL" in done.output
    values = [value for _, value in results(done.output)]
    if victim == "worker-0":  # without backups, a server takes its newest updates along
        assert values == [str(TOTAL)] * 2, done.output
    else:
        assert len(values) == 2 and values[0] == values[1], done.output
