"""kill -9 of each role at each named point of a save; then of everything; then the job is taken up again."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
from tests.launch.conftest import commands
from tests.launch.saved import EPOCHS, NUM_SAMPLES, SCRIPT, break_off, expected, once_each, result, saved
from tests.patience import JOB_PATIENCE

from syncline.faults import POINTS

__all__ = ["commands"]

VICTIM = {"coordinator": "coordinator", "server": "server-1", "worker": "worker-1"}
WORDS = ("run", "--checkpoint", "saves", "--save-every", "4steps", "-s", "2", "-w", "2")


def cases() -> list[Any]:
    found = []
    for role, points in POINTS.items():
        for point in points:
            if point.startswith(("save.", "manifest.", "snapshot_barrier.", "script.")):
                found.append(pytest.param(role, point, id=f"{role}-{point}"))  # noqa: PERF401
    return found


@pytest.mark.proof
@pytest.mark.parametrize(("role", "point"), cases())
def test_a_death_at_this_point_leaves_the_last_or_the_one_before(
    commands: Any, monkeypatch: Any, role: str, point: str
) -> None:
    """The continued run, with one server, is the unbroken one, bit by bit; the job that was hurt goes on by itself,
    too."""
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    often = 3 if point == "save.pruned" else 2
    monkeypatch.setenv("SYNCLINE_FAULT", f"{VICTIM[role]}@{point}#{often}=kill")
    process = commands.start(*WORDS, "--keep", "2", "--replicas", "2", script, "0.25")
    # It notes its own death right before it, and is waited for by that; the launcher may not have said it yet.
    break_off(commands, process, saves, count=1, after=f"runs/*/fault-{VICTIM[role]}")
    monkeypatch.delenv("SYNCLINE_FAULT")
    names = saved(saves)
    again = commands.run("run", "--checkpoint", "saves", "-s", "1", "-w", "2", script, "0.01")
    assert again.code == 0, again.output
    told = rf"resumes from \S+/{names[-1]}: step \d+, epoch \d, saved \d+ s ago by \d servers? and 2 workers"
    assert re.search(told, again.output), again.output
    assert "is skipped" not in again.output, "what was not finished is no checkpoint, and is not taken for one"
    assert once_each(result(again.output)[1]), again.output
    num_steps = int(saved(saves)[-1].rpartition("-")[2])  # the end of the job is saved too
    if role == "worker":  # others went on without it for some rounds, which had fewer samples
        assert num_steps >= NUM_SAMPLES // 8 * EPOCHS
    else:
        assert num_steps == NUM_SAMPLES // 8 * EPOCHS and result(again.output) == expected()


@pytest.mark.slow
@pytest.mark.proof
def test_with_one_replica_a_lost_server_comes_back_from_a_checkpoint_that_is_no_older(commands: Any) -> None:
    """With the momenta, which no worker has a copy of: the job ends as if nothing had been."""
    saves = """if own['steps'] == 6:
            job.save()
            open(f"asked-{job.rank}", "w").close()
            while not os.path.exists("go-on"): time.sleep(0.02)"""
    script = commands.script("import os\n" + SCRIPT.replace("time.sleep(pause)", saves))
    words = ("run", "--checkpoint", "saves", "-s", "2", "-w", "2", script, "0")
    process, deadline = commands.start(*words), time.monotonic() + JOB_PATIENCE
    first = commands.folder / "saves" / "000001-step-6" / "manifest.json"
    asked = [commands.folder / f"asked-{rank}" for rank in range(2)]  # perhaps one after the other
    while not all(path.exists() for path in (first, *asked)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(commands.members()["server-1"], signal.SIGKILL)
    (commands.folder / "go-on").touch()
    ended = commands.finish(process)
    assert ended.code == 0, ended.output
    told = r"\d slices? came back from 00000\d-step-6, which is no older, with the rule's state; 0 acknowledged"
    assert re.search(told, ended.output), ended.output
    assert result(ended.output) == expected()
