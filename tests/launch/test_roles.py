"""One role by hand, by the job file; and members that are missing, or do not belong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import Any

from tests.launch.played import FILE_LATE
from tests.patience import JOB_PATIENCE

SCRIPT = """
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(2)}, syncline.Rule("SGD", lr=1.0))
    print("VALUE", job.name, job.kv.push_pull({"x": np.ones(2)}).wait()["x"].tolist(), flush=True)
"""


def end(commands: Any, *processes: subprocess.Popen[str]) -> list[Any]:
    return [commands.finish(process) for process in processes]


def test_a_job_started_role_by_role(commands: Any) -> None:
    """A worker without a name takes the next free one; a stranger with another token harms nobody, nor does one whose
    name is not expected."""
    script = commands.script(SCRIPT)
    coordinator = commands.start("coordinator", "--job", "job.json", "-w", "2", "-s", "1", "--name", "byhand")
    first = commands.start("worker", "--job", "job.json", script, program=("-c", FILE_LATE))
    file = commands.folder / "job.json"
    deadline = time.monotonic() + JOB_PATIENCE
    while not file.exists():
        assert coordinator.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert file.stat().st_mode & 0o777 == 0o600
    stranger = json.loads(file.read_text())
    stranger["token"] = "00" * 32
    other = commands.folder / "other.json"
    other.write_text(json.dumps(stranger))
    other.chmod(0o600)
    strange = commands.start("worker", "--job", "other.json", script)
    unknown = commands.start("worker", "--job", "job.json", "--name", "worker-7", script)
    refused, unknown = end(commands, strange, unknown)
    assert refused.code == 1
    assert "syncline.TokenError: coordinator does not prove the token of job" in refused.output
    assert "use the job file of this job" in refused.output
    assert unknown.code == 1 and "no worker worker-7 is expected: the job has " in unknown.output
    assert ", at most 2 of these" in unknown.output
    second = commands.start("worker", "--job", "job.json", "--name", "worker-1", script)
    server = commands.start("server", "--job", "job.json")
    results = end(commands, first, second, server, coordinator)
    assert [result.code for result in results] == [0, 0, 0, 0], [result.output for result in results]
    assert "VALUE worker-0 [-1.0, -1.0]" in results[0].output
    assert "VALUE worker-1 [-1.0, -1.0]" in results[1].output
    assert not file.exists()


def test_a_server_that_never_comes_up_is_named(commands: Any) -> None:
    """A deadline, and the name of who is missing, on every side."""
    script = commands.script(SCRIPT)
    for seconds in (2, 20, 100):
        coordinator = commands.start("coordinator", "--job", "job.json", "--start-seconds", str(seconds))
        worker = commands.start("worker", "--job", "job.json", script)
        results = end(commands, worker, coordinator)
        if "worker-0" not in results[1].output:  # else a starved machine could not start it by then
            break
    assert [result.code for result in results] == [1, 1]
    for result in results:
        assert f"server-0 did not come up within {seconds} s" in result.output
    assert "Traceback" not in results[0].output


def test_a_script_ends_under_the_launcher_as_it_does_alone(commands: Any) -> None:
    """Exit handlers run, threads are waited for, sys.exit(0) inside `with` is no failure; and something that the
    script has started and that outlives it, with the script's output still open, holds up nobody."""
    script = commands.script("""
        import atexit, subprocess, sys, threading, time
        import syncline
        atexit.register(lambda: open("handler", "w").write("ran"))
        outlives = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open("pid", "w").write(str(outlives.pid))
        def save():
            time.sleep(0.5)
            open("saved", "w").write("whole")
        with syncline.init() as job:
            threading.Thread(target=save).start()
            sys.exit(0)
    """)
    try:
        result = commands.run("run", script)
    finally:
        os.kill(int((commands.folder / "pid").read_text()), signal.SIGKILL)
    assert result.code == 0, result.output
    assert (commands.folder / "handler").read_text() == "ran"
    assert (commands.folder / "saved").read_text() == "whole"
