"""What a task of srun reads from its environment, and the batch script. Pure."""

from __future__ import annotations

import os
import pathlib
import subprocess
import threading
from typing import Any

import msgspec
import pytest
from tests.patience import PATIENCE

from syncline.cli.main import main
from syncline.cli.run import AS_STEP
from syncline.cli.slurm import loading
from syncline.config import resolve
from syncline.engines.slurm import (
    SlurmStep,
    address,
    expand,
    expand_counts,
    follow,
    leading,
    placed,
    step_of,
    warn_of_gpus,
)
from syncline.engines.slurm_submit import (
    Following,
    Wanted,
    ask,
    batch_script,
    leave_no_empty_job,
    limit_seconds,
    note_start,
)
from syncline.errors import ConfigError
from syncline.launch.forkserver import ForkServer
from syncline.launch.running import Script


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07],gpu01", ["n1", "n2", "n3", "n07", "gpu01"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[1-2]-n[1-2]", ["rack1-n1", "rack1-n2", "rack2-n1", "rack2-n2"]),
        ("a[1]b.example", ["a1b.example"]),
        ("", []),
        ("n[x]", []),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


def test_a_list_of_hosts_without_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 65536 names"):
        expand("n[1-99999999]")


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("", []), ("1(x99999999)", [])])
def test_lists_of_numbers(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


ENVIRONMENT = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURMD_NODENAME": "n2",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def step(**more: Any) -> SlurmStep:
    found = step_of({**ENVIRONMENT, **more})
    assert found is not None
    return found


def test_a_task_knows_its_step() -> None:
    found = step()
    assert (found.task, found.num_tasks, found.hosts, found.host) == (2, 4, {"n1": 2, "n2": 2}, "n2")
    assert found.title == "Slurm job 7"
    assert step_of({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script


@pytest.mark.parametrize(
    ("launch", "workers", "hosts"),
    [
        ({}, 4, "n1:2,n2:2"),
        ({"workers": 3}, 3, "n1:2,n2:1"),
        ({"workers": 1}, 1, "n1:1"),
        ({"workers": 0, "least_workers": 2, "most_workers": 3}, 0, "n1:2,n2:1"),
        ({"workers": 0, "least_workers": 6, "most_workers": 9}, 0, "n1:3,n2:3"),
        ({"stages": 2}, 8, "n1:4,n2:4"),
        ({"stages": 2, "workers": 6}, 6, "n1:4,n2:2"),
    ],
)
def test_workers_are_placed_on_the_nodes_of_the_step(launch: dict[str, Any], workers: int, hosts: str) -> None:
    given = placed({**launch, "bind": "127.0.0.1"}, step())
    assert (given["workers"], given["hosts"], given["bind"]) == (workers, hosts, "127.0.0.1")


def test_hosts_and_a_step_cannot_be_combined() -> None:
    with pytest.raises(ConfigError, match="its nodes are the hosts"):
        placed({"hosts": "a:2"}, step())


def test_a_step_on_one_node_stays_on_loopback() -> None:
    assert address(step(SLURM_STEP_NODELIST="n1", SLURM_STEP_TASKS_PER_NODE="4")) == "127.0.0.1"


def test_workers_of_tasks_with_gpus_of_their_own_take_the_first_one_that_they_see() -> None:
    """`--gpus-per-task=1` on a node with four: each task sees one, and calls it 0."""
    for gpus, visible, device in (
        ("2", 1, "cuda:0"),
        ("4", 2, "cuda:0"),
        ("2", 2, None),
        ("1", 1, None),
        ("", 0, None),
    ):
        of_node = step(SLURM_GPUS_ON_NODE=gpus)
        assert placed({"bind": "127.0.0.1"}, of_node, visible).get("device") == device, (gpus, visible)
        assert placed({"bind": "127.0.0.1", "device": "cpu"}, of_node, visible)["device"] == "cpu"


def test_too_few_gpus_for_the_tasks_of_a_node_are_named() -> None:
    assert "n2 has 2 tasks, and each sees 1 GPU" in warn_of_gpus(step(SLURM_GPUS_ON_NODE="1"), 1)
    assert warn_of_gpus(step(), 0) == warn_of_gpus(step(), 2) == warn_of_gpus(step(SLURM_GPUS_ON_NODE="2"), 1) == ""


def test_an_empty_job_is_requeued_by_one_of_its_tasks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tasks lose their launcher with the first node. What Slurm is told twice it may do twice."""
    (tmp_path / "restarts").write_text("0")
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n'
        f"[ $1 = requeue ] && echo 1 > {tmp_path}/restarts\n"
        f'echo "JobState=RUNNING Requeue=1 Restarts=$(cat {tmp_path}/restarts) BatchFlag=1"\n'
    )
    (tmp_path / "scontrol").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, seconds in (("SILENT_SECONDS", 0.1), ("LOOK_SECONDS", 0.04), ("TURN_SECONDS", 0.5)):
        monkeypatch.setattr(f"syncline.engines.slurm_submit.{name}", seconds)
    (tmp_path / "alive.7").touch()
    said: list[str] = []
    tasks = [
        threading.Thread(
            target=leave_no_empty_job, args=(tmp_path, "7", said.append), kwargs={"turn": turn, "restart": "0"}
        )
        for turn in (1, 2, 3)
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(PATIENCE)
    asked = (tmp_path / "asked").read_text().split("\n")
    assert asked.count("requeue 7") == len(said) == 1, (asked, said)
    assert asked.count("--oneliner show job 7") == 3


def script_of(wanted: Wanted, *, saves: bool = False) -> str:
    return batch_script(wanted, "lenet", pathlib.Path("/runs/a b"), ["syncline", "run", "a b.py"], saves=saves)


def test_a_batch_script_asks_for_what_was_wanted(tmp_path: pathlib.Path) -> None:
    plain = script_of(Wanted())
    assert "--exclusive" in plain and "--no-requeue" in plain and "--signal" not in plain and "scontrol" not in plain
    full = script_of(
        Wanted(
            hosts=4, gpus_per_host=8, cpus_per_host=32, time="2:00:00", partition="big", requeue=True,
            options="--account=x --mem=64G",
        ),
        saves=True,
    )  # fmt: skip
    words = (
        "--nodes=4 --gpus-per-node=8 --cpus-per-task=32 --time=2:00:00 --partition=big --requeue --signal=TERM@120"
    )
    for word in (*words.split(), "--account=x", "--mem=64G", "'--output=/runs/a b/slurm-%j.out'"):
        assert f"#SBATCH {word}\n" in full, word
    assert "--exclusive" not in full and "scontrol requeue" in full
    for text in (plain, full):
        path = tmp_path / "job.sh"
        path.write_text(text)
        assert subprocess.run(["sh", "-n", path]).returncode == 0


def run_batch(folder: pathlib.Path, code: int, scontrol: str, verdict: str = "") -> subprocess.CompletedProcess[str]:
    """The batch script, with a srun, a scontrol and a sleep of our own in its path; task 0 leaves this verdict."""
    runs = folder / "runs"
    runs.mkdir()
    leaves = f"printf %s '{verdict}' > {runs}/exit-code.7; " if verdict else ""
    for name, text in (("srun", f"{leaves}exit {code}"), ("scontrol", scontrol), ("sleep", "exec /bin/sleep 0.1")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)
    script = batch_script(Wanted(requeue=True), "lenet", runs, ["syncline", "run", "a b.py"], saves=True)
    (folder / "job.sh").write_text(script)
    return subprocess.run(
        ["sh", folder / "job.sh"], env={"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "verdict", "state", "is_requeued"),
    [
        (0, "0", "RUNNING", False),
        (1, "1", "RUNNING", False),
        (1, "", "RUNNING", False),  # refused: the launcher has not begun
        (143, "143", "RUNNING", True),
        (143, "143", "COMPLETING", False),  # cancelled
        (137, "", "RUNNING", True),  # the launcher was killed, on a node that lives
        (137, "", "COMPLETING", False),
        (137, "0", "RUNNING", False),  # a task of a lost host
        (137, "1", "RUNNING", False),
        (0, "143", "RUNNING", True),
    ],
)
def test_a_batch_script_requeues_what_was_told_to_end_and_what_has_lost_its_launcher(
    tmp_path: pathlib.Path, code: int, verdict: str, state: str, is_requeued: bool
) -> None:
    done = run_batch(tmp_path, code, f'echo "JobState={state}"; echo "asked: $*" >&2', verdict)
    assert done.returncode == int(verdict or code) and ("asked: requeue 7" in done.stderr) is is_requeued
    assert ("it is requeued and goes on from its checkpoint" in done.stdout) is is_requeued


def test_a_batch_script_waits_for_a_controller_that_restarts(tmp_path: pathlib.Path) -> None:
    """It does not answer twice, neither when it is asked for the state nor when it is told to requeue."""
    scontrol = (
        f'echo "$1" >> {tmp_path}/asked; [ $(grep -c -e "$1" {tmp_path}/asked) -gt 2 ] || exit 1\n'
        'echo JobState=RUNNING; echo "asked: $*" >&2'
    )
    done = run_batch(tmp_path, 143, scontrol)
    assert "asked: requeue 7" in done.stderr, done


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0),
        ("0", 0),
        ("3", 180),
        ("3:30", 210),
        ("0:04:59", 299),
        ("2:00:00", 7200),
        ("1-0", 86_400),
        ("1-2:30", 95_400),
        ("0-0:04:00", 240),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize("time", ["1", "4", "4:59", "0:03:00", "0-0:04"])
def test_a_time_limit_that_leaves_no_time_for_steps_is_refused(time: str) -> None:
    """SIGTERM would come at the start, and with --requeue the job would save and be requeued without end."""
    Wanted(time=time).check()
    with pytest.raises(ConfigError, match=f"--time {time} with --checkpoint: .*; give it --time 5 or more"):
        Wanted(time=time).check(saves=True)
    Wanted(time="5").check(saves=True)


def test_a_job_that_is_requeued_without_a_step_of_progress_ends(tmp_path: pathlib.Path) -> None:
    for restart, step in enumerate([0, 0, 0, 7, 7, 7]):  # a step that was saved counts
        note_start(tmp_path, "7", restart, step)
    asked = r"job 7 was requeued 3 times in a row without a new step in its checkpoint \(step 7\)"
    with pytest.raises(ConfigError, match=asked):
        note_start(tmp_path, "7", 6, 7)
    note_start(tmp_path, "7", 0, 7)  # another job with this number, or the same command again
    note_start(tmp_path, "8", 3, 7)  # nothing is known of its starts before


class Controller:
    """A scontrol that answers by a list of shell lines, one after the other; the last one again and again."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
        for number, line in enumerate(lines):
            (folder / f"line-{number}").write_text(f"echo > {folder}/seen-{number}\n{line}\n")
        path = folder / "scontrol"
        each = "\n".join(f"[ -e {folder}/seen-{n} ] || exec sh {folder}/line-{n}" for n in range(len(lines) - 1))
        path.write_text(f"#!/bin/sh\n{each}\nexec sh {folder}/line-{len(lines) - 1}\n")
        path.chmod(0o700)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr("syncline.engines.slurm_submit.LOOK_SECONDS", 0.01)
        self.said: list[str] = []
        self.output = folder / "slurm-7.out"

    def follow(self, restart_seconds: float = PATIENCE) -> int:
        return Following("7", self.output, self.said.append, restart_seconds).run(0.0)


RESTARTS = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
RUNS, ENDED = "echo JobState=RUNNING Reason=None", "echo JobState=COMPLETED Reason=None ExitCode=0:0"


def test_a_controller_that_restarts_does_not_end_the_follower(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(tmp_path, monkeypatch, RUNS, RESTARTS, RESTARTS, RUNS, ENDED)
    assert controller.follow() == 0


def test_a_controller_that_stays_away_is_named_and_how_to_follow_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(tmp_path, monkeypatch, RUNS, RESTARTS)
    with pytest.raises(ConfigError) as caught:
        controller.follow(0.2)
    told = str(caught.value)
    assert "Unable to contact slurm controller" in told and "tail -F" in told and "squeue -j 7" in told, told


def test_a_job_that_slurm_has_forgotten_has_its_own_exit_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    controller = Controller(tmp_path, monkeypatch, RUNS, forgotten)
    (tmp_path / "exit-code.7").write_text("3")
    assert controller.follow() == 3
    (tmp_path / "exit-code.7").unlink()
    with pytest.raises(ConfigError, match=r"does not know job 7 any more; its output is in .*slurm-7.out"):
        controller.follow()


def test_a_host_without_slurm_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("sys.argv", ["syncline", "run", "--on", "slurm", "train.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "sbatch, squeue, scontrol, scancel not found" in told, told
    assert "login node" in told and not (tmp_path / "runs").exists()


def test_a_command_of_slurm_that_is_gone_is_named() -> None:
    with pytest.raises(ConfigError, match="Slurm's command no-such-scontrol cannot be started here: No such file"):
        ask(["no-such-scontrol"])


def test_what_killed_launchers_have_left_goes_at_the_next_start(tmp_path: pathlib.Path) -> None:
    """Of this job only, and of earlier starts only: another step of it may run at the same time."""
    now = step(SLURM_RESTART_COUNT="2")
    config = resolve({"runs": str(tmp_path), "bind": "127.0.0.1", "start_seconds": PATIENCE})
    for name in ("7.0.0", "7.3.1", "7.3.2", "8.0.0"):
        (tmp_path / f".slurm-{name}").mkdir(mode=0o700)
        (tmp_path / f".slurm-{name}" / "agents.json").touch()
    alone = msgspec.structs.replace(now, task=0, host="n1", hosts={"n1": 1})
    with leading(alone, config, lambda text: None):
        assert (tmp_path / ".slurm-7.0.2" / "agents.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".slurm-7.3.2", ".slurm-8.0.0"]


@pytest.mark.parametrize(
    ("text", "preload", "begins"),
    [
        ("import torch\n", True, True),
        ("import numpy\n", True, False),
        ("import torch\n", False, False),
    ],
)
def test_torch_is_loaded_while_tasks_find_each_other(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str, preload: bool, begins: bool
) -> None:
    """The process that members are forked from begins in each task; it ends with the task, whatever happens."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(text)
    seen: list[str] = []
    monkeypatch.setattr(ForkServer, "start", lambda self: seen.append("started"))
    monkeypatch.setattr(ForkServer, "close", lambda self: seen.append("closed"))
    config = resolve({"preload": preload, "start_seconds": 0.2, "runs": str(tmp_path / "runs")})
    script = Script(path=str(tmp_path / "train.py"))
    with (
        pytest.raises(ConfigError, match="which task 0 writes"),
        loading(config, script, seen.append) as fork_server,
    ):
        follow(step(), config, lambda: None, fork_server=fork_server)
    assert (fork_server is not None) is preload
    assert seen == ["started"] * begins + ["closed"] * preload


def test_a_task_of_a_batch_job_without_a_step_submits_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs the words of the command that has submitted it: each job would submit another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(AS_STEP, "1")
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    for name, text in (("sbatch", f"touch {tmp_path}/submitted; echo 8"), ("scontrol", ENDED)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    for name in ("squeue", "scancel"):
        (tmp_path / name).symlink_to("scontrol")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "train.py").touch()
    for on in (["--on", "slurm"], []):
        monkeypatch.setattr("sys.argv", ["syncline", "run", "--name", "again", *on, "train.py"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2 and "nothing is started or submitted" in capsys.readouterr().err
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(hosts=0), "--nodes must be 1 or more"),
        (Wanted(time="soon"), "--time 'soon': give minutes"),
        (Wanted(options="--a 'b"), "--engine-options"),
    ],
)
def test_bad_wishes(wanted: Wanted, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wanted.check()
