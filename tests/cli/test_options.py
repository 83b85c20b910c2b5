"""A job takes the same options however it is started: whole, or its coordinator by hand."""

from __future__ import annotations

import inspect
import pathlib
import re
import sys
from typing import Any

import pytest

from syncline.cli import roles, run
from syncline.cli.main import main
from syncline.cli.options import settings_of

#: For whoever starts the other processes.
OF_THE_LAUNCHER = {
    "quiet",
    "log_format",
    "script",
    "arguments",
    "module",
    "max_restarts",
    "hosts",
    "remote",
    "env",
    "sync_code",
}
#: Of batch jobs.
OF_SLURM = {
    "on", "slurm_hosts", "gpus_per_host", "cpus_per_host", "time", "partition", "requeue", "engine_options",
    "queue_seconds", "detach",
}  # fmt: skip
#: Of jobs on Ray.
OF_RAY = {"cpus_per_worker", "gpus_per_worker"}


def test_the_coordinator_takes_what_run_takes() -> None:
    whole, by_hand = (set(inspect.signature(command).parameters) for command in (run.run, roles.coordinator))
    assert by_hand == whole - OF_THE_LAUNCHER - OF_SLURM - OF_RAY | {"job", "made"}


def test_what_the_coordinator_was_told_is_in_the_job_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members read it there."""
    written: list[dict[str, Any]] = []

    def coordinate(job: pathlib.Path, file: Any, *rest: Any, **named: Any) -> int:
        written.append(file.given)
        return 0

    words = "coordinator --job job.json -w 2:4 --bad-pushes 5 --no-check-finite --wait-seconds 30"
    (tmp_path / "syncline.toml").write_text("servers = 2\nstuck_seconds = 7.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roles, "coordinate", coordinate)
    monkeypatch.setattr(
        sys, "argv", ["syncline", *words.split(), "--stuck-seconds", "9", "--stop", "a>1", "--stop", "b>2"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    (given,) = written
    expected = {"workers": 2, "most_workers": 4, "servers": 2, "bad_pushes": 5, "check_finite": False}
    expected["stop"] = ("a>1", "b>2")
    assert {key: given[key] for key in expected} == expected
    assert (given["wait_seconds"], given["stuck_seconds"]) == (30.0, 9.0)


@pytest.mark.parametrize("command", ["run", "coordinator"])
def test_every_option_is_shown(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["syncline", command, "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {"--no-check-finite", "--bad-pushes", "--wait-seconds", "--workers"} <= shown
    assert shown <= {*run.flags(), "--job", "--made", "--epochs"}


def test_stages_are_left_to_the_scheduler_by_a_word() -> None:
    """In syncline.toml, too, it is the number 0."""
    assert settings_of({"stages": "auto"}) == {"stages": 0} and settings_of({"stages": "2"}) == {"stages": 2}
    assert settings_of({"stages": None}) == {}
