"""A run's folder on a disk that is really full: the job goes on, says so, and is recorded again when it can be."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap

import pytest
from tests.patience import JOB_PATIENCE, PATIENT_TOML

pytestmark = pytest.mark.proof

#: A disk of its own for runs/, in a mount namespace: 4 MB that are gone with the command.
OWN = ["unshare", "--user", "--map-root-user", "--mount", "--fork", "--kill-child", "sh", "-c"]
MOUNT = 'mkdir -p runs && mount -t tmpfs -o size=4m none runs && "$@"; code=$?; cp -r runs kept; exit $code'

SCRIPT = """
    import os, sqlite3, time, numpy as np, syncline
    job = syncline.init()
    job.kv.register({"w": np.zeros(1_000, np.float32)}, syncline.Rule("SGD", lr=1.0))

    def step():
        time.sleep(0.02)
        told = job.kv.push_pull({"w": np.ones(1_000, np.float32)}).wait()
        job.report(loss=1.0 / (1 + job.step))
        return told

    def steps_until(is_so):
        until = time.monotonic() + PATIENCE
        while not is_so() and time.monotonic() < until:
            step()

    def newest():
        with sqlite3.connect("file:runs/full/series.db?mode=ro", uri=True) as db:
            return db.execute("SELECT coalesce(max(at), 0) FROM rows").fetchone()[0]

    steps_until(lambda: os.path.exists("runs/full/series.db") and newest() > 0)
    try:
        with open("runs/filler", "wb") as file:
            while True:
                file.write(bytes(1024))
                file.flush()
    except OSError as error:
        print("FULL", error.strerror)
    began = time.time()
    steps_until(lambda: time.time() > began + 5)  # what lay in the files' last blocks is written by then
    before = newest()
    steps_until(lambda: time.time() > began + 10)
    assert newest() == before, "a full disk takes no readings"
    print("NOT RECORDED", job.step)
    os.remove("runs/filler")
    steps_until(lambda: newest() > before)
    print("RECORDED AGAIN", newest() > before)
    print("VALUE", step()["w"][0] + job.step)
"""


def test_a_job_goes_on_while_its_disk_is_full(tmp_path: pathlib.Path) -> None:
    """The worker itself fills the disk, trains on, and makes space again. No update is lost meanwhile."""
    if subprocess.run([*OWN, "mount -t tmpfs none /tmp"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets us mount nothing")
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    script = textwrap.dedent(SCRIPT).replace("PATIENCE", str(JOB_PATIENCE / 3))
    (tmp_path / "train.py").write_text(script)
    words = [sys.executable, "-m", "syncline", "run", "--name", "full", "--sink", "off", "train.py"]
    done = subprocess.run(
        [*OWN, MOUNT, "sh", *words], cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "the job has finished" in told, told
    assert "FULL No space left on device" in told and "RECORDED AGAIN True" in told and "VALUE 0.0" in told, told
    assert told.count("the job goes on, and is not recorded meanwhile") == 1, told
    events = [json.loads(line)["text"] for line in (tmp_path / "kept/full/events.jsonl").read_text().splitlines()]
    assert any("has formed" in text for text in events), events
