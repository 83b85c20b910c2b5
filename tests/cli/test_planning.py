"""`--stages auto`: what is planned before a job starts."""

from __future__ import annotations

import pathlib

import pytest

from syncline.cli.planning import plan_launch
from syncline.errors import ConfigError
from syncline.launch.running import Script

TEXT = """
import sys, torch, syncline
from syncline.torch import DistributedOptimizer, Pipeline
job = syncline.init()
pipe = Pipeline(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))), torch.nn.functional.mse_loss)
opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
if "--wrong" not in sys.argv:
    pipe.step(torch.randn(16, 8), torch.randn(16, 8))
"""


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(TEXT)
    return Script(path="train.py")


def test_numbers_that_were_said_need_no_plan(script: Script) -> None:
    """Nothing is run: four micro-batches for each stage are the rule without a word."""
    assert plan_launch({"workers": 4}, script) == {}
    assert plan_launch({"workers": 4, "stages": 2}, script) == {}
    assert plan_launch({"workers": 4, "stages": 2, "micro_batches": 8}, script) == {}
    assert plan_launch({"workers": 4, "micro_batches": "auto"}, script) == {}


@pytest.mark.slow
def test_micro_batches_are_planned_by_the_first_batch(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    pathlib.Path("syncline.toml").write_text('stages = 2\nmicro_batches = "auto"\n')
    found = plan_launch({"workers": 4}, script)
    assert found["stages"] == 2 and 16 % found["micro_batches"] == 0
    said = capfd.readouterr().out
    assert "syncline: plans the stages: runs train.py up to its first batch" in said
    assert f"syncline: planned: pipelines of 2 stages, {found['micro_batches']} micro-batch" in said
    assert ": cut before " in said


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"stages": 0, "workers": 1}, "say how many processes there are, e.g. -w 4"),
        ({"stages": 0, "hosts": "a:4,b:3"}, "say how many processes there are"),
        ({"stages": 2, "micro_batches": "auto", "workers": 3}, "not divisible by --stages 2"),
        ({"stages": 0, "workers": 2, "schedule": "zigzag"}, "must be one of gpipe, 1f1b, interleaved"),
    ],
)
def test_what_is_wrong_is_said_before_the_script_runs(script: Script, launch: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_launch(launch, script)


@pytest.mark.slow
@pytest.mark.proof
def test_a_script_without_a_step_has_no_plan(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = Script(path="train.py", arguments=["--wrong"])
    with pytest.raises(ConfigError, match="--stages auto: there is no plan, for the reason above; or give numbers"):
        plan_launch({"workers": 2, "stages": 0}, wrong)
    assert "ended without a step of a Pipeline" in capfd.readouterr().err
