"""Jobs of real processes that go on: kills, restarts, more and fewer members, and what is said of it meanwhile."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.patience import JOB_PATIENCE
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.core.wire.control import AskStatus, GivenStatus
from syncline.errors import SynclineError
from syncline.launch.folder import find_job
from syncline.launch.watching import ask
from syncline.stats import JobStatus, MemberStatus

LEDGER = str(pathlib.Path(__file__).parents[2] / "examples" / "chaos_ledger.py")
FOUR = ("run", "-w", "2", "-s", "2", "--replicas", "2", "--name", "alive")
PUSHES = (LEDGER, "--seconds", "800", "--until", "enough", "--think", "0.02")
EXACT = re.compile(r"ledger: (\d+) acknowledged, 0 lost, 0 doubled$", re.MULTILINE)


def status(commands: Any) -> JobStatus | None:
    """How the job stands; nothing while it cannot be asked."""
    try:
        return ask(find_job("alive", commands.folder / "runs"), AskStatus(), GivenStatus, 20.0).status
    except SynclineError:
        return None


def members(commands: Any) -> dict[str, MemberStatus]:
    found = status(commands)
    return {member.name: member for member in found.members} if found is not None else {}


def wait(condition: Callable[[], Any], seconds: float = JOB_PATIENCE) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.05)
    return found


def wait_for_steps(commands: Any, process: subprocess.Popen[str]) -> dict[str, MemberStatus]:
    """Until every worker has made some steps."""

    def stepping() -> dict[str, MemberStatus] | None:
        assert process.poll() is None, process.communicate()[0]
        found = members(commands)
        steps = [member.step for member in found.values() if member.role == "worker"]
        return found if steps and min(steps) > 2 else None

    return wait(stepping)


def enough(commands: Any) -> None:
    """The ledger closes."""
    (commands.folder / "enough").touch()


def test_killed_members_come_back_and_nothing_is_lost(commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server, a worker and the coordinator of one job, one after the other; the server when its backup has a push
    and its worker has not heard of it yet."""
    monkeypatch.setenv("SYNCLINE_FAULT", "server-0@replicate.acknowledged#20=kill")
    process = commands.start(*FOUR, "--policy", "sync", *PUSHES)
    commands.wait_for("--- server-0 starts again", "server-0")
    wait(lambda: "server-0" in members(commands))
    before = wait_for_steps(commands, process)["worker-1"].incarnation
    os.kill(commands.members()["worker-1"], signal.SIGKILL)
    wait(lambda: (found := members(commands).get("worker-1")) and found.incarnation > before)
    os.kill(commands.members()["coordinator"], signal.SIGKILL)
    wait(lambda: (found := status(commands)) is not None and found.term == 2)
    victims = ("server-0", "worker-1", "coordinator")
    enough(commands)
    result = commands.finish(process)
    assert result.code == 0, result.output
    assert EXACT.search(result.output), result.output
    said = "survives the death of any one server, but not of this host"
    assert said in result.output
    for victim in victims:
        assert f"syncline: {victim} was killed by SIGKILL; starts again" in result.output
        log = (commands.folder / f"runs/alive/{victim}.log").read_text()
        assert f"--- {victim} starts again: was killed by SIGKILL ---" in log
    table = " ".join(result.output[result.output.index("syncline: the job has finished: all 2 workers") :].split())
    for victim in victims:
        back = rf"{victim} was killed by SIGKILL( at step [\d,]+)?, back after [\d.]+ s"
        assert re.search(back, table), table
    commands.check_nothing_left()
    left = {path.name for path in (commands.folder / "runs/alive").iterdir()}
    assert not {"job.json", "lock"} & left


@pytest.mark.proof
def test_a_member_that_dies_again_and_again_ends_the_job(commands: Any) -> None:
    script = commands.script("""
        import os, signal, time, syncline
        job = syncline.init()
        if job.name == "worker-1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """)
    result = commands.run("run", "-w", "2", "--max-restarts", "1", script)
    assert result.code == 137, result.output
    assert "starts again in 0.25 s (1 of 1)" in result.output
    verdict = "the job has failed: worker-1 was killed by SIGKILL, for the 2nd time without a push"
    assert verdict in result.output
    commands.check_nothing_left()


@pytest.mark.proof
def test_a_typo_is_not_tried_again(commands: Any) -> None:
    result = commands.run("run", "-w", "2", commands.script("import syncline\nsyncline.init()\nnothere()\n"))
    assert result.code == 1
    assert 1 <= result.output.count("NameError: name 'nothere' is not defined") <= 3, result.output
    assert re.search(r"the job has failed: worker-[01] ended with exit code 1", result.output)


def command(*words: str) -> str:
    """What a command prints, in this process: a new one is spared."""
    done = CliRunner().invoke(app, words)
    return done.output + (str(done.exception) if done.exception is not None else "")


@pytest.mark.proof
def test_more_fewer_and_what_is_said_meanwhile(commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job: it grows, is looked at, shrinks, and single members are asked to leave."""
    monkeypatch.chdir(commands.folder)
    process = commands.start(
        "run", "-w", "1:4", "-s", "2", "--replicas", "2", "--name", "alive", "--policy", "async",
        *PUSHES,
    )  # fmt: skip
    wait_for_steps(commands, process)
    refused = commands.run("run", "--name", "alive", LEDGER)
    assert refused.code == 2 and f"the job alive is running (pid {process.pid})" in refused.output
    scaled = commands.run("scale", "alive", "-w", "4", "-s", "3")
    assert scaled.code == 0 and "alive: 4 workers and 3 servers from now on" in scaled.output
    wait(lambda: {"worker-3", "server-2"} <= members(commands).keys())
    wait(lambda: members(commands)["worker-3"].step > 0)
    table = command("status", "alive")
    assert "alive: async · 2 replicas, ack replicated · term 1" in table and "worker-3" in table
    assert "waits" in command("why", "alive").splitlines()[0]  # what holds the job up beside stands below
    assert "5 workers: the job was started with -w" in command("scale", "alive", "-w", "5")
    assert "alive: 2 workers from now on" in command("scale", "alive", "-w", "2")
    wait(lambda: sum(name.startswith("worker-") for name in members(commands)) == 2)
    for victim in ("server-0", next(name for name in members(commands) if name.startswith("worker-"))):
        os.kill(commands.members()[victim], signal.SIGTERM)
        wait(lambda victim=victim: victim not in members(commands) and victim not in commands.members())
    enough(commands)
    result = commands.finish(process)
    assert result.code == 0, result.output
    assert EXACT.search(result.output), result.output
    assert "starts again" not in result.output
    commands.check_nothing_left()


@pytest.mark.proof
def test_chaos_prints_its_figures(commands: Any) -> None:
    result = commands.run(
        "chaos", "--every", "1s", "--for", "2.8s", "--seed", "3", "--", *FOUR[1:], "--policy", "async",
        LEDGER, "--seconds", "7", "--think", "0.005",
    )  # fmt: skip
    assert result.code == 0, result.output
    assert EXACT.search(result.output), result.output
    figures = result.output[result.output.index("chaos: ") :]
    assert "2 kills" in figures and "acknowledged updates revoked   0" in figures
    assert re.search(r"unique applied steps/s  [\d,.]+\n", figures)
    commands.check_nothing_left()


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "bounded:2", "async"])
@pytest.mark.parametrize("by", ["KILL", "STOP"])
def test_half_a_minute_of_chaos(commands: Any, policy: str, by: str) -> None:
    result = commands.run(
        "chaos", "--every", "3s", "--for", "25s", "--signal", by, "--stop-for", "6s", "--",
        "-w", "4", "-s", "2", "--replicas", "2", "--policy", policy, LEDGER, "--seconds", "30",
    )  # fmt: skip
    print(result.output[result.output.rindex("chaos: ") :])
    assert result.code == 0 and EXACT.search(result.output), result.output


@pytest.mark.proof
def test_one_replica_says_what_was_lost(commands: Any) -> None:
    """The job goes on from a worker's copy; what an acknowledgement was worth is said, not kept silent."""
    process = commands.start(
        "run", "-w", "2", "-s", "2", "--name", "alive", "--policy", "async",
        *PUSHES, "--may-lose",
    )  # fmt: skip
    before = wait_for_steps(commands, process)["server-0"].incarnation
    os.kill(commands.members()["server-0"], signal.SIGKILL)
    wait(lambda: (found := members(commands).get("server-0")) and found.incarnation > before)
    enough(commands)
    result = commands.finish(process)
    assert result.code == 0, result.output
    assert "if a server dies, its newest updates and optimizer state are lost" in result.output
    assert "revoke" in result.output and " 0 doubled" in result.output
