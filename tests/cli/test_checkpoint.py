"""`syncline checkpoint`: what people see of a folder of checkpoints."""

from __future__ import annotations

import pathlib

import pytest
from tests.store.made import make
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError, StoreError
from syncline.store import checkpoints
from syncline.store.folders import open_folder


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *words])
    if isinstance(result.exception, StoreError | ConfigError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_a_folder_is_listed_verified_and_pruned(tmp_path: pathlib.Path) -> None:
    folder = open_folder(tmp_path)
    made = [make(folder, n, metrics={"accuracy": n / 10}, saved_at=1.0) for n in range(1, 7)]
    checkpoints.point(folder, "best", made[0].name)
    checkpoints.point(folder, "last", made[5].name)
    checkpoints.begin(folder, 7, 70, "other")
    (tmp_path / made[3].name / "server-0.safetensors").unlink()
    lines = {line.split()[0]: line.rstrip() for line in run("ls", str(tmp_path)).splitlines()}
    assert lines[made[0].name].endswith("best") and "accuracy 0.1" in lines[made[0].name]
    assert lines[made[5].name].endswith("last") and "unfinished" in lines["000007-step-70"]
    assert "damaged" in lines[made[3].name]
    assert "5 checkpoints verified, 1 damaged" in run("verify", str(tmp_path), code=1)
    assert "1 checkpoint verified, 0 damaged" in run("verify", str(tmp_path / "best"))
    assert "embed.weight" in run("show", str(tmp_path / "best"))
    run("prune", str(tmp_path), "--keep", "2", "--unfinished")
    assert [one.name for one in checkpoints.find(folder)] == [made[i].name for i in (5, 4, 0)]


def test_what_cannot_be_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StoreError, match="holds no checkpoint"):
        run("ls", str(tmp_path))
