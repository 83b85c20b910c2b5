"""A OneCycle shape by progress in every policy, with and without a kill: it never raises, and it ends at its end."""

from __future__ import annotations

import itertools
import os
import re
import signal
from typing import Any

import pytest
from tests.launch.saved import break_off

SCRIPT = """
import math, sys, time
import torch
import syncline
from syncline.torch import DataLoader, DistributedOptimizer, schedule

def one_cycle(progress):
    if progress < 0.3:
        return 0.04 + 0.96 * progress / 0.3
    return (1 + math.cos(math.pi * (progress - 0.3) / 0.7)) / 2

job = syncline.init()
model = torch.nn.Linear(4, 1)
opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
cycle = schedule(opt, one_cycle)
loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(240, 4)), global_batch_size=12, shuffle=True)
for epoch in loader.epochs(4):
    while epoch == 3 and job.world_size < int(sys.argv[2]):
        time.sleep(0.02)  # until one that was killed is back
    total = n = 0
    for (x,) in loader:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        total, n = total + float(loss), n + 1
        print("AT", round(job.progress, 4), round(opt.param_groups[0]["lr"] / 0.01, 4), flush=True)
        time.sleep(float(sys.argv[1]))
    print("EPOCH", epoch, total / n, flush=True)
job.barrier("trained")
print("END", job.progress, flush=True)
"""


def places(output: str, worker: str) -> list[list[float]]:
    """The progress at its steps, one list for every life of this worker."""
    found: list[list[float]] = [[]]
    for line in output.splitlines():
        told, bar, said = line.partition(" | ")
        if "starts again" in line and worker in line:
            found.append([])
        elif (told == worker and bar) or (worker == "worker-0" and not bar):
            found[-1] += [float(at) for at in re.findall(r"^AT (\S+)", said if bar else line)]
    return found


def check(output: str, workers: tuple[str, ...], num_ends: int) -> None:
    assert re.findall(r"END (\S+)", output) == ["1.0"] * num_ends, output
    assert "Error" not in output, output
    lives = [life for worker in workers for life in places(output, worker)]
    for life in lives:
        assert all(before <= after for before, after in itertools.pairwise(life)), life
    assert max(life[-1] for life in lives if life) >= 0.9, lives


@pytest.mark.proof
@pytest.mark.parametrize(
    "words", ["--policy bounded:2", "--exchange ring", "--sync-every 2", "--policy sync:spare=1"]
)
def test_it_ends_at_its_end_in_every_policy(commands: Any, words: str) -> None:
    result = commands.run("run", "-w", "2", *words.split(), commands.script(SCRIPT), "0", "2")
    assert result.code == 0, result.output
    check(result.output, ("worker-0", "worker-1"), 2)


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_worker_that_was_killed_goes_on_where_the_run_is(commands: Any, policy: str) -> None:
    process = commands.start("run", "-w", "2", "--policy", policy, commands.script(SCRIPT), "0.05", "2")
    commands.wait_for("EPOCH 0", "worker-1")
    os.kill(commands.members()["worker-1"], signal.SIGKILL)
    result = commands.finish(process)
    assert result.code == 0, result.output
    check(result.output, ("worker-0", "worker-1"), 2)
    before, after = places(result.output, "worker-1")
    assert before[0] < 0.1 and after and after[0] >= 0.25, "it does not begin its schedule again"


@pytest.mark.proof
def test_a_job_that_is_taken_up_by_more_workers_goes_on_where_the_run_was(commands: Any) -> None:
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    words = ("run", "--checkpoint", "saves", "--save-every", "4steps")
    process = commands.start(*words, "-w", "1", script, "0.1", "1")
    commands.wait_for("EPOCH 0", "worker-0")
    break_off(commands, process, saves, count=1)
    again = commands.run(*words, "-w", "2", script, "0", "2")
    assert again.code == 0 and "resumes from" in again.output, again.output
    check(again.output, ("worker-0", "worker-1"), 2)
    resumed = re.search(r"resumes from \S+: step (\d+)", again.output)
    assert resumed and int(resumed[1]) >= 4
    assert places(again.output, "worker-0")[0][0] >= int(resumed[1]) / 80, again.output


@pytest.mark.proof
def test_alone_without_a_launcher(commands: Any) -> None:
    result = commands.finish(commands.start("0", "1", program=(commands.script(SCRIPT),)))
    assert result.code == 0, result.output
    check(result.output, ("worker-0",), 1)
    found = [(float(at), float(lr)) for at, lr in re.findall(r"AT (\S+) (\S+)", result.output)]
    assert len(found) == 80 and found[0] == (0.0, 0.04) and max(found, key=lambda one: one[1])[0] == 0.3
