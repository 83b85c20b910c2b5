"""torchrun, mpirun and srun start several processes: `init()` must not make a separate training of each."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from tests.patience import JOB_PATIENCE

from syncline import config

SCRIPT = """
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(3)}, syncline.Rule("SGD", lr=1.0))
    print("trained alone")
"""
REMEDY = "start the script with `syncline run -w 3 train.py --epochs 2`; if you want a separate training in each"


def run(
    commands: Any, words: Sequence[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=commands.folder,
        capture_output=True,
        text=True,
        timeout=JOB_PATIENCE,
        env={**os.environ, **(environment or {})},
    )


def said(output: str) -> list[str]:
    return [line for line in output.splitlines() if "WrongLauncher" in line]


def test_under_torchrun_every_process_ends_with_the_command_to_use(commands: Any) -> None:
    script = commands.script(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", script, "--epochs", "2"]
    done = run(commands, torchrun)
    assert done.returncode != 0 and "trained alone" not in done.stdout
    # torchrun ends the others when the first one fails: some may not come to say it.
    assert 1 <= len(said(done.stderr)) <= 3, done.stderr
    for line in said(done.stderr):
        assert re.search(r"torchrun started this process as one of 3 \(WORLD_SIZE=3 RANK=[012]\), and each ", line)
        assert REMEDY in line
    assert "syncline/launch/start.py" not in done.stderr


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_under_mpirun_every_process_ends_with_the_command_to_use(commands: Any) -> None:
    script = commands.script(SCRIPT)
    words = ["mpirun", "-n", "3", sys.executable, script, "--epochs", "2"]
    done = run(commands, words, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "trained alone" not in output
    assert said(output), output
    assert all("mpirun started this process as one of 3 (" in line and REMEDY in line for line in said(output))


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "1"}, "a launcher like torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun"),
        ({"PMI_SIZE": "3", "PMI_RANK": "1"}, "mpirun"),
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"}, "srun"),
    ],
)
def test_the_environment_says_who_it_was(environment: dict[str, str], found: str, monkeypatch: Any) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    other = config.other_launcher()
    assert other is not None and (other.name, other.num_processes) == (found, 3)
    assert other.found == " ".join(f"{n}={v}" for n, v in list(environment.items())[:2])


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
        {"WORLD_SIZE": "3"},
        {"WORLD_SIZE": "many", "RANK": "0", "LOCAL_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        # The batch script of `sbatch -n 4`, outside of srun.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_one_process_is_not_refused(environment: dict[str, str], monkeypatch: Any) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert config.other_launcher() is None


def test_the_sentence_is_one_line_without_a_traceback(commands: Any) -> None:
    """Also for a module; and where the processes are on several hosts, -H is named."""
    commands.script(SCRIPT, "job.py")
    environment = {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    done = run(commands, [sys.executable, "-m", "job", "a b"], environment)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "syncline.WrongLauncher: a launcher like torchrun started this process as one of 8 (WORLD_SIZE=8 RANK=0), "
        "and each would train a model of its own; start the script with `syncline run -w 8 -m job 'a b'` (on several "
        "hosts with -H HOST:4,HOST:… in place of -w); if you want a separate training in each process, call "
        "syncline.init(embedded=True)"
    ]


def test_who_means_it_says_embedded(commands: Any) -> None:
    script = commands.script(SCRIPT.replace("init()", "init(embedded=True)"))
    done = run(commands, [sys.executable, script], {"PMI_SIZE": "3", "PMI_RANK": "1"})
    assert (done.returncode, done.stdout) == (0, "trained alone\n"), done.stderr


@pytest.mark.proof
def test_a_worker_of_ours_joins_whatever_the_environment_says(commands: Any) -> None:
    """`syncline run` in a step of srun, say. With embedded=True a script still joins the job that started it."""
    script = commands.script("""
        import syncline
        job = syncline.init(embedded=True)
        print(f"one of {job.world_size}", flush=True)
    """)
    words = [sys.executable, "-m", "syncline", "run", "-w", "2", script]
    done = run(commands, words, {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"})
    assert done.returncode == 0 and done.stdout.count("one of 2") == 2, done.stdout


def test_it_can_be_caught_as_what_it_is(tmp_path: pathlib.Path) -> None:
    code = "import syncline\ntry:\n syncline.init()\nexcept syncline.ConfigError as e: print('caught', e)"
    environment = {**os.environ, "PMI_SIZE": "2", "PMI_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert "caught mpirun started" in done.stdout and "`syncline run -w 2 SCRIPT.py`" in done.stdout
