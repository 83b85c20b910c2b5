"""The processes of a pipeline, as their leader watches them."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.patience import PATIENCE

WATCHED = """
import socket, subprocess, sys, time
from syncline.worker.stages import StageProcess, StageProcesses

def say(text):
    print(text, flush=True)

orders, pulse = socket.socketpair(), socket.socketpair(type=socket.SOCK_SEQPACKET)
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
stages = StageProcesses([StageProcess(1, child.pid, orders[0], pulse[0])], 0, say, 0.2, 600.0)
time.sleep(1.0)
say("it may be silent")
stages.are_ready()
time.sleep(600.0)
"""


def test_a_stage_that_starts_may_be_silent_for_longer() -> None:
    """Loading libraries keeps an interpreter from showing that it lives. When all are ready, silence is a death."""
    ended = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == "it may be silent"
    assert "was silent for 0.2 s: the pipeline ends and starts again" in second
