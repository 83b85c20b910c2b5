"""`make proof`: each kind of script, under each policy, whole and with a worker or its chief killed."""

from __future__ import annotations

import itertools
import pathlib
import random
import signal
from typing import Any

import pytest
from tests.scripts.runner import (
    IN_ROUNDS,
    SCRIPTS,
    WAYS,
    Kill,
    Script,
    check,
    check_equal_to_plain,
    check_equal_within_tolerance,
    one_process,
    play,
)

pytestmark = pytest.mark.proof

SEED = 0
JOBS = [way for way in WAYS if way != "alone"]
#: A worker has so many steps at least, in the shortest of these jobs.
FEWEST_STEPS = 20


def drawn(script: Script, way: str, worker: str) -> tuple[Kill, float]:
    """When this worker dies, and how long each step takes: a job that is slow sees it come back."""
    chance = random.Random(f"{script.name} {way} {worker} {SEED}")
    return Kill(worker, chance.randrange(1, FEWEST_STEPS), chance.random() < 0.5), chance.choice((0.0, 0.1))


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda script: script.name)
def test_alone(script: Script, tmp_path: pathlib.Path) -> None:
    """Killed, it leaves nothing that is in the way of its next run, which has the numbers of plain torch."""
    kill = Kill("worker-0", random.Random(f"{script.name} {SEED}").randrange(1, FEWEST_STEPS))
    print(kill)
    assert play(script, "alone", tmp_path / "killed", kill=kill).code == -signal.SIGKILL
    ended = play(script, "alone", tmp_path / "whole")
    check_equal_to_plain(ended, one_process(script, tmp_path / "plain"))


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda script: script.name)
def test_without_a_fault(script: Script, way: str, tmp_path: pathlib.Path) -> None:
    if way in IN_ROUNDS and script.equal is not None:
        ended = play(script, way, tmp_path / "equal", script.equal[0])
        check_equal_within_tolerance(ended, one_process(script, tmp_path / "plain-equal", script.equal[1]))
    else:
        ended = play(script, way, tmp_path / "job")
        check(script, way, ended, one_process(script, tmp_path / "plain"))


def kills() -> list[Any]:
    """For each script and way one of the two dies: every script and every way sees both."""
    found = []
    for (i, script), (j, way) in itertools.product(enumerate(SCRIPTS.values()), enumerate(JOBS)):
        worker, said = [("worker-1", "worker"), ("worker-0", "chief")][(i + j) % 2]
        found.append(pytest.param(script, way, worker, id=f"{script.name}-{way}-{said}"))
    return found


@pytest.mark.parametrize(("script", "way", "worker"), kills())
def test_with_a_kill(script: Script, way: str, worker: str, tmp_path: pathlib.Path) -> None:
    kill, thinks = drawn(script, way, worker)
    print(f"{kill}; each step takes {thinks:g} s more")
    ended = play(script, way, tmp_path / "job", kill=kill, thinks=thinks)
    check(script, way, ended, one_process(script, tmp_path / "plain"), kill)
