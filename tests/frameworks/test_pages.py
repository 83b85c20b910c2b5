"""Scripts of the README and of the guides that need a framework: they run as they stand there, alone and in a job."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENT_TOML

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = ("keras.md", "jax.md", "numpy.md", "from-tensorflow.md")
PAGES = ["README.md", *(f"docs/guides/{name}" for name in GUIDES)]


def scripts() -> Iterator[object]:
    """The whole scripts of the pages, by page and number, as far as their frameworks are installed here."""
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)):
            needs = set(re.findall(r"^(?:import|from) (keras|tensorflow|jax|optax|sklearn)\b", block, re.MULTILINE))
            is_ours = "syncline.init()" in block
            if is_ours and needs and all(map(importlib.util.find_spec, needs)):
                yield pytest.param(block, id=f"{page.rpartition('/')[2]}-{number}")


@pytest.mark.parametrize("script", list(scripts()))
@pytest.mark.parametrize("command", [(), ("-m", "syncline", "run", "-w", "2")], ids=["alone", "two workers"])
def test_a_script_runs(script: str, command: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    whole = [sys.executable, *command, "script.py"]
    done = forked.run(whole, cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    if command:
        assert "all 2 workers ended well" in done.stdout, done.stdout
    if "the job has made" in script:  # those read 512 samples twice, in batches of 64
        assert f"worker-0: the job has made {8 if command else 16} steps" in done.stdout, done.stdout
