"""A real job whose coordinator cannot write any more."""

from __future__ import annotations

import json
import pathlib
import resource
import time
from typing import Any

import pytest
from tests.patience import PATIENCE

SCRIPT = """
    import os, pathlib, time, numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(10)}, syncline.Rule("SGD", lr=1.0))
    progress, step = pathlib.Path("progress"), 0
    while not os.path.exists("enough"):
        job.kv.push_pull({"x": np.ones(10)}).wait()
        step += 1
        job.report(loss=1.0 / step)
        with open("progress.new", "w") as out:
            out.write(str(step))
        os.replace("progress.new", "progress")
        time.sleep(0.01)
    print("ENDED WELL")
"""


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.slow
def test_a_full_disk_costs_the_records_and_no_step(commands: Any) -> None:
    """No file of the coordinator may grow, nor be written beyond its first byte: the journal, the series and the
    lines. The job makes steps and ends well; what could not be recorded is said once.
    """
    process = commands.start("run", "-w", "1", "--name", "full", commands.script(SCRIPT))
    run: pathlib.Path = commands.folder / "runs/full"
    until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size, "it is recorded")
    coordinator = commands.members()["coordinator"]
    resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    commands.wait_for("the job goes on, and is not recorded meanwhile", "coordinator")
    step = int((commands.folder / "progress").read_text())
    until(lambda: int((commands.folder / "progress").read_text()) > step + 20, "it makes steps")
    assert process.poll() is None
    resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (commands.folder / "enough").touch()
    result = commands.finish(process)
    assert result.code == 0 and "ENDED WELL" in result.output, result.output
    assert result.output.count("is not recorded meanwhile") == 1 and "Traceback" not in result.output
    for name in ("metrics.jsonl", "events.jsonl"):
        for line in (run / name).read_text().splitlines():
            assert isinstance(json.loads(line), dict), "no half line"
