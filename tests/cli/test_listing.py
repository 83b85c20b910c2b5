"""`syncline status` without a job: what ran here, and what runs."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
import time
from typing import Any

import msgspec
import pytest
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENT_TOML

from syncline.cli.listing import MOST_ENDED, list_jobs
from syncline.cli.standing import COLUMNS

SCRIPT = """
    import pathlib, sys, time, numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(2)}, syncline.Rule("SGD", lr=1.0))
    for _ in range(3):
        job.kv.push({"x": np.ones(2)}).wait()
    pathlib.Path("made").touch()
    while "wait" in sys.argv and not pathlib.Path("go on").exists():
        time.sleep(0.02)
    assert "fail" not in sys.argv
"""


def syncline(folder: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-m", "syncline", *words], cwd=folder, capture_output=True, text=True, timeout=JOB_PATIENCE
    )


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML + "max_restarts = 0\n")
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


@pytest.mark.proof
def test_jobs_that_run_and_jobs_that_have_ended(folder: pathlib.Path) -> None:
    assert syncline(folder, "status").stdout == "no jobs under runs/ (--runs DIR names another folder)\n"
    assert syncline(folder, "run", "-w", "1", "--name", "badly", "train.py", "fail").returncode == 1
    (folder / "made").unlink()
    words = [sys.executable, "-m", "syncline", "run", "-w", "2", "--policy", "async", "--name", "now"]
    job = forked.Popen([*words, "train.py", "wait"], cwd=folder, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + JOB_PATIENCE
        while not (folder / "made").exists() and time.monotonic() < until:
            time.sleep(0.05)
        told: Any = {one["name"]: one for one in msgspec.json.decode(syncline(folder, "status", "--json").stdout)}
        lines = syncline(folder, "status").stdout.splitlines()
    finally:
        (folder / "go on").touch()
        job.wait(JOB_PATIENCE)
    assert list(told) == ["now", "badly"]
    assert [one["is_running"] for one in told.values()] == [True, False]
    assert told["now"]["policy"] == "async" and told["now"]["told"] == "2 workers"
    (well,) = (one for one in msgspec.json.decode(list_jobs(folder / "runs", as_json=True)) if one["name"] == "now")
    assert (well["step"], well["told"]) == (6, "all workers have finished")
    assert told["badly"]["told"].startswith("failed: worker-0 ")
    assert lines[0].split() == ["job", "state", "since", "policy", "step"]
    assert [line.split()[:2] for line in lines[1:]] == [["now", "running"], ["badly", "ended"]]


def test_what_cannot_be_known_and_what_is_too_much(tmp_path: pathlib.Path) -> None:
    """A folder with logs only; a journal that is damaged; many that have ended; a folder that is no job's."""
    (tmp_path / "data").mkdir()
    for number in range(MOST_ENDED + 3):
        made = tmp_path / f"job-{number:02}-{'x' * 90}"
        made.mkdir()
        (made / "worker-0.log").write_text("hello")
        if number % 2:
            (made / "journal.db").write_bytes(b"no journal" * 100)
    lines = list_jobs(tmp_path).splitlines()
    assert len(lines) == MOST_ENDED + 2 and lines[-1] == "and 3 more that have ended (--json lists all)"
    assert all(len(line) <= COLUMNS for line in lines) and not any("data" in line for line in lines)
    told = msgspec.json.decode(list_jobs(tmp_path, as_json=True))
    assert {one["told"] for one in told} == {"it is not known how it ended"} and len(told) == MOST_ENDED + 3
