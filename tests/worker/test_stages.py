"""The processes of a pipeline, as their leader watches them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
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


FAILING = """
import os, socket, sys
from syncline.errors import ConfigError
from syncline.worker.stages import StagePlace, StageProcess, StageProcesses

orders, pulse = socket.socketpair(), socket.socketpair(type=socket.SOCK_SEQPACKET)
pid = os.fork()
if pid == 0:
    place = StagePlace(1, 2, orders[1], pulse[1], 0)
    place.begin("worker-0")
    if sys.argv[-1] == "torn":
        pulse[1].send(bytes([0x92, 0xa0, 0xd9, 0xff]))
        os._exit(1)
    text = "the start " + (chr(0xE9) + chr(0xDC80)) * 100_000 + " the end"
    place.fail(ConfigError(text) if sys.argv[-1] == "ours" else ValueError(text))
stages = StageProcesses([StageProcess(1, pid, orders[0], pulse[0])], 0, print, 600.0, 600.0)
error = stages.explain(KeyError())
print(type(error).__name__, len(str(error).encode()) <= 60_100)
print(ascii(str(error).splitlines()[0][:60]), ascii(str(error)[-8:]))
"""


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("theirs", "RuntimeError True", "'stage 1 of worker-0 failed:' 'the end"),
        ("ours", "ConfigError True", "stage 1 of worker-0: the start "),
        ("torn", "RuntimeError True", "failed, with no clear word"),
    ],
)
def test_a_long_reason_of_any_letters_arrives(how: str, first: str, second: str) -> None:
    """Letters are not bytes. A reason that was cut in its middle ended the thread that sees deaths."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, how],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    one, two = ended.stdout.splitlines()
    assert one == first and second in two, ended.stdout


ORPHAN = """
import os, sys
from syncline.worker import stages

pid = os.fork()
if pid == 0:
    stages._die_with_parent(os.getppid() if sys.argv[-1] == "child" else 1 << 30)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("whose", "code"), [("child", 7), ("orphan", 1)])
def test_a_stage_whose_leader_died_before_it_asked_ends(whose: str, code: int) -> None:
    """The kernel sends no signal for a parent that was dead before."""
    ended = subprocess.run(
        [sys.executable, "-c", ORPHAN, whose], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.stdout == f"{code}\n", ended.stderr
