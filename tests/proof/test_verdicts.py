"""Verdicts on real jobs: a fault that is planted is told in all places, and of a job without one there is none."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
from tests.patience import JOB_PATIENCE, PATIENCE, PATIENT_TOML

pytestmark = pytest.mark.proof

#: Sleeps stand for work: they take as long on a busy machine.
SCRIPT = """
    import os, sys, time, numpy as np, syncline, syncline.torch
    fault = sys.argv[1]
    job = syncline.init()
    worker = int(job.name.rpartition("-")[2])
    size = {"communication": 4_000_000, "hot-server": 1_000_000}.get(fault, 64)
    job.kv.register({"large": np.zeros(size, np.float32), "small": np.zeros(size // 2, np.float32)}, RULE)
    gradients = {"large": np.ones(size, np.float32), "small": np.ones(size // 2, np.float32)}


    class Samples:
        def __len__(self):
            return 10_000_000

        def __getitem__(self, index):
            time.sleep(0.1 if fault == "data-starvation" else 0.001)
            return np.float32(index)


    for number, _ in enumerate(syncline.torch.DataLoader(Samples(), batch_size=1)):
        if os.path.exists("stop") or number == MOST_STEPS:
            break
        if fault == "hang" and number == 20 and worker == 1:
            while not os.path.exists("stop"):
                time.sleep(0.1)  # it lives, and does not go on
        if fault != "communication":
            time.sleep(0.3 if fault == "straggler" and worker == 1 else 0.1)
        job.kv.push_pull(gradients).wait()
        loss = 1.0 / (1 + number)
        if fault == "diverging" and number > 30:
            loss = float("nan")
        if fault == "flat" and number > 20:
            loss = 0.05
        job.report(loss=loss)
    print("STEPS", number)
"""
#: A rule that takes long for the larger of two parameters, which has a server of its own.
SLOW = """
    import time, torch


    class SlowSGD(torch.optim.SGD):
        def step(self, closure=None):
            if any(one.numel() == 1_000_000 for group in self.param_groups for one in group["params"]):
                time.sleep(0.3)
            return super().step(closure)
"""


class RunningJob:
    """Three workers and two servers."""

    def __init__(self, folder: pathlib.Path, fault: str, most_steps: int = 10**9) -> None:
        self.folder = folder
        (folder / "syncline.toml").write_text(PATIENT_TOML)
        rule = 'syncline.Rule("slow:SlowSGD", lr=0.01)' if fault == "hot-server" else 'syncline.Rule("SGD", lr=0.01)'
        script = textwrap.dedent(SCRIPT).replace("RULE", rule).replace("MOST_STEPS", str(most_steps))
        (folder / "train.py").write_text(script)
        (folder / "slow.py").write_text(textwrap.dedent(SLOW))
        words = ["run", "-w", "3", "-s", "2", "--name", "now", "--sink", "off", "train.py", fault]
        self.log = folder / "out.txt"
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "syncline", *words], cwd=folder, stdout=out, stderr=out
            )

    def verdicts(self) -> list[str]:
        """Texts of the verdicts so far."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "runs/now/events.jsonl").read_text().splitlines(keepends=True)
            events = [json.loads(line) for line in lines if line.endswith("\n")]
            return [event["text"] for event in events if event["kind"] == "verdict"]
        return []

    def wait_for_verdict(self, words: str) -> None:
        """Others may come first: the very first rounds of a server are long."""
        until = time.monotonic() + PATIENCE
        while not any(words in text for text in self.verdicts()):
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.2)

    def told(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "syncline", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return done.stdout + done.stderr

    def end(self) -> int:
        (self.folder / "stop").touch()
        try:
            return self.process.wait(JOB_PATIENCE)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def running(folder: pathlib.Path, fault: str, most_steps: int = 10**9) -> Iterator[RunningJob]:
    job = RunningJob(folder, fault, most_steps)
    try:
        yield job
    finally:
        job.end()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("straggler", "worker-1 is the straggler"),
        ("hot-server", "is the hot server"),
        ("data-starvation", "waiting for its loader"),
        ("communication", "of the workers' steps is exchange"),
        ("hang", "the job probably hangs: no step for"),
        ("diverging", "loss diverges: it is not finite since step"),
        ("flat", "loss is flat: 0.05 since step"),
    ],
)
def test_a_fault_is_told_in_all_places(tmp_path: pathlib.Path, fault: str, words: str) -> None:
    with running(tmp_path, fault) as job:
        job.wait_for_verdict(words)
        assert words in job.told("why", "now").replace("\n", " ")
        assert words in " ".join(job.told("status", "now").split())
        assert f"; {fault}" in job.told("ls")
        token = (tmp_path / "runs/now/page.token").read_text()
        assert f'kind="{fault}"' in metrics_of(job, token)
        assert words in job.told("report", "now", "-o", "-").replace("&#x27;", "'")
    assert words in " ".join(job.log.read_text().split()), "syncline run has told it too"


def metrics_of(job: RunningJob, token: str) -> str:
    import re
    import urllib.request

    found = re.search(r"the page: (http://[^/]+)/", job.log.read_text())
    assert found is not None
    request = urllib.request.Request(f"{found[1]}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def test_a_healthy_job_has_no_verdict(tmp_path: pathlib.Path) -> None:
    """Thirty seconds and more: all windows are full."""
    with running(tmp_path, "none", most_steps=300) as job:
        assert job.process.wait(JOB_PATIENCE) == 0, job.log.read_text()
        assert job.verdicts() == [], job.log.read_text()
        assert "STEPS 300" in job.log.read_text()
