"""What a task of srun reads from its environment, and the batch script. Pure."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import pytest

from syncline.engines.slurm import SlurmStep, address, expand, expand_counts, placed, step_of, warn_of_gpus
from syncline.engines.slurm_submit import Wanted, batch_script
from syncline.errors import ConfigError


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


def test_tasks_with_a_gpu_each_are_told_to_share() -> None:
    assert "srun --gpu-bind=none" in warn_of_gpus(step(), 1)
    assert warn_of_gpus(step(), 0) == warn_of_gpus(step(), 2) == ""


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


@pytest.mark.parametrize(
    ("code", "state", "is_requeued"),
    [(0, "RUNNING", False), (1, "RUNNING", False), (143, "RUNNING", True), (143, "COMPLETING", False)],
)
def test_a_batch_script_requeues_only_what_was_told_to_end(
    tmp_path: pathlib.Path, code: int, state: str, is_requeued: bool
) -> None:
    """With a srun and a scontrol of our own in its path."""
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "JobState={state} asked: $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "job.sh").write_text(script_of(Wanted(requeue=True), saves=True))
    done = subprocess.run(
        ["sh", tmp_path / "job.sh"], env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code and ("asked: requeue 7" in done.stdout) is is_requeued


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
