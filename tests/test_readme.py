"""The README's code runs as it stands there."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from tests.patience import JOB_PATIENCE, PATIENT_TOML

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_opens_with_the_two_commands() -> None:
    first = README.split("```")[1]
    assert [line.split()[:2] for line in first.strip().splitlines()] == [["make", "train"], ["make", "test"]]
    assert len(BLOCKS) >= 2 and "DistributedOptimizer" in BLOCKS[0]
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 16


#: Of the others: tests/frameworks/test_pages.py.
PLAIN = [number for number, block in enumerate(BLOCKS) if "import keras" not in block]


@pytest.mark.parametrize("number", PLAIN)
def test_the_code_runs_alone(number: int, tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(BLOCKS[number])
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert done.returncode == 0, done.stderr
    expected = ("worker-0: the job has made", "[-0.1 -0.1 -0.1]")[PLAIN.index(number)]
    assert expected in done.stdout


def test_the_script_runs_with_two_workers(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(BLOCKS[0])
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    command = [sys.executable, "-m", "syncline", "run", "-w", "2", "-s", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker-0: the job has made" in done.stdout and "worker-1 | worker-1: the job has made" in done.stdout
    assert "has made 8 steps" in done.stdout


def test_the_table_of_examples_names_them_all() -> None:
    table = README.partition("## Examples")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+\.py)` \|", table, re.MULTILINE)
    there = {path.name for path in (pathlib.Path(__file__).parents[1] / "examples").glob("*.py")}
    assert sorted(named) == sorted(there)
