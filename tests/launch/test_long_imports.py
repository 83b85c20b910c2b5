"""Workers that load a framework before their first step: no thread of theirs can send a heartbeat meanwhile."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
from tests.launch.counted import WAYS

pytestmark = [pytest.mark.slow, pytest.mark.proof]

#: Workers that keep the interpreter's lock for so many seconds before their first step.
LOADS = """
    import ctypes, pathlib, sys, time
    import numpy as np
    import syncline

    seconds, loading, returning = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    job = syncline.init()
    if job.life.number == 1 and job.name in loading:
        ctypes.PyDLL(None).usleep(seconds * 1_000_000)
    if job.life.number > 1:
        pathlib.Path("back").touch()
    while returning and job.name not in returning and not pathlib.Path("back").exists():
        time.sleep(0.02)
    params = job.kv.register({"x": np.zeros(4, np.float32)}, syncline.Rule("SGD", lr=0.5), reduce="mean")
    for _ in job.steps(10):
        params = job.kv.push_pull({"x": np.ones(4, np.float32)}).wait()
    job.barrier("end")
    print("RESULT", job.name, job.life.number, job.kv.pull()["x"].tolist(), flush=True)
    job.close()
"""


@pytest.mark.parametrize("way", WAYS)
def test_who_loads_libraries_before_its_first_step_is_not_evicted(commands: Any, way: str) -> None:
    script = commands.script(textwrap.dedent(LOADS))
    done = commands.run("run", "-w", "2", *WAYS[way], script, "5", "worker-0,worker-1")
    assert done.code == 0 and " is out: " not in done.output, done.output
    assert sorted(re.findall(r"RESULT (\S+) (\d)", done.output)) == [("worker-0", "1"), ("worker-1", "1")]


@pytest.mark.parametrize("way", WAYS)
def test_who_is_evicted_before_its_first_step_comes_back(commands: Any, way: str) -> None:
    """It hears of it when it makes its next call, or the launcher ends it before."""
    (commands.folder / "syncline.toml").write_text("longest_deadline_seconds = 2.0\n")
    script = commands.script(textwrap.dedent(LOADS))
    done = commands.run("run", "-w", "2", *WAYS[way], script, "6", "worker-1", "worker-1")
    assert done.code == 0 and re.search(r"(worker|server)-1 \(incarnation \d\) is out: not heard of", done.output), (
        done.output
    )
    assert sorted(re.findall(r"RESULT (\S+) (\d)", done.output)) == [("worker-0", "1"), ("worker-1", "2")]
