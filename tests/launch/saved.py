"""A script whose result shows everything that a checkpoint must bring back; and how its jobs are broken off."""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import time
from typing import Any

import numpy as np
from tests.patience import JOB_PATIENCE, PATIENCE

from syncline.core.leasing.order import Order

NUM_SAMPLES, EPOCHS = 48, 5
#: `x` depends on all that came before: on its own value, on momenta, on which samples are in which round, on every
#: worker's random numbers; all in integers, which float64 adds exactly. `seen` counts every sample of every epoch.
SCRIPT = f"""
import json, random, sys, time
import numpy as np
import syncline, syncline.data

pause, NUM_SAMPLES, EPOCHS = float(sys.argv[1]), {NUM_SAMPLES}, {EPOCHS}
job = syncline.init()
random.seed(job.rank)
job.kv.register({{"x": np.zeros(8)}}, syncline.Rule("SGD", lr=1.0, momentum=1.0), reduce="sum")
job.kv.register({{"seen": np.zeros((EPOCHS, NUM_SAMPLES))}}, syncline.Rule("Add"), reduce="sum")
job.state["own"] = own = {{"steps": 0}}
x = job.kv.pull(["x"])["x"]
source = syncline.data.ArraySource(np.arange(NUM_SAMPLES))
for epoch in range(EPOCHS):
    for (batch,) in syncline.data.batches(source, 4, shuffle=True, epoch=epoch, name="train"):
        gradient = (3 * x + np.arange(8) * batch.sum()) % 101 - random.randrange(50)
        seen = np.zeros((EPOCHS, NUM_SAMPLES))
        seen[epoch, batch] = 1
        x = job.kv.push_pull({{"x": gradient, "seen": seen}}).wait()["x"]
        own["steps"] += 1
        if own["steps"] == 3:
            print("at work", flush=True)
        time.sleep(pause)
job.barrier('end')
if job.is_chief:
    found = job.kv.pull(["x", "seen"])
    print("RESULT", json.dumps([found["x"].tolist(), found["seen"].tolist(), own["steps"]]), flush=True)
"""
QUICKLY = ("--deadline-seconds", "5")


def expected() -> tuple[list[float], list[list[float]], int]:
    """What two workers in `sync` come to when nothing happens to them, worked out here."""
    chances = [random.Random(rank) for rank in range(2)]
    x, momentum = np.zeros(8), np.zeros(8)
    for epoch in range(EPOCHS):
        order = Order(NUM_SAMPLES, 0, epoch).at(np.arange(NUM_SAMPLES))
        for start in range(0, NUM_SAMPLES, 8):
            for rank, chance in enumerate(chances):
                batch = order[start + 4 * rank : start + 4 * rank + 4]
                momentum += (3 * x + np.arange(8) * batch.sum()) % 101 - chance.randrange(50)
            x = x - momentum
    return x.tolist(), [[1.0] * NUM_SAMPLES] * EPOCHS, EPOCHS * NUM_SAMPLES // 8


def result(output: str) -> tuple[list[float], list[list[float]], int]:
    """What the chief printed at the end: x, how often every sample of every epoch counted, its steps."""
    found = re.findall(r"RESULT (.*)", output)
    assert len(found) == 1, output
    x, seen, steps = json.loads(found[0])
    return x, seen, steps


def once_each(seen: list[list[float]]) -> bool:
    return seen == [[1.0] * NUM_SAMPLES] * EPOCHS


def saved(folder: pathlib.Path) -> list[str]:
    """Checkpoints, oldest first."""
    return sorted(path.parent.name for path in folder.glob("*/manifest.json"))


def break_off(
    commands: Any, process: subprocess.Popen[str], saves: pathlib.Path, count: int, after: str = "runs"
) -> str:
    """kill -9 of everything, as soon as so many checkpoints were made since there was this file; what it wrote."""
    deadline = time.monotonic() + JOB_PATIENCE
    while not list(commands.folder.glob(after)):
        assert process.poll() is None and time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    there = saved(saves)
    while len(set(saved(saves)) - set(there)) < count:
        assert process.poll() is None and time.monotonic() < deadline, "it did not save"
        time.sleep(0.02)
    for pid in [process.pid, *commands.members().values()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    output, _ = process.communicate(timeout=PATIENCE)
    commands.check_nothing_left()
    return output
