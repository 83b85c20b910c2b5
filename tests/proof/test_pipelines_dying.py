"""Proof of pipelines that die: a process of one is killed ten times, at random points of the job."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.launch.conftest import commands
from tests.launch.pipelines import IntegerJob, members_named, pipeline_of
from tests.patience import JOB_PATIENCE

__all__ = ["commands"]
pytestmark = pytest.mark.proof

NUM_DEATHS = 10


def _log(commands: Any) -> str:
    return (commands.folder / "runs" / "it" / "worker-0.log").read_text()


def _eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + JOB_PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("who", ["leader", "stage", "pipeline"])
def test_ten_deaths_lose_and_repeat_nothing(commands: Any, who: str) -> None:
    """The parameters at the end are those of a run without a death, bit by bit: the gradients are whole numbers."""
    job = IntegerJob(commands, pipelines=1, stages=2, num_samples=2048, num_epochs=1)
    chance = random.Random(24)
    gaps = []
    for death in range(NUM_DEATHS):
        job.wait_for_steps(len(job.steps()) + 1 + chance.randrange(8))
        time.sleep(chance.random() * 0.1)  # somewhere in a step
        leader, stage = pipeline_of(commands.folder, "worker-0")
        begun, killed = len(job.steps()), time.monotonic()
        for pid in {"leader": [leader], "stage": [stage], "pipeline": [leader, stage]}[who]:
            os.kill(pid, signal.SIGKILL)
        _eventually(lambda: _log(commands).count("--- worker-0 starts again") > death)  # noqa: B023
        job.wait_for_steps(begun + 2)  # one may have been on its way into the log
        _eventually(lambda: job.steps()[-1] > killed + 0.2)  # noqa: B023
        gaps.append(next(at for at in job.steps() if at > killed + 0.2) - killed)
    job.check()
    median, longest = statistics.median(gaps), max(gaps)
    print(f"{NUM_DEATHS} deaths of the {who}: without a step {median:.1f} s (median), {longest:.1f} s (longest)")


def test_a_pipeline_goes_on_while_another_one_is_dead(commands: Any) -> None:
    """A stage of the second one is stopped, then killed. The first one makes steps in between."""
    job = IntegerJob(commands, 2, 2, 2048, 1)
    job.wait_for_steps(3)
    _eventually(lambda: len(job.steps("worker-1")) >= 3)
    _, stage = pipeline_of(commands.folder, "worker-1")
    os.kill(stage, signal.SIGSTOP)
    job.wait_for_steps(len(job.steps()) + 20)
    with contextlib.suppress(ProcessLookupError):  # a slow machine: its leader has lost patience
        os.kill(stage, signal.SIGKILL)
    log = commands.folder / "runs" / "it" / "worker-1.log"
    _eventually(lambda: "--- worker-1 starts again" in log.read_text())
    assert "starts again" not in _log(commands)
    job.check()


def test_a_spare_pipeline_goes_on_while_the_first_one_is_dead(commands: Any) -> None:
    """`syncline scale` counts processes and starts a second pipeline. Then a stage of the first one is stopped, so it
    stands still, and killed. Later the spare leaves again. Every sample has counted once.
    """
    job = IntegerJob(commands, 1, 2, 4096, 1, "--policy", "async")
    job.wait_for_steps(3)
    refused = commands.run("scale", "it", "-w", "3")
    assert refused.code != 0 and "not divisible by --stages 2" in refused.output, refused.output
    scaled = commands.run("scale", "it", "-w", "4")
    assert scaled.code == 0, scaled.output
    _eventually(lambda: len(job.steps("worker-1")) >= 3)
    assert len(pipeline_of(commands.folder, "worker-1")) == 2
    _, stage = pipeline_of(commands.folder, "worker-0")
    os.kill(stage, signal.SIGSTOP)
    made = len(job.steps("worker-1"))
    _eventually(lambda: len(job.steps("worker-1")) >= made + 20)
    with contextlib.suppress(ProcessLookupError):
        os.kill(stage, signal.SIGKILL)
    _eventually(lambda: "--- worker-0 starts again" in _log(commands))
    scaled = commands.run("scale", "it", "-w", "2")
    assert scaled.code == 0, scaled.output
    job.check()


@pytest.mark.parametrize("who", ["server-0", "coordinator"])
def test_a_member_that_pipelines_need_dies(commands: Any, who: str) -> None:
    """Pipelines wait, or take the other copy, and every sample counts once."""
    job = IntegerJob(commands, 1, 2, 1024, 1, "-s", "2", "--replicas", "2")
    job.wait_for_steps(3)
    (pid,) = members_named(commands.folder, who)
    os.kill(pid, signal.SIGKILL)
    job.wait_for_steps(len(job.steps()) + 5)
    job.check()
    assert "starts again" not in _log(commands)
