"""One live job per name; others find it by its file."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from syncline import config as configuration
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.folder import find_job, found_by_others, hold, holder_of, running_jobs


def config_of(folder: pathlib.Path, name: str = "one") -> configuration.JobConfig:
    return configuration.resolve({"runs": str(folder), "name": name})


def test_a_second_job_of_that_name_is_refused_while_the_first_runs(tmp_path: pathlib.Path) -> None:
    with hold(config_of(tmp_path)) as folder:
        assert holder_of(folder) == os.getpid() and running_jobs(tmp_path) == ["one"]
        with pytest.raises(ConfigError, match=rf"the job one is running \(pid {os.getpid()}\); end it, or choose"):
            hold(config_of(tmp_path)).__enter__()
        with hold(config_of(tmp_path, "two")):
            assert running_jobs(tmp_path) == ["one", "two"]
    assert holder_of(folder) == 0 and running_jobs(tmp_path) == []
    with hold(config_of(tmp_path)):
        pass


def test_one_that_was_killed_holds_nothing(tmp_path: pathlib.Path) -> None:
    """The lock goes with the process, however it went; the file that it leaves is no lock."""
    code = f"""
import os
from syncline import config
from syncline.launch.folder import hold
with hold(config.resolve({{"runs": {str(tmp_path)!r}, "name": "one"}})):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert (tmp_path / "one/lock").exists() and running_jobs(tmp_path) == []
    with hold(config_of(tmp_path)) as folder:
        assert holder_of(folder) == os.getpid()


def test_logs_and_journal_of_an_ended_job_make_way_and_the_rest_stays(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    for name in ("worker-0.log", "journal.db", "journal.db-wal", "job.json", "model.pt"):
        (folder / name).touch()
    with hold(config_of(tmp_path), keeps=True):
        assert (folder / "journal.db").exists()
    with hold(config_of(tmp_path)):
        assert sorted(path.name for path in folder.iterdir()) == ["lock", "model.pt"]


def test_a_folder_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    (tmp_path / "one").touch()
    with pytest.raises(ConfigError, match=r"cannot be used: .*; use another: --runs DIR"):
        hold(config_of(tmp_path)).__enter__()


def test_jobs_are_found_by_name_or_by_file(tmp_path: pathlib.Path) -> None:
    file = jobfile.new("127.0.0.1", 1234, {})
    with pytest.raises(
        ConfigError, match=r"no job one runs under .*; none runs now \(--runs DIR says another folder\)"
    ):
        find_job("one", tmp_path / "nothere")
    with hold(config_of(tmp_path)) as folder, found_by_others(folder, file):
        assert (folder / "job.json").stat().st_mode & 0o777 == 0o600
        assert find_job("one", tmp_path) == find_job(str(folder / "job.json"), tmp_path) == file
        with pytest.raises(ConfigError, match=r"no job three runs under .*; running now: one"):
            find_job("three", tmp_path)
    assert not (folder / "job.json").exists()
    (folder / "worker-0.log").touch()
    with pytest.raises(
        ConfigError, match=r"the job one has ended; its logs are in .*; none runs now; ended, .*: one"
    ):
        find_job("one", tmp_path)
    jobfile.write(folder / "job.json", file)
    with pytest.raises(ConfigError, match="the job one does not run any more: its launcher was killed"):
        find_job("one", tmp_path)
