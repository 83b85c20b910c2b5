"""`syncline plan-stages`: the plan as a table and as JSON, and errors that say what helps."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from tests import forked

from syncline.core.pipelining.planning import Plan

SCRIPT = """
import sys, torch, syncline
from syncline.torch import DistributedOptimizer, Pipeline
print("the script speaks", sys.argv[1:])
job = syncline.init()
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
pipe = Pipeline(model, torch.nn.functional.mse_loss)
opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
if "--nothing" not in sys.argv:
    pipe.step(torch.randn(16, 8), torch.randn(16, 8))
    print("it trains")
"""


def plan_stages(folder: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    options = tuple(str(script) if option == "SCRIPT" else option for option in options)
    return forked.run(
        [sys.executable, "-m", "syncline", "plan-stages", *options],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plan_is_a_table_with_its_reason(tmp_path: pathlib.Path) -> None:
    done = plan_stages(tmp_path, "--stages", "2", "--micro-batches", "4", "SCRIPT", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert "the script speaks ['--epochs', '3']" in done.stderr and "speaks" not in done.stdout
    assert "worker-0" in done.stdout and "worker-1" in done.stdout
    assert "1 pipeline of 2 workers, 1f1b: a batch of 16 in 4 micro-batches; predicted:" in done.stdout
    assert "why: cut before " in done.stdout


def test_the_plan_as_json_is_all_of_standard_output(tmp_path: pathlib.Path) -> None:
    done = plan_stages(tmp_path, "-w", "4", "--stages", "2", "--schedule", "gpipe", "--json", "SCRIPT")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plan"]["schedule"] == "gpipe" and found["plan"]["replicas"] == 2
    assert len(found["cut_before"]) == 1 and set(found["plan"]) == set(Plan.__dataclass_fields__)
    assert [layer["name"] for layer in found["costs"]["measured"][0]["layers"]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stages", "two", "SCRIPT"), "--stages two: must be a number from 1 on, or auto"),
        (("SCRIPT",), "-w: say how many processes there are"),
        (("--stages", "2", "--schedule", "dualpipe", "SCRIPT"), "must be one of gpipe, 1f1b, interleaved"),
        (("--stages", "2", "missing.py"), "there is no script missing.py"),
    ],
)
def test_bad_options_are_said_before_the_script_runs(
    tmp_path: pathlib.Path, options: tuple[str, ...], words: str
) -> None:
    done = plan_stages(tmp_path, *options)
    assert done.returncode == 2 and words in done.stderr and "speaks" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stages", "5", "SCRIPT"), "the model has 4 layers that can be cut apart, and 5 stages"),
        (("--stages", "2", "-w", "3", "SCRIPT"), "-w 3 cannot be divided by --stages 2"),
        (("--stages", "2", "--micro-batches", "32", "SCRIPT"), "a batch of 16 cannot be split into 32 micro-batches"),
        (("--stages", "2", "--memory", "1KiB", "SCRIPT"), "alone needs"),
        (("--stages", "2", "SCRIPT", "--nothing"), "ended without a step of a Pipeline"),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path: pathlib.Path, options: tuple[str, ...], words: str) -> None:
    done = plan_stages(tmp_path, *options)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
