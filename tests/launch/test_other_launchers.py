"""torchrun, mpirun and srun start several processes: a script may train alone in each, or joins the job of all.

What they make of a job is tested with the real launchers, in tests/engines.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENCE, PATIENT_TOML

SCRIPT = """
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(3)}, syncline.Rule("SGD", lr=1.0))
    print("trained alone")
"""


def run(commands: Any, words: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE_")}
    return forked.run(
        words, cwd=commands.folder, capture_output=True, text=True, timeout=JOB_PATIENCE, env={**kept, **environment}
    )


def test_ranks_that_cannot_find_each_other_end_with_one_line_that_says_what_to_do(commands: Any) -> None:
    """Two hosts and no secret; the line has no traceback."""
    commands.script(SCRIPT, "job.py")
    environment = {
        "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x",
        "MASTER_ADDR": "a", "MASTER_PORT": "29500",
    }  # fmt: skip
    done = run(commands, [sys.executable, "-m", "job"], environment)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "syncline.WrongLauncher: torchrun has started ranks on several hosts (WORLD_SIZE=8 RANK=0), and hands "
        "them no secret; make one with (umask 077; openssl rand -hex 32 > token), copy it to every host with its "
        "mode, and set SYNCLINE_TOKEN_FILE to its path (mpirun -x SYNCLINE_TOKEN_FILE); for a separate training in "
        "each process, call syncline.init(embedded=True)"
    ]


def test_a_rank_whose_rank_0_never_comes_says_so(commands: Any) -> None:
    commands.script(SCRIPT)
    (commands.folder / "syncline.toml").write_text("start_seconds = 0.1")
    environment = {"PMI_SIZE": "3", "PMI_RANK": "1", "MPI_LOCALNRANKS": "3", "XDG_CACHE_HOME": str(commands.folder)}
    done = run(commands, [sys.executable, "train.py"], environment)
    assert done.returncode == 1 and "rank 1 of mpirun (PMI_SIZE=3 PMI_RANK=1) has found no job within" in done.stderr
    assert "does rank 0 run this script, and come to syncline.init()?" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


WAITS = """
    import os, time
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(3)}, syncline.Rule("SGD", lr=1.0))
    while not os.path.exists("end"):
        time.sleep(0.02)
"""


def page_of(folder: pathlib.Path, log: str) -> str:
    """The link that rank 0 prints."""
    until = time.monotonic() + PATIENCE
    while not (found := re.search(r"^syncline: the page: (\S+)$", (folder / log).read_text(), re.MULTILINE)):
        assert time.monotonic() < until, (folder / log).read_text()
        time.sleep(0.05)
    return found[1]


def test_rank_0_prints_the_link_of_the_page(commands: Any) -> None:
    """Two processes with the variables of mpirun; the page has the token of the job, and no other rank prints it."""
    script, folder = commands.script(WAITS), commands.folder
    (folder / "syncline.toml").write_text(f'exchange = "ring"\nname = "ranked"\n{PATIENT_TOML}')
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE_")}
    ranks, cache = [], {"XDG_CACHE_HOME": str(folder / "cache")}
    for rank in range(2):
        own = {"PMI_SIZE": "2", "PMI_RANK": str(rank), "MPI_LOCALNRANKS": "2", "SLURM_JOB_ID": "7"}
        with open(folder / f"{rank}.txt", "wb") as out:
            words = [sys.executable, script]
            ranks.append(forked.Popen(words, cwd=folder, stdout=out, stderr=out, env={**kept, **own, **cache}))
    try:
        link = page_of(folder, "0.txt")
        with urllib.request.urlopen(link, timeout=PATIENCE) as answer:
            assert "syncline_" in answer.headers["Set-Cookie"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(link, timeout=PATIENCE)
        token = (folder / "runs/ranked/page.token").read_text()
        asks = urllib.request.Request(
            f"{link.partition('/open')[0]}/api/v1/runs", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asks, timeout=PATIENCE) as answer:
            assert json.load(answer)["live"] == "ranked"
    finally:
        (folder / "end").touch()
        codes = [process.wait(JOB_PATIENCE) for process in ranks]
    assert codes == [0, 0], (folder / "0.txt").read_text()
    assert "the page" not in (folder / "1.txt").read_text()
    commands.check_nothing_left()


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
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert "caught mpirun has started ranks on several hosts" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["worker-env"], "no command was given"),
        (["worker-env", "python", "train.py"], "mpirun, torchrun or srun has not started this process as one of"),
        (["doctor", "--on", "pbs"], "--on pbs: must be one of mpi, torchrun"),
    ],
)
def test_what_cannot_be_is_one_line(commands: Any, words: Sequence[str], said: str) -> None:
    done = run(commands, [sys.executable, "-m", "syncline", *words], {})
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
