"""A training on `job.kv` alone that counts its samples, and a worker of it that is killed with -9 and comes back."""

from __future__ import annotations

import textwrap
from typing import Any

#: MODEL registers `params`, and defines `change_of(params, x, y)`, what a step pushes, and `mean_loss(params)`.
#: `seen` counts on the servers how often each sample was in a step that counts.
TRAIN = """
    import os, pathlib, signal, sys, time
    import numpy as np
    import syncline
    from syncline.data import ArraySource, batches

    victim, num_samples = sys.argv[1], 240
    job = syncline.init()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_samples, 4)).astype(np.float32)
    y = (x @ np.array([1, -2, 0.5, 1], np.float32) > 0).astype(np.float32)
    source = ArraySource((x, y, np.arange(num_samples)))
    MODEL
    job.kv.register({"seen": np.zeros(num_samples, np.float32)}, syncline.Rule("Add"), reduce="sum")

    is_first_life = job.life.number == 1
    if job.name == victim and not is_first_life:
        pathlib.Path("back").touch()
    for epoch in range(4):
        while epoch == 2 and victim and job.name != victim and not pathlib.Path("back").exists():
            time.sleep(0.02)
        for some, labels, numbers in batches(source, 8, shuffle=True):
            while epoch == 1 and victim and job.name != victim and not pathlib.Path("killed").exists():
                time.sleep(0.02)  # the victim gets a batch of this epoch
            ones = np.zeros(num_samples, np.float32)
            ones[numbers] = 1
            pushed = job.kv.push_pull({**change_of(params, some, labels), "seen": ones}, weight=1)
            if job.name == victim and is_first_life and epoch == 1:
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)  # the commit may be under way
            params = pushed.wait()
    job.barrier("end")
    params = job.kv.pull()
    counts = ",".join(sorted({f"{count:g}" for count in params["seen"].tolist()}))
    print(f"RESULT {job.name} {job.life.number} {mean_loss(params):.4f} {counts}", flush=True)
    job.close()
"""
WAYS = {
    "sync": ("-s", "2"),
    "bounded": ("-s", "1", "--policy", "bounded:2"),
    "async": ("-s", "1", "--policy", "async"),
    "ring": ("--exchange", "ring"),
}


def check_a_kill(commands: Any, model: str, way: str) -> None:
    """Trains alone, and with two workers. Worker 1 is killed in its second epoch, right after it has sent a push.

    Each sample counts once per epoch, and the loss falls as in one process.
    """
    script = commands.script(textwrap.dedent(TRAIN).replace("MODEL", textwrap.dedent(model)))
    alone = commands.finish(commands.start("", program=(script,)))
    assert alone.code == 0, alone.output
    ((_, _, reached, counts),) = _results(alone.output)
    assert float(reached) < 0.25 and counts == "4", alone.output
    done = commands.run("run", "-w", "2", *WAYS[way], script, "worker-1")
    assert done.code == 0 and "worker-1 was killed by SIGKILL" in done.output, done.output
    found = _results(done.output)
    assert [result[:2] for result in found] == [["worker-0", "1"], ["worker-1", "2"]], done.output
    for _, _, loss, counts in found:
        # In rounds there are half as many steps; otherwise the steps of both count in full.
        assert float(loss) < 0.35 and counts == "4", done.output
    assert found[0][2] == found[1][2], "the workers ended with different models"


def _results(output: str) -> list[list[str]]:
    return sorted(line.split("RESULT ")[1].split() for line in output.splitlines() if "RESULT " in line)
