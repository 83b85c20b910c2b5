"""The table of exit codes in docs/reference/exit-codes.md, row by row."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest

BEGIN = """
    import contextlib, os, pathlib, signal, sys, time
    import numpy as np, syncline

    job = syncline.init()
    job.kv.register({"w": np.zeros(1)}, syncline.Rule("SGD", lr=1.0))

    def push():
        job.kv.push_pull({"w": np.ones(1)}).wait()

    def once(name):
        if job.name != name or pathlib.Path("once").exists():
            return False
        pathlib.Path("once").touch()
        return True
"""
WELL = (
    BEGIN
    + """
    for step in job.steps(5):
        push()
"""
)
KILLED_ONCE = (
    BEGIN
    + """
    for step in job.steps(40):
        if job.name == "worker-1" and job.life.number == 2:
            pathlib.Path("back").touch()
        if job.own_step == 3 and once("worker-1"):
            os.kill(os.getpid(), signal.SIGKILL)
        while job.name == "worker-0" and job.own_step == 5 and not pathlib.Path("back").exists():
            time.sleep(0.05)
        push()
"""
)
RAISES = (
    BEGIN
    + """
    for step in range(20):
        if step == 10 and job.name == "worker-1":
            time.sleep(1.2)
            raise RuntimeError("of the script")
        while step == 15 and job.world_size > 1:
            time.sleep(0.05)
        push()
"""
)
MISUSED = (
    BEGIN
    + """
    for step in job.steps(20):
        push()
        if job.own_step == 5:
            raise syncline.ConfigError("wrong for good")
"""
)
EARLY = """
    import syncline
    job = syncline.init()
    raise SystemExit(7)
"""
AFTERWARDS = (
    BEGIN
    + """
    for step in job.steps(5):
        push()
    if not job.is_chief:
        while not pathlib.Path("done").exists():
            time.sleep(0.05)
        raise RuntimeError("after the chief")
    job.close()
    pathlib.Path("done").touch()
"""
)
UNDECIDED = (
    BEGIN
    + """
    done = pathlib.Path("done")
    for step in job.steps(5):
        push()
    if job.is_chief:
        while not done.exists():
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(int(done.read_text()), 0)
                time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    job.close()
    pathlib.Path("made").write_text(str(os.getpid()))
    os.rename("made", "done")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "code", "told"),
    [
        pytest.param(WELL, (), 0, "", marks=pytest.mark.proof),
        (KILLED_ONCE, (), 0, "worker-1 was killed by SIGKILL"),
        (RAISES, (), 0, "The job goes on without it"),
        (MISUSED, (), 1, "it is not restarted, since the same would happen again"),
        (EARLY, (), 7, "the job has failed"),
        pytest.param(WELL, ("--max-steps", "3"), 0, "--max-steps 3", marks=pytest.mark.proof),
        (AFTERWARDS, (), 0, "the other workers have finished"),
        (UNDECIDED, (), 137, "the other workers have finished"),
    ],
    ids=[
        "well",
        "replaced",
        "not replaced",
        "misused",
        "before its first step",
        "stop rule",
        "after the chief",
        "chief at last",
    ],
)
def test_exit_codes(commands: Any, script: str, options: tuple[str, ...], code: int, told: str) -> None:
    result = commands.run("run", "-w", "2", "--policy", "async", *options, commands.script(script))
    assert result.code == code and told in result.output, result.output
    assert script is not MISUSED or "starts again" not in result.output, result.output


@pytest.mark.slow
def test_ctrl_c_is_130(commands: Any) -> None:
    endless = WELL.replace("job.steps(5):", "job.steps(10**9):\n        print('stepping', flush=True)")
    process = commands.start("run", "-w", "2", commands.script(endless))
    commands.wait_for("stepping", "worker-0")
    os.kill(process.pid, signal.SIGINT)
    result = commands.finish(process)
    assert result.code == 130, result.output


@pytest.mark.proof
@pytest.mark.slow
def test_workers_that_do_not_come_in_time_are_1(commands: Any) -> None:
    (commands.folder / "syncline.toml").write_text("start_seconds = 3.0\n")
    script = commands.script("import time; time.sleep(60)")
    result = commands.run("run", "-w", "1", script)
    assert result.code == 1 and "did not come up within 3 s" in result.output, result.output


def test_the_page_has_these_rows() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "exit-codes.md").read_text()
    table = page.partition("## syncline run")[2]
    for row in ("every worker ended well", "replaced", "stop rule", "Ctrl-C", "130", "128 + signal number"):
        assert row in table
