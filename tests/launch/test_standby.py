"""The process of the next server: there before it is needed, never more than one, gone with the launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.launch.played import STANDBY_SOON
from tests.patience import PATIENCE

from syncline.launch import jobfile
from syncline.launch.processes import STANDBY, MemberPlan, start_member, start_standby
from syncline.launch.standby import Standby

SECONDS = PATIENCE


def ended(process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    return process.poll() is not None


class Waiting:
    """Starts processes that wait for a line, as many as asked for."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "input()"]
        self.started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.started[-1]


def test_there_is_one_until_it_is_taken() -> None:
    start = Waiting()
    standby = Standby(start)
    assert standby.take() is None
    standby.make_ready()
    standby.make_ready()
    assert len(start.started) == 1
    taken = standby.take()
    assert taken is start.started[0] and standby.take() is None
    standby.make_ready()
    assert len(start.started) == 2
    standby.close()
    assert ended(start.started[1]) and taken.poll() is None  # what was taken is not ours
    standby.make_ready()
    assert len(start.started) == 2
    taken.kill()
    taken.communicate()


def test_one_that_ended_while_it_waited_is_given_to_nobody_and_not_replaced_for_ever() -> None:
    start = Waiting()
    standby = Standby(start, most_lost=2)
    for number in (1, 2):
        standby.make_ready()
        assert len(start.started) == number
        start.started[-1].kill()
        start.started[-1].wait()
    assert standby.take() is None
    standby.make_ready()
    start.started[-1].kill()
    start.started[-1].wait()
    standby.make_ready()
    standby.make_ready()
    assert len(start.started) == 3
    standby.close()


def test_no_room_for_a_standby_is_no_failure() -> None:
    def start() -> subprocess.Popen[bytes]:
        raise OSError("cannot allocate memory")

    standby = Standby(start)
    standby.make_ready()
    assert standby.take() is None
    standby.close()


@pytest.mark.proof
def test_a_server_that_starts_again_takes_it_and_nobody_else() -> None:
    standby = Standby(start_standby)
    standby.make_ready()
    waiting = standby._process
    assert waiting is not None
    nowhere = jobfile.new("127.0.0.1", 1, {"start_seconds": 0.1})
    plans = [
        MemberPlan(role="server", name="server-0", host="local", file=nowhere),
        MemberPlan(role="worker", name="worker-0", host="local", file=nowhere, starts_again=True, script="none.py"),
        MemberPlan(role="server", name="server-0", host="local", file=nowhere, starts_again=True),
    ]
    members = [start_member(plan, "", standby) for plan in plans]
    try:
        assert [member.pid == waiting.pid for member in members] == [False, False, True]
        said = members[-1].output.read().decode()  # until it has ended
        assert said.startswith("syncline: server-0: ") and ended(waiting)
    finally:
        for member in members:
            member.stop(SECONDS)
        standby.close()


def test_it_ends_when_nobody_is_left_who_could_use_it() -> None:
    process = start_standby()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # as the end of the launcher does
    assert ended(process)
    process.stdout.close()


ENDLESS = """
    import numpy as np
    import syncline
    job = syncline.init()
    job.kv.register({"w": np.zeros(1000, np.float32)}, syncline.Rule("SGD", lr=1.0))
    while True:
        job.kv.push_pull({"w": np.ones(1000, np.float32)}).wait()
"""


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_with_all_the_others(commands: Any, number: int) -> None:
    """While all are at work; in `make test` test_run.py ends one, too."""
    script = commands.script(ENDLESS)
    process = commands.start("run", "-w", "2", "-s", "2", script, program=("-c", STANDBY_SOON))
    until = time.monotonic() + SECONDS
    while STANDBY not in commands.members():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    assert set(commands.members()) == {"coordinator", "server-0", "server-1", "worker-0", "worker-1", STANDBY}
    process.send_signal(number)
    result = commands.finish(process)
    assert result.code == 128 + number and f"interrupted by {signal.Signals(number).name}" in result.output
    assert "Traceback" not in result.output and "Error" not in result.output
    commands.check_nothing_left(0.0)
