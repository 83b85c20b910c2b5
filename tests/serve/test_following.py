"""A running job is followed: cuts are no mix of steps, and neither side needs the other.

Gradients of -1 with learning rate 1: every number of a cut is the number of its updates.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests import forked
from tests.launch.conftest import Commands
from tests.patience import PATIENCE
from tests.serve.saved import Caller
from tests.serve.test_command import control, serving

from syncline.errors import ConfigError, StoreError, SynclineError
from syncline.launch import jobfile
from syncline.serve import Server
from syncline.serve.following import FollowedJob, JobFollower

pytestmark = pytest.mark.slow
SCRIPT = """
    import pathlib
    import numpy as np, syncline
    job = syncline.init(slice_bytes=4096, wait_seconds=300)
    ones = {f"w{k}": np.full((37, 50 + k), -1.0, np.float32) for k in range(6)}
    job.kv.register({name: np.zeros_like(one) for name, one in ones.items()}, syncline.Rule("SGD", lr=1.0))
    job.kv.register({"still": np.full(5000, 3.0, np.float32)}, syncline.Rule("SGD", lr=1.0))
    step = 0
    while not pathlib.Path("stop").exists():
        job.kv.push_pull(ones).wait()
        step += 1
        if step == 3:
            pathlib.Path("begun").touch()
    pathlib.Path(f"last-{job.rank}").write_text(str(step))
"""
#: The same; it answers what it is asked.
TELLING = SCRIPT.replace(
    "        step += 1\n",
    """        step += 1
        if job.rank == 0 and pathlib.Path("question").exists():
            pathlib.Path("question").unlink()
            stats = job.stats()
            told = {"step": step, "num_cuts": stats.num_cuts, "cut_seconds_max": stats.cut_seconds_max}
            pathlib.Path("written").write_text(json.dumps(told))
            pathlib.Path("written").rename("answer")
""",
).replace("    import pathlib\n", "    import json, pathlib\n")
#: Answers with one weight of each parameter: all of them are the number of the step.
MODEL = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for k in range(6):
                self.register_parameter(f"w{k}", torch.nn.Parameter(torch.zeros(37, 50 + k)))
            self.still = torch.nn.Parameter(torch.zeros(5000))

        def forward(self, x):
            return x + torch.stack([getattr(self, f"w{k}")[-1, -1] for k in range(6)])

    example = torch.zeros(1, 6)
"""


@pytest.fixture
def commands(tmp_path: pathlib.Path) -> Iterator[Commands]:
    made = Commands(tmp_path.resolve())
    try:
        yield made
    finally:
        made.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begin(commands: Commands, *words: str, script: str = SCRIPT) -> tuple[subprocess.Popen[str], FollowedJob]:
    """A job that has made its first steps."""
    process = commands.start("run", "--name", "j", *words, commands.script(script))
    wait_for(lambda: (commands.folder / "begun").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    file = jobfile.read(commands.folder / "runs" / "j" / "job.json")
    return process, FollowedJob(job=file.job, token=file.token, host=file.host, port=file.port, name="j")


def end(commands: Commands, process: subprocess.Popen[str]) -> str:
    (commands.folder / "stop").touch()
    result = commands.finish(process)
    assert result.code == 0, result.output
    return result.output


def numbers(follower: JobFollower) -> dict[str, np.ndarray]:
    return {
        name: np.array(data).view(weight.dtype).reshape(weight.shape)
        for name, (weight, data) in follower.parameters.weights().items()
    }


def cut(follower: JobFollower) -> None:
    """The next cut; on a machine that has much to do, all tries may be too short for a while."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            follower.read_cut()
            return
        except SynclineError:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "words",
    [
        ("-w", "2", "-s", "2", "--policy", "async"),
        ("-w", "2", "-s", "2", "--policy", "async", "--replicas", "2"),
        ("-w", "2", "-s", "2", "--transport", "tcp"),
        ("-w", "2", "--exchange", "ring"),
    ],
    ids=["async", "replicas", "sync-tcp", "ring"],
)
def test_a_cut_is_no_mix_of_steps(commands: Commands, words: tuple[str, ...]) -> None:
    process, job = begin(commands, *words)
    follower = JobFollower(job, "follower")
    seen: list[int] = []
    deadline = time.monotonic() + PATIENCE
    while len(seen) < 30 or len(set(seen)) < 6:
        assert time.monotonic() < deadline, seen
        cut(follower)
        found = numbers(follower)
        assert set(found) == {*(f"w{k}" for k in range(6)), "still"}
        values = np.unique(np.concatenate([found[f"w{k}"].ravel() for k in range(6)]))
        assert values.tolist() == [follower.step], values
        assert (found["still"] == 3.0).all()
        if seen:  # what has not changed is not read again
            changed = sum(found[f"w{k}"].nbytes for k in range(6))
            assert follower.num_bytes in (0, pytest.approx(changed, rel=0.1))
        seen.append(follower.step)
    assert seen == sorted(seen)
    follower.close()
    assert "follower follows the job" in end(commands, process)


def test_a_follower_that_dies_costs_the_job_nothing(commands: Commands) -> None:
    """It has asked for a cut and reads none of it. The job goes on, and gives the next follower its cuts."""
    process, job = begin(commands, "-w", "2", "-s", "2")
    for number in range(3):
        follower = JobFollower(job, f"follower-{number}")
        cut(follower)
        step = follower.step
        follower.close()
        wait_for(lambda step=step: _step(job) > step)  # type: ignore[misc]
    end(commands, process)


@pytest.mark.proof
def test_a_serve_that_stops_or_dies_costs_the_job_nothing(commands: Commands) -> None:
    """Its cuts hold commits. While it is stopped, and once it is dead, no commit is held, and steps go on."""
    process, _ = begin(commands, "-w", "2", "-s", "2", script=TELLING)
    commands.script(MODEL, "model.py")
    with serving(commands.folder, "--follow", "j", "--refresh", "50ms") as (server, url), Caller(url) as call:

        def version() -> int:
            return int(call.post("/predict", {"input": [0.0] * 6})[1]["model_version"])

        seen = version()
        wait_for(lambda: version() > seen)
        server.send_signal(signal.SIGSTOP)
        without_holds(commands)
        before = told(commands)["num_cuts"]
        server.send_signal(signal.SIGCONT)
        wait_for(lambda: told(commands)["num_cuts"] > before + 3)
        server.kill()
        without_holds(commands)
    last = told(commands)
    print(f"held {last['num_cuts']} times, {1000 * last['cut_seconds_max']:.1f} ms at most, in {last['step']} steps")
    assert "did not read the last step" not in end(commands, process)


def without_holds(commands: Commands) -> None:
    """Waits for 200 steps in which no commit is held. A cut that was asked for before is still taken, or given up
    after ten tries.
    """
    deadline = time.monotonic() + PATIENCE
    first = told(commands)
    while (now := told(commands))["step"] < first["step"] + 200:
        assert time.monotonic() < deadline, (first, now)
        if now["num_cuts"] != first["num_cuts"]:
            first = now


def told(commands: Commands) -> dict[str, Any]:
    """What the job says of itself."""
    question, answer = commands.folder / "question", commands.folder / "answer"
    answer.unlink(missing_ok=True)
    question.touch()
    wait_for(answer.exists)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _step(job: FollowedJob) -> int:
    follower = JobFollower(job, "other")
    try:
        cut(follower)
        return follower.step
    finally:
        follower.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_follows_and_outlives_the_job(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    """Each answer is the step of the version that it names, by all of its parameters. After the end of the job the
    server goes on with its last step and says so.
    """
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    process, job = begin(commands, "-w", "2", "-s", "2")
    model = commands.folder / commands.script(MODEL, "model.py")
    settings: dict[str, Any] = {"port": 0, "refresh": 0.05, "runs": str(commands.folder / "serving")}
    with Server(f"{model}:Net", follow=job, replicas=replicas, **settings) as server, Caller(server.url) as call:
        seen: set[int] = set()
        deadline = time.monotonic() + PATIENCE
        while len(seen) < 10:
            assert time.monotonic() < deadline
            status, answer = call.post("/predict", {"input": [0.0] * 6})
            assert status == 200 and answer["output"] == [float(answer["model_version"])] * 6
            seen.add(int(answer["model_version"]))
        wait_for(lambda: server.standing()["trouble"] == "")
        end(commands, process)
        wait_for(lambda: server.standing()["trouble"] == "the job has ended")
        last = max(int((commands.folder / f"last-{k}").read_text()) for k in range(2))
        assert last >= max(seen)

        def answers_as_the_last() -> bool:
            status, answer = call.post("/predict", {"input": [0.0] * 6})
            assert status == 200 and answer["output"] == [float(answer["model_version"])] * 6
            return int(answer["model_version"]) == last

        wait_for(answers_as_the_last)


def test_the_command_follows_through_the_death_of_a_server(commands: Commands) -> None:
    """The coordinator comes back, slices move: the follower finds them again."""
    process, _ = begin(commands, "-w", "2", "-s", "2", "--replicas", "2")
    commands.script(MODEL, "model.py")
    with serving(commands.folder, "--follow", "j", "--refresh", "50ms") as (_, url), Caller(url) as call:

        def version() -> int:
            answer = call.post("/predict", {"input": [0.0] * 6})[1]
            assert answer["output"] == [float(answer["model_version"])] * 6
            return int(answer["model_version"])

        for name in ("server-1", "coordinator"):
            os.kill(commands.members()[name], signal.SIGKILL)
            step = version()
            wait_for(lambda step=step: version() > step + 3)  # type: ignore[misc]
        end(commands, process)
        deadline = time.monotonic() + PATIENCE
        while "nothing new comes" not in (told := control(commands.folder, "status")):
            assert time.monotonic() < deadline, told
        assert json.loads(control(commands.folder, "status", "--json"))["trouble"]


def test_what_cannot_be_followed_is_said(tmp_path: pathlib.Path) -> None:
    job = FollowedJob(job="ab" * 8, token="cd" * 32, host="127.0.0.1", port=1, name="gone")
    (tmp_path / "model.py").write_text("import torch\ndef Net():\n    return torch.nn.Linear(2, 2)\n")
    model = f"{tmp_path / 'model.py'}:Net"
    settings: dict[str, Any] = {"port": 0, "runs": str(tmp_path / "runs")}
    with pytest.raises(StoreError, match=r"job gone cannot be followed: .*; does it run"):
        Server(model, follow=job, **settings).start()
    with pytest.raises(ConfigError, match="--from and --follow: give one of them"):
        Server(model, tmp_path, follow=job, **settings)
    assert job.token not in repr(job)
