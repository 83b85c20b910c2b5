"""Jobs where torch is not installed: servers, a ring and an embedded job compute with NumPy."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from syncline.server.numbers import NUMPY_COST

#: torch cannot be imported, and is not found, in this process and all that it starts.
MISSING = 'import sys\nsys.modules["torch"] = None\n'
SCRIPT = """
    import sys
    import numpy as np
    import syncline
    job = syncline.init()
    rule = syncline.Rule(RULE, lr=0.5)
    job.kv.register({"x": np.zeros(3, np.float32), "y": np.ones((2, 2), np.float32)}, rule)
    for step in job.steps(3):
        grads = {"x": np.full(3, job.rank + 1.0, np.float32), "y": np.full((2, 2), -1.0, np.float32)}
        pulled = job.kv.push_pull(grads).wait()
    print("x", pulled["x"].round(4).tolist(), "y", pulled["y"].round(4).tolist(), sys.modules.get("torch"))
"""


@pytest.fixture
def without_torch(commands: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(MISSING)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return commands


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("-w", "2", "-s", "2"), id="servers"),
        pytest.param(("-w", "2", "--exchange", "ring"), id="ring", marks=pytest.mark.proof),
    ],
)
def test_a_job_of_two_workers(without_torch: Any, how: tuple[str, ...]) -> None:
    script = without_torch.script(SCRIPT.replace("RULE", '"Adam"'))
    result = without_torch.run("run", *how, script)
    assert result.code == 0, result.output
    # Adam's step is its rate as long as the gradient stays the same.
    assert result.output.count("x [-1.5, -1.5, -1.5] y [[2.5, 2.5], [2.5, 2.5]] None") == 2, result.output
    cost = "torch is not installed, so servers compute with NumPy: updates take 1.6 to 3.5 times as long"
    assert result.output.count(cost) == 1, result.output


def test_the_cost_is_the_measured_one() -> None:
    """The lowest and the highest factor of the guide's table."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "guides" / "numpy.md").read_text()
    found = [float(factor) for factor in re.findall(r"\| ([\d.]+)× \|$", page, re.MULTILINE)]
    assert len(found) == 9
    assert f"updates take {min(found)} to {max(found)} times as long" in NUMPY_COST


def test_an_embedded_job(without_torch: Any) -> None:
    script = without_torch.script(SCRIPT.replace("RULE", '"KerasSGD"'))
    result = without_torch.finish(without_torch.start(script, program=()))
    assert result.code == 0 and "x [-1.5, -1.5, -1.5] y [[2.5, 2.5], [2.5, 2.5]] None" in result.output, result.output
    assert result.output.count("torch is not installed, so servers compute with NumPy") == 1, result.output


@pytest.mark.parametrize(
    "how",
    [("-w", "1", "-s", "1"), pytest.param(("-w", "1", "--exchange", "ring"), marks=pytest.mark.proof)],
    ids=["servers", "ring"],
)
def test_a_rule_that_needs_torch(without_torch: Any, how: tuple[str, ...]) -> None:
    script = without_torch.script(SCRIPT.replace("RULE", '"NAdam"'))
    result = without_torch.run("run", *how, script)
    assert result.code != 0
    assert "rule NAdam needs torch on the servers: pip install 'syncline[torch]'" in result.output, result.output
    assert "without torch there are: Adagrad, Adam, AdamW, KerasAdagrad" in result.output


@pytest.mark.parametrize(
    "text",
    ["import syncline.torch", 'import syncline\nsyncline.load_state_dict("x")'],
    ids=["adapter", "weights"],
)
def test_what_needs_torch_says_so(without_torch: Any, text: str) -> None:
    script = without_torch.script(text)
    result = without_torch.finish(without_torch.start(script, program=()))
    assert result.code != 0, result.output
    assert "syncline.torch needs torch: pip install 'syncline[torch]'" in result.output, result.output


@pytest.mark.proof
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (("-w", "1", "-s", "1", "--server-device", "cuda"), "--server-device cuda: it needs torch"),
        (("-w", "2", "--exchange", "ring", "--sums", "gloo"), "--sums gloo needs torch"),
    ],
    ids=["server-device", "sums"],
)
def test_options_that_need_torch(without_torch: Any, how: tuple[str, ...], message: str) -> None:
    script = without_torch.script(SCRIPT.replace("RULE", '"SGD"'))
    result = without_torch.run("run", *how, script)
    assert result.code != 0 and message in result.output, result.output


def test_in_a_ring_a_script_without_torch_does_not_load_it(commands: Any) -> None:
    """torch is installed here, and servers of their own would use it."""
    script = commands.script(SCRIPT.replace("RULE", '"Adam"'))
    result = commands.run("run", "-w", "2", "--exchange", "ring", script, is_forked=False)
    assert result.code == 0 and result.output.count("[[2.5, 2.5], [2.5, 2.5]] None") == 2, result.output
    assert result.output.count("the script has not imported torch, so servers compute with NumPy") == 1, result.output
