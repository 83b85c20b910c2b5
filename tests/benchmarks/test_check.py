"""`make bench-check`: a planted slowdown fails, noise does not; two versions play against each other."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import check, verdict
from benchmarks.row import Effort, NotMeasured, Samples
from benchmarks.sides import ROOT
from syncline.errors import ConfigError

OLD = [1.0 + 0.02 * (k % 5) for k in range(15)]
HERE = check.Version("here", ROOT / "src")
ROWS = {row.name: row for row in check.all_rows()}


def scaled(factor: float, old: list[float] = OLD) -> list[float]:
    """The new version's figures, with a little noise of their own."""
    return [factor * value * (1.0 + 0.01 * (k % 3)) for k, value in enumerate(old)]


# -- quartiles and verdict ----------------------------------------------------------------------------------


def test_quartiles_interpolate_between_values():
    assert verdict.quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == verdict.Quartiles(2.0, 3.0, 4.0)
    assert verdict.quartiles([1.0, 2.0]) == verdict.Quartiles(1.25, 1.5, 1.75)
    with pytest.raises(ConfigError, match="two values at least, not 1"):
        verdict.quartiles([1.0])


@pytest.mark.parametrize(("factor", "is_slower"), [(0.8, False), (1.0, False), (1.08, False), (1.2, True)])
def test_a_planted_slowdown_fails(factor: float, is_slower: bool):
    assert verdict.compare("r", "seconds", scaled(factor), OLD).is_slower is is_slower


def test_a_machine_that_is_slow_for_a_while_is_no_slowdown():
    """Ten of fifteen pairs lie in that while: both figures of a pair grow, their ratio does not."""
    busy = [value * (5.0 if k < 10 else 1.0) for k, value in enumerate(OLD)]
    assert not verdict.compare("r", "seconds", scaled(1.0, busy), busy).is_slower


def test_a_few_bad_turns_are_no_slowdown_and_a_few_good_ones_hide_none():
    spikes = [value * (4.0 if k < 4 else 1.0) for k, value in enumerate(scaled(1.0))]
    assert not verdict.compare("r", "seconds", spikes, OLD).is_slower
    lucky = [value * (0.5 if k < 3 else 1.0) for k, value in enumerate(scaled(1.3))]
    assert verdict.compare("r", "seconds", lucky, OLD).is_slower


# -- the command, with planted figures ----------------------------------------------------------------------


def invoke(monkeypatch: pytest.MonkeyPatch, factor: float, *words: str, processor: float = 1.0) -> tuple[int, str]:
    """As if the new version took `factor` of the old one's time, `processor` of its processor time, and the same
    bytes.
    """

    def measure(row: check.Row, new: check.Version, old: check.Version, effort: Effort) -> dict[str, Samples]:
        if row.needs_gpu:
            raise NotMeasured("needs a GPU")
        found = {"seconds": Samples(scaled(factor), OLD)}
        if row.on_hosts:
            return {**found, "bytes": Samples([2e6] * 15, [2e6] * 15)}
        return {**found, "processor": Samples(scaled(processor), OLD)}

    monkeypatch.setattr(check, "measure", measure)
    monkeypatch.setattr(check, "unpacked", lambda base: _Unpacked())
    monkeypatch.setattr(check.Version, "check", lambda self: None)
    result = CliRunner().invoke(check.app, list(words), env={"COLUMNS": "60"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout


class _Unpacked:
    def __enter__(self) -> check.Version:
        return check.Version("abc1234", Path("nowhere"))

    def __exit__(self, *error: object) -> None: ...


def test_the_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch):
    code, output = invoke(monkeypatch, 1.0, "abc")
    assert code == 0 and "slower" not in output.replace("slower: ", "")
    assert "not measured: needs a GPU" in output and "ring-int8 (bytes)" in output and "old (abc1234)" in output
    code, output = invoke(monkeypatch, 1.3, "abc", "--only", "sync-2")
    line = next(line for line in output.splitlines() if line.startswith(" sync-2"))
    assert code == 1 and line.split()[5:8] == ["1.30", "1.31", "1.33"] and line.split()[-1] == "slower"


def test_more_processor_time_fails_too(monkeypatch: pytest.MonkeyPatch):
    """A thread that spins makes turns no longer while cores are idle."""
    code, output = invoke(monkeypatch, 1.0, "abc", "--only", "sync-2", processor=1.3)
    line = next(line for line in output.splitlines() if line.startswith(" sync-2 (processor)"))
    assert code == 1 and line.split()[6:9] == ["1.30", "1.31", "1.33"] and line.split()[-1] == "slower"


def test_a_row_that_fails_fails(monkeypatch: pytest.MonkeyPatch):
    row = check.Result(ROWS["tcp"], error="JobFailed: ours 0 ended")
    monkeypatch.setattr(check, "check_row", lambda *given: row)
    code, output = invoke(monkeypatch, 1.0, "abc", "--only", "tcp")
    assert code == 1 and "tcp: JobFailed: ours 0 ended" in output


def test_json_has_the_quartiles(monkeypatch: pytest.MonkeyPatch):
    code, output = invoke(monkeypatch, 1.3, "abc", "--quick", "--json")
    found = json.loads(output)
    assert code == 1 and found["base"] == "abc1234" and found["limit"] == verdict.LIMIT
    assert [row["name"] for row in found["rows"]] == list(check.SMOKE)
    figures = found["rows"][0]["figures"][0]
    assert figures["is_slower"] and figures["ratio"]["lower"] == pytest.approx(1.3) and figures["num_pairs"] == 15


def test_the_rows_that_later_changes_are_held_to():
    wanted = [
        "sync-2",
        "shm-small",
        "shm-beside",
        "tcp",
        "mlp-ring",
        "ring-bf16",
        "ring-int8",
        "ring-topk",
        "allreduce-small",
        "replicas",
        "leases",
        "gpu",
        "cuda-sync-bf16",
        "cuda-async-bf16",
        "ring-nccl",
    ]
    assert set(wanted) <= set(ROWS)
    assert check.FULL.num_pairs >= 15


# -- real commits -------------------------------------------------------------------------------------------

in_git = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout"
)


@in_git
def test_a_commit_is_unpacked_and_nothing_is_left(temporary: Path):
    with check.unpacked("HEAD") as version:
        assert (version.source / "syncline" / "__init__.py").is_file()
        version.check()
    assert not list(temporary.iterdir())
    with (
        pytest.raises(ConfigError, match=r"^nothing-like-it is not a commit with src/: "),
        check.unpacked("nothing-like-it"),
    ):
        pass


def test_a_folder_with_sources_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch):
    """What the caller's PYTHONPATH has is found too, after the version that is meant."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    with check.unpacked(str(ROOT)) as version:
        assert version == check.Version(ROOT.name, ROOT / "src")
        assert version.environment["PYTHONPATH"].split(os.pathsep) == [str(ROOT / "src"), str(ROOT), "elsewhere"]
        version.check()


def test_another_syncline_than_the_one_that_is_meant_is_noticed(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    stranger = check.Version("stranger", tmp_path / "empty")
    with pytest.raises((ConfigError, subprocess.CalledProcessError)):
        stranger.check()


@in_git
@pytest.mark.proof
def test_head_against_head():
    """A tiny row from end to end: both versions are up, take turns and give figures."""
    tiny = Effort(num_pairs=5, turn_seconds=0.01)
    with check.unpacked("HEAD") as old:
        result = check.check_row(ROWS["shm-small"], HERE, old, tiny)
    assert result.error == ""
    seconds, processor = result.verdicts
    assert (seconds.unit, seconds.num_pairs) == ("seconds", 5) and seconds.new > 0 and seconds.old > 0
    assert processor.unit == "processor" and processor.num_pairs == 5


@in_git
@pytest.mark.proof
def test_a_codec_has_seconds_and_bytes_and_the_same_version_sends_as_many():
    row = dataclasses.replace(ROWS["ring-int8"], task=check.Task(kind="push_pull", num_bytes=1 << 20, is_random=True))
    with check.unpacked("HEAD") as old:
        result = check.check_row(row, HERE, old, Effort(num_pairs=5, turn_seconds=0.05))
    if result.not_measured:
        pytest.skip(result.not_measured)
    assert result.error == ""
    seconds, sent = result.verdicts
    assert (seconds.unit, sent.unit) == ("seconds", "bytes") and sent.ratio.median == pytest.approx(1.0, abs=0.1)
