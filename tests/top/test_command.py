"""`syncline top`: what people type wrongly."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest
from typer.testing import CliRunner

from syncline.cli import top
from syncline.cli.main import app
from syncline.launch import jobfile


def told(folder: pathlib.Path, job: str) -> str:
    found = CliRunner().invoke(app, ["top", job, "--runs", str(folder)])
    assert found.exit_code != 0
    return str(found.exception)


def test_what_people_type_wrongly(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is not there, one that has ended, a folder that is none, no terminal, no textual."""
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended" / "worker-0.log").write_text("x")
    (tmp_path / "no run").mkdir()
    assert "no job other runs under" in told(tmp_path, "other")
    assert "no job no run runs under" in told(tmp_path, "no run")
    assert "the job ended has ended; its logs are in" in told(tmp_path, "ended")
    path = tmp_path / "job.json"
    jobfile.write(path, jobfile.new("127.0.0.1", 1, {"runs": str(tmp_path), "name": "one"}))
    assert "the view needs a terminal" in told(tmp_path, str(path))
    real: Any = importlib.util.find_spec
    monkeypatch.setattr(top.importlib.util, "find_spec", lambda name: None if name == "textual" else real(name))
    assert "pip install 'syncline[top]'" in told(tmp_path, str(path))
