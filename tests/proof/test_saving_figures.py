"""`make proof`: what a save of 512 MiB costs a job that goes on: the gate, the samples of a minute, memory."""

from __future__ import annotations

import json
import pathlib
import re
import threading
import time
from typing import Any

import pytest

from benchmarks.memory import pss_bytes
from syncline import config as configuration
from syncline.core.wire.control import Standings
from syncline.launch.engine import Engine
from syncline.launch.processes import MemberPlan, MemberProcess
from syncline.launch.running import Script, run_job

MIB = 1 << 20
#: Parameters, and Adam's two moments.
STATE_BYTES = 512 * MIB
SCRIPT = f"""
import json, time
import numpy as np
import syncline

job = syncline.init()
values = {{"w": np.zeros({STATE_BYTES} // 3 // 4, np.float32)}}
job.kv.register(values, syncline.Rule("Adam", lr=1e-3))
gradients = job.kv.gradients()
gradients["w"][...] = 1.0


def minute(saves):
    began, longest, steps, seen = time.monotonic(), 0.0, 0, False
    while (now := time.monotonic()) - began < SECONDS:
        if saves and not seen and now - began > SECONDS / 4:
            seen = True
            threading.Thread(target=job.save, daemon=True).start()
        job.kv.push_pull(gradients, out=values).wait()
        longest = max(longest, time.monotonic() - now)
        steps += 1
    return {{"steps": steps, "seconds": time.monotonic() - began, "longest": longest}}


import threading
SECONDS = 60.0
for _ in range(10):
    job.kv.push_pull(gradients, out=values).wait()
found = {{"plain": minute(False), "saving": minute(True), "plain again": minute(False)}}
print("FIGURES " + json.dumps(found), flush=True)
"""


class _Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, member: str, text: str) -> None:
        self.lines.append(f"{member} | {text}")

    def progress(self, standings: Standings) -> None:
        pass

    def verdict(self, text: str) -> None:
        self.lines.append(text)


class _Gauge(threading.Thread):
    """The server's memory, looked at until told to stop: when, and how much."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.pids: dict[str, int] = {}
        self.seen: list[tuple[float, int]] = []
        self.over = threading.Event()

    def start_member(self, engine: Engine, plan: MemberPlan) -> MemberProcess:
        process = engine.start(plan)
        self.pids[plan.name] = process.pid
        return process

    def run(self) -> None:
        while not self.over.wait(0.05):
            try:
                self.seen.append((time.monotonic(), pss_bytes(self.pids["server-0"])))
            except (KeyError, OSError):
                continue


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_save_of_512_mib_beside_training(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(SCRIPT)
    given: dict[str, Any] = {
        "workers": 1, "servers": 1, "name": "saving", "runs": str(tmp_path / "runs"), "max_restarts": 0,
        "checkpoint": str(tmp_path / "checkpoints"),
    }  # fmt: skip
    config = configuration.resolve(configuration.check_known(given, "test"))
    screen, gauge = _Screen(), _Gauge()
    gauge.start()
    code = run_job(given, config, Script(path=str(script)), screen, start=gauge.start_member)
    gauge.over.set()
    gauge.join()
    text = "\n".join(screen.lines)
    assert code == 0, text
    said = next(line for line in screen.lines if "FIGURES " in line)
    found = json.loads(said.partition("FIGURES ")[2])
    rates = {name: one["steps"] / one["seconds"] for name, one in found.items()}
    ratio = rates["saving"] / ((rates["plain"] + rates["plain again"]) / 2)
    gates = [float(ms) for ms in re.findall(r"commits were held for ([0-9.]+) ms", text)]
    usual = sorted(size for _, size in gauge.seen)[len(gauge.seen) // 4]
    beyond = max(size for _, size in gauge.seen) - usual
    print(f"steps/s {rates}, ratio {ratio:.3f} (reach 0.9)")
    print(f"gate closed for {gates} ms (reach 50); longest steps { {n: o['longest'] for n, o in found.items()} }")
    print(f"memory beyond the model {beyond / MIB:.0f} MiB of {STATE_BYTES / MIB:.0f} MiB (reach 1)")
    assert gates, text
    assert ratio >= 0.9
    assert beyond <= 1.02 * STATE_BYTES
