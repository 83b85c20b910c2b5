"""Runs the scripts of this folder as users do, hurts them, and says what must hold at their end."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENT_TOML
from tests.scripts import plain, probe

HERE = pathlib.Path(__file__).parent

#: How a script is started: in one process, or by `syncline run` with two workers.
WAYS: dict[str, tuple[str, ...]] = {
    "alone": (),
    "sync": ("-w", "2", "-s", "1", "--policy", "sync"),
    "async": ("-w", "2", "-s", "1", "--policy", "async"),
    "bounded:2": ("-w", "2", "-s", "1", "--policy", "bounded:2"),
    "ring": ("-w", "2", "--exchange", "ring"),
}
IN_ROUNDS = ("sync", "ring")


@dataclasses.dataclass(frozen=True)
class Script:
    """One kind of script, and what is promised of it."""

    name: str
    loop: str  #: "epochs": over our loader; "steps": job.steps(); "range": without positions
    better_than: float  #: what the metric must reach, however it is run
    num_steps: int = 0  #: that it asks for; with "epochs" its samples count
    batch_size: int = 0  #: of a worker
    drops_last: bool = False
    more_is_better: bool = False
    #: Arguments with which `sync` promises the numbers of one process; those of that process.
    equal: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    @property
    def path(self) -> pathlib.Path:
        return HERE / f"{self.name}.py"

    def is_good(self, metric: float) -> bool:
        return metric > self.better_than if self.more_is_better else metric < self.better_than


SCRIPTS = {
    script.name: script
    for script in (
        Script(
            "mnist",
            "epochs",
            1.6,
            batch_size=16,
            equal=(("--dropout", "0"), ("--dropout", "0", "--batch-size", "32")),
        ),
        Script("nanogpt", "steps", 2.65, num_steps=80),
        Script("resnet", "epochs", 0.5, batch_size=16, drops_last=True),
        Script("gan", "steps", 0.75, num_steps=120),
        Script("reinforce", "steps", 0.5, num_steps=60, more_is_better=True),
        Script(
            "lstm",
            "range",
            1.9,
            num_steps=80,
            equal=(("--clip", "1e9", "--lr", "1"), ("--clip", "1e9", "--lr", "1")),
        ),
        Script("recommender", "epochs", 0.7, batch_size=40, equal=((), ("--batch-size", "80"))),
        Script("stream", "epochs", 0.8, batch_size=16),
    )
}


@dataclasses.dataclass(frozen=True)
class Kill:
    """`worker` dies by SIGKILL at its `step`: behind it, or at any moment from there on."""

    worker: str
    step: int
    at_any_moment: bool = False

    def __str__(self) -> str:
        return f"{self.worker} is killed {'from' if self.at_any_moment else 'behind'} its step {self.step} on"


@dataclasses.dataclass
class Ended:
    """What a run has left."""

    code: int
    output: str
    lives: dict[str, list[dict[str, Any]]]  #: "worker-1.PID": what it noted, step by step
    is_of_a_job: bool = True  #: started by `syncline run`, which ends with a table

    @property
    def results(self) -> list[dict[str, Any]]:
        lines = [line.rpartition("RESULT ")[2] for line in self.output.splitlines() if "RESULT {" in line]
        return [json.loads(line) for line in lines]

    @property
    def result(self) -> dict[str, Any]:
        """There is one, said by one chief."""
        assert len(self.results) == 1, f"{len(self.results)} results\n{self.output}"
        return self.results[0]

    @property
    def samples(self) -> collections.Counter[float]:
        """How often each sample is in a step that was noted."""
        return collections.Counter(
            mark for noted in self.lives.values() for entry in noted for mark in entry["samples"]
        )

    def num_steps(self, worker: str) -> int:
        """Of all lives of this worker."""
        return sum(len(noted) for life, noted in self.lives.items() if life.startswith(f"{worker}."))


def play(
    script: Script,
    way: str,
    folder: pathlib.Path,
    arguments: Sequence[str] = (),
    *,
    kill: Kill | None = None,
    thinks: float = 0.0,
) -> Ended:
    """Runs it to its end in this folder."""
    notes = folder / "noted"
    notes.mkdir(parents=True)
    (folder / "syncline.toml").write_text(PATIENT_TOML)
    start = [sys.executable] if way == "alone" else [sys.executable, "-m", "syncline", "run", *WAYS[way]]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        probe.FOLDER: str(notes),
        probe.THINKS: str(thinks),
        probe.DIES: f"{kill.worker}@{kill.step}" if kill is not None and not kill.at_any_moment else "",
    }
    with _started([*start, str(script.path), *arguments], folder, environment) as process:
        if kill is not None and kill.at_any_moment:
            _kill(process, notes, kill)
        process.wait(JOB_PATIENCE)
    lives = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in notes.iterdir()}
    return Ended(process.returncode, (folder / "output").read_text(), lives, way != "alone")


@contextlib.contextmanager
def _started(
    words: Sequence[str], folder: pathlib.Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "output").open("wb") as output:
        process = forked.Popen(
            words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    except BaseException as error:
        error.add_note((folder / "output").read_text(errors="replace"))
        raise
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _kill(process: subprocess.Popen[bytes], notes: pathlib.Path, kill: Kill) -> None:
    """As soon as its first life is seen to be there: in the middle of whatever it does."""
    until = time.monotonic() + JOB_PATIENCE
    while process.poll() is None and time.monotonic() < until:
        for path in notes.glob(f"{kill.worker}.*"):
            if path.read_text().count("\n") >= kill.step:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.suffix[1:]), signal.SIGKILL)
                return
        time.sleep(0.002)


def one_process(script: Script, folder: pathlib.Path, arguments: Sequence[str] = ()) -> Ended:
    """Plain torch, in this process: what the script was before it was ported."""
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(probe.FOLDER, str(folder))
        result = plain.result_of(script.path, arguments)
    noted = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    return Ended(0, f"RESULT {json.dumps(result)}", {"worker-0.0": noted}, False)


def check_equal_to_plain(ended: Ended, plain_run: Ended) -> None:
    """Bit for bit: the parameters, the metric, the number of steps, the samples."""
    _check_end(ended)
    assert ended.result == plain_run.result
    assert ended.samples == plain_run.samples


def check_equal_within_tolerance(ended: Ended, plain_run: Ended) -> None:
    """The numbers of one process that is fed the whole batches; sums of floats come in another order."""
    _check_end(ended)
    assert ended.result["steps"] == plain_run.result["steps"]
    assert ended.samples == plain_run.samples
    assert math.isclose(ended.result["metric"], plain_run.result["metric"], rel_tol=2e-3), (
        ended.result,
        plain_run.result,
    )


def check(script: Script, way: str, ended: Ended, plain_run: Ended, kill: Kill | None = None) -> None:
    """What holds for every script under every policy, whoever has died.

    The job ends well, with one result. It trains no longer than the script asks for, and never twice. The model is
    trained.
    """
    _check_end(ended)
    assert script.is_good(ended.result["metric"]), ended.output
    if kill is not None:
        is_hurt = any(life.startswith(f"{kill.worker}.") and len(n) >= kill.step for life, n in ended.lives.items())
        assert is_hurt or way not in IN_ROUNDS, f"{kill.worker} has not come to step {kill.step}\n{ended.output}"
        if not is_hurt:
            print(f"{kill.worker} was not killed: the others were faster, and it has not come to step {kill.step}")
    if script.loop == "epochs":
        _check_samples(script, ended.samples, plain_run.samples, kill)
    else:
        _check_steps(script, way, ended, kill)


def _check_end(ended: Ended) -> None:
    assert ended.code == 0, f"exit code {ended.code}\n{ended.output}"
    assert "Traceback" not in ended.output, ended.output
    if not ended.is_of_a_job:
        return
    told = re.search(r"^  steps +([\d,]+)", ended.output, re.MULTILINE)  # the coordinator's count
    assert told is not None, f"the table lacks the steps\n{ended.output}"
    assert int(told[1].replace(",", "")) <= ended.result["steps"], f"trained on\n{ended.output}"


def _check_samples(
    script: Script, found: collections.Counter[float], expected: collections.Counter[float], kill: Kill | None
) -> None:
    """Each sample once in every epoch. A worker that is killed at any moment may not have noted its last step."""
    doubled, missing = found - expected, expected - found
    num_unnoted = script.batch_size if kill is not None and kill.at_any_moment else 0
    if script.drops_last and kill is not None:  # an epoch's last global batch is not whole any more
        num_unnoted += 2 * script.batch_size * 3
    assert not doubled, f"{doubled.total()} samples counted too often"
    assert missing.total() <= num_unnoted, f"{missing.total()} samples did not count"


def _check_steps(script: Script, way: str, ended: Ended, kill: Kill | None) -> None:
    """With positions the job makes as many steps as were asked for. Without, each worker does, on its own."""
    steps = ended.result["steps"]
    if script.loop == "steps" or way in IN_ROUNDS:
        assert steps == script.num_steps, ended.output
        return
    each = [ended.num_steps(f"worker-{k}") for k in range(2)]
    assert max(each) <= script.num_steps, f"steps of the workers: {each}"
    assert steps <= 2 * script.num_steps and (kill is not None or steps == 2 * script.num_steps), ended.output
