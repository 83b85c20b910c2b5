"""The README's Keras script runs as it stands there, alone and with two workers."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from tests.patience import JOB_PATIENCE, PATIENT_TOML

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
SCRIPTS = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import keras" in block]


@pytest.mark.parametrize(("command", "num_steps"), [((), 16), (("-m", "syncline", "run", "-w", "2"), 8)], ids=str)
def test_the_keras_script_runs(command: tuple[str, ...], num_steps: int, tmp_path: pathlib.Path) -> None:
    (script,) = SCRIPTS
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    whole = [sys.executable, *command, "script.py"]
    done = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"worker-0: the job has made {num_steps} steps" in done.stdout, done.stdout
