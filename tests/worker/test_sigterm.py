"""SIGTERM to a worker's own process: it finishes its step and leaves. Eviction: one line, and a code of its own."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from tests import forked
from tests.patience import PATIENCE

BEGIN = """
import os, signal, sys, time
from syncline.launch.member import leave_on_sigterm
"""
LOOP = """
leave_on_sigterm()
import torch, syncline
import numpy as np
job = syncline.init()
job.before_settle(lambda: print("settles", flush=True))
out = job.kv.register({"x": np.zeros(4)}, syncline.Rule("Add"))
print("ready", flush=True)
"""
KV = """
for step in range(1, 10**6):
    ticket = job.kv.push_pull({"x": np.ones(4)}, out=out)
    time.sleep(0.02)
    ticket.wait()
    print(step, int(out["x"][0]), flush=True)
    time.sleep(0.02)
"""
TORCH = """
from syncline.torch import DistributedOptimizer
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
for step in range(1, 10**6):
    model(torch.full((1, 2), -1.0)).sum().backward()
    opt.step(); opt.zero_grad()
    print(step, int(model.weight[0, 0]), flush=True)
    time.sleep(0.02)
"""


def start(tmp_path: pathlib.Path, *parts: str) -> subprocess.Popen[str]:
    (tmp_path / "child.py").write_text(textwrap.dedent("".join((BEGIN, *parts))))
    return forked.Popen(
        [sys.executable, "child.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_ready(process: subprocess.Popen[str], word: str = "ready") -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.strip() == word:
            return
    raise AssertionError("".join(seen))


@pytest.mark.parametrize("body", [KV, pytest.param(TORCH, marks=pytest.mark.proof)], ids=["kv", "torch"])
def test_it_finishes_its_step_and_leaves(tmp_path: pathlib.Path, body: str) -> None:
    process = start(tmp_path, LOOP, body)
    try:
        wait_ready(process, "3 3")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    lines = output.split("\n")
    assert "settles" in lines and "Traceback" not in output
    steps = [line.split() for line in lines if line[:1].isdigit()]
    assert all(step == value for step, value in steps) and len(steps) < 5000, output


def test_a_second_one_ends_it_at_once(tmp_path: pathlib.Path) -> None:
    hears = "while not job._handlers.is_retiring: time.sleep(0.01)\nprint('heard', flush=True)\n"
    process = start(tmp_path, LOOP, hears, "while True: time.sleep(0.01)\n")
    try:
        wait_ready(process)
        process.send_signal(signal.SIGTERM)
        wait_ready(process, "heard")  # two that come at once would be one
        time.sleep(0.3)
        assert process.poll() is None, "it computes, and has made no step since"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_before_there_is_a_job_it_ends_as_ever(tmp_path: pathlib.Path) -> None:
    process = start(tmp_path, "leave_on_sigterm()\nprint('ready', flush=True)\ntime.sleep(600)\n")
    try:
        wait_ready(process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGTERM


@pytest.mark.proof
def test_a_script_may_do_otherwise(tmp_path: pathlib.Path) -> None:
    own = "signal.signal(signal.SIGTERM, lambda *_: (print('mine', flush=True), os._exit(7)))\n"
    process = start(tmp_path, own, LOOP, "time.sleep(600)\n")
    try:
        wait_ready(process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 7 and "mine" in output


def test_a_fenced_worker_says_so_in_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text("import syncline\nraise syncline.FencedError('silent for 4.0 s')\n")
    text = """
    from syncline.launch import jobfile
    from syncline.launch.member import run_worker
    from syncline.launch.processes import MemberPlan
    file = jobfile.new("127.0.0.1", 1, {})
    sys.exit(run_worker(MemberPlan(role="worker", name="worker-2", host="local", file=file, script="script.py")))
    """
    process = start(tmp_path, textwrap.dedent(text))
    output, _ = process.communicate(timeout=PATIENCE)
    assert output == "syncline: worker-2 was evicted: silent for 4.0 s; a new process may join under its name\n"
    assert process.returncode == 75
