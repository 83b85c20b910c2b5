"""Detached jobs: they go on when their launcher is killed, and another one takes over. Real processes on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest
from tests.engines.clusters import wait_until
from tests.engines.conftest import STEPS, Engine, finished_well

from syncline.launch.folder import LOCK

pytestmark = pytest.mark.engines


class Detached:
    """One detached job `d` and its processes."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.folder = engine, engine.folder / "runs" / "d"

    def begin(self, *words: str) -> str:
        self._engine.script(STEPS)
        command = ["syncline", "run", "--detach", "--name", "d", "--page", "off", *words, "train.py"]
        code, output = self._engine.run(command)
        assert code == 0 and "syncline attach d" in output, output
        return output

    def output(self) -> str:
        return (self.folder / "output.log").read_text()

    def says(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.output()), f"{pattern} was not said")

    def launcher(self) -> int:
        return int((self.folder / LOCK).read_text())

    def agent(self, number: int) -> int:
        """The process that writes to this agent's log and is one."""
        log = self.folder / f"agent-{number}.log"
        for pid in self._engine.members("syncline.engines.agent"):
            if os.readlink(f"/proc/{pid}/fd/1") == str(log):
                return pid
        raise AssertionError(f"there is no agent {number}")

    def attached(self) -> subprocess.Popen[str]:
        return self._engine.start(["syncline", "attach", "d", "--lines", "1000"])


@pytest.fixture
def detached(engine: Engine) -> Iterator[Detached]:
    engine.leave_out_torch()
    made = Detached(engine)
    try:
        yield made
    finally:
        for pid in (*engine.members("syncline.cli.detached"), *engine.members("syncline.engines.agent")):
            os.kill(pid, signal.SIGKILL)  # what they hold ends with them


@pytest.mark.smoke
def test_a_killed_launcher_ends_nothing_and_stop_saves_and_ends_all(engine: Engine, detached: Detached) -> None:
    """A worker that is killed afterwards comes back: the next launcher has taken over. attach shows all of it."""
    detached.begin("-w", "2", "--checkpoint", "saves")
    code, status = engine.run(["syncline", "status", "d"])
    assert code == 0 and ("it waits for" in status or "worker-0" in status), status
    first = engine.lives("worker-0", 1)[0]
    victim = engine.lives("worker-1", 1)[0]
    launcher = detached.launcher()
    os.kill(launcher, signal.SIGKILL)
    engine.goes_on("worker-0")
    detached.says("another launcher takes over; it has found coordinator, server-0, worker-0, worker-1")
    assert detached.launcher() != launcher
    shown = detached.attached()
    os.kill(int(victim[0]), signal.SIGKILL)
    lives = engine.lives("worker-1", 2)
    assert float(lives[-1][2]) < 0, "the second life began with the parameters of the job"
    engine.goes_on("worker-0")
    assert engine.lives("worker-0", 1) == [first]
    code, output = engine.run(["syncline", "stop", "d"])
    assert code == 0 and "interrupted by SIGTERM; all members have ended" in output, output
    code, output = engine.finish(shown)
    assert code == 143 and "worker-1 was killed by SIGKILL; starts again" in output, output
    assert "another launcher takes over" in output and "saved " in output, output
    assert list((engine.folder / "saves").glob("*/manifest.json"))
    engine.check_nothing_left()
    code, output = engine.run(["syncline", "stop", "d"])
    assert code == 2 and "the job d has ended, with exit code 143" in output, output


def test_a_member_that_dies_while_there_is_no_launcher_comes_back(engine: Engine, detached: Detached) -> None:
    """The launcher is killed with a worker, and with the coordinator: its successor finds both dead."""
    detached.begin("-w", "2", "-s", "2", "--replicas", "2")
    victim = int(engine.lives("worker-1", 1)[0][0])
    engine.lives("worker-0", 1)
    (coordinator,) = engine.members("coordinator")
    os.kill(detached.launcher(), signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    assert float(engine.lives("worker-1", 2)[-1][2]) < 0
    engine.goes_on("worker-0")
    code, status = engine.run(["syncline", "status", "d"])
    assert code == 0 and "worker-1" in status, status
    engine.end_steps()
    code, output = engine.finish(detached.attached())
    assert code == 0 and finished_well(output, 2), output
    assert "worker-0 ends" in output and "worker-1 ends" in output, output
    engine.check_nothing_left()


def test_a_killed_agent_is_started_again_with_its_members(engine: Engine, detached: Detached) -> None:
    """The agent of another host, then that of the launcher's own host, which holds the coordinator."""
    hosts = ["-H", "local:1,other:1", "--remote", "env HOST={host}", "--bind", "127.0.0.1", "-s", "2"]
    detached.begin(*hosts)
    engine.lives("worker-0", 1)
    engine.lives("worker-1", 1)
    os.kill(detached.agent(1), signal.SIGKILL)
    assert float(engine.lives("worker-1", 2)[-1][2]) < 0
    engine.goes_on("worker-0")
    engine.goes_on("worker-1")
    os.kill(detached.agent(0), signal.SIGKILL)
    assert float(engine.lives("worker-0", 2)[-1][2]) < 0
    engine.goes_on("worker-0")
    os.kill(detached.launcher(), signal.SIGKILL)  # the new agent starts the next one
    detached.says("another launcher takes over; it has found coordinator, server-0, server-1, worker-0, worker-1")
    engine.goes_on("worker-1")
    engine.end_steps()
    code, output = engine.finish(detached.attached())
    assert code == 0 and finished_well(output, 2), output
    engine.check_nothing_left()


def test_attach_takes_over_when_launcher_and_agent_are_gone(engine: Engine, detached: Detached) -> None:
    """As after a crash of all on the launcher's host: the other host goes on, and the coordinator comes back."""
    hosts = ["-H", "local:1,other:1", "--remote", "env HOST={host}", "--bind", "127.0.0.1", "-s", "2"]
    detached.begin(*hosts)
    engine.lives("worker-0", 1)
    engine.lives("worker-1", 1)
    agent = detached.agent(0)
    os.kill(detached.launcher(), signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not engine.members("coordinator"), "the coordinator lives on")
    shown = detached.attached()
    assert float(engine.lives("worker-0", 2)[-1][2]) < 0
    assert len(engine.lives("worker-1", 1)) == 1
    engine.goes_on("worker-1")
    engine.end_steps()
    code, output = engine.finish(shown)
    assert code == 0 and "no launcher and no agent on this host: another launcher starts" in output, output
    assert re.search("another launcher takes over; it has found server-1, worker-1", output), output
    engine.check_nothing_left()


def test_what_is_wrong_is_said(engine: Engine, detached: Detached) -> None:
    script = engine.script(STEPS)
    hosts = ["-H", "local:1,other:1", "--remote", "false {host}", "--bind", "127.0.0.1"]
    code, output = engine.run(["syncline", "run", "--detach", "--name", "d", *hosts, script])
    assert code == 2 and re.search(r"host other: false other .* ended with exit code 1", output), output
    engine.check_nothing_left()
    detached.begin("-w", "1")
    code, output = engine.run(["syncline", "run", "--detach", "--name", "d", "-w", "1", script])
    assert code == 2 and re.search(r"the job d is running \(pid \d+\)", output), output
    for command in ("attach", "stop"):
        code, output = engine.run(["syncline", command, "none"])
        assert code == 2 and "there is no job none under runs/; detached jobs: d" in output, output
    code, output = engine.run(["syncline", "stop", "--now", "d"])
    assert code == 0, output
    engine.check_nothing_left()
    plain = engine.start(["syncline", "run", "-w", "1", "--name", "p", script])
    engine.wait_for("runs/p/job.json", plain)
    code, output = engine.run(["syncline", "stop", "p"])
    assert code == 2 and "the job p was not started with --detach; Ctrl-C in its terminal" in output, output
    engine.end_steps()
    code, output = engine.finish(plain)
    assert code == 0, output
