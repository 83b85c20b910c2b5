"""The row about starting: whole commands, from their first moment to a step that says when it was done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import first_step, starting
from benchmarks.row import Effort, Reach
from syncline.errors import JobFailed, WaitTimeout

SAYS = f"import sys, time; sys.stdout.write('{first_step.DONE}' + str(time.monotonic()) + chr(10))"


def test_both_sides_take_turns(monkeypatch: pytest.MonkeyPatch, fast: Effort):
    monkeypatch.setattr(starting, "seconds_to_first_step", lambda command, folder: 3.0)
    monkeypatch.setattr(starting, "seconds_to_run", lambda words, folder: 1.0 if words[1] == "import torch" else 0.0)
    samples = starting.start("start", reach=Reach("at most", 2)).measure(fast)
    assert list(samples.ours) == [3.0] * 5 and list(samples.reference) == [1.0] * 5


def test_the_example_runs_on_both_sides(monkeypatch: pytest.MonkeyPatch, fast: Effort):
    """The same script, with the same argument: under the launcher, and without it."""
    commands: set[tuple[str, ...]] = set()

    def seconds(command: list[str], folder: str) -> float:
        commands.add(tuple(Path(word).name for word in command))
        return 1.5 if "run" in command else 1.0

    monkeypatch.setattr(starting, "seconds_to_first_step", seconds)
    samples = starting.start_beside_plain("start-lenet", reach=Reach("at most", 2)).measure(fast)
    assert set(samples.ours) == {1.5} and set(samples.reference) == {1.0}
    plain = ("first_step.py", "examples")
    assert commands == {plain, (*starting.RUN, "-w", "2", *plain)}


def test_a_command_that_fails_is_named_with_its_last_words(tmp_path: Path):
    with pytest.raises(JobFailed, match=r"python -c .* ended with exit code 1: (?s:.*)ZeroDivisionError"):
        starting.seconds_to_run(["-c", "1/0"], str(tmp_path))


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(starting, "START_SECONDS", 0.5)
    with pytest.raises(WaitTimeout, match=r"has run for 0.5 s"):
        starting.seconds_to_run(["-c", "import time; time.sleep(60)"], str(tmp_path))


def test_what_the_script_says_is_counted_from_the_command_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Among other lines; a script that says nothing has not been there."""
    commands: list[list[str]] = []

    def run(words: list[str], folder: str) -> str:
        commands.append(words)
        return f"syncline: hello\n{first_step.DONE}107.25\nbye\n" if len(commands) == 1 else "bye\n"

    monkeypatch.setattr(starting, "_run", run)
    monkeypatch.setattr(starting.time, "monotonic", lambda: 100.0)
    assert starting.seconds_to_first_step([*starting.RUN, "train.py"], str(tmp_path)) == 7.25
    assert " ".join(commands[0]) == "-m syncline run --name start -s 1 train.py"
    with pytest.raises(JobFailed, match=r"train.py has not said .*: bye"):
        starting.seconds_to_first_step(["train.py"], str(tmp_path))


@pytest.mark.proof
@pytest.mark.parametrize("arguments", [[], [str(starting.EXAMPLES)]], ids=["tiny", "LeNet"])
def test_the_shipped_script_makes_its_first_step(arguments: list[str], tmp_path: Path):
    seconds = starting.seconds_to_first_step([*starting.RUN, first_step.__file__, *arguments], str(tmp_path))
    assert seconds > 0
    log = (tmp_path / "runs" / "start" / "worker-0.log").read_text()
    assert re.search(rf"^{first_step.DONE}[0-9.]+$", log, re.MULTILINE)
