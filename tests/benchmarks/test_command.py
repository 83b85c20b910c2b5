"""`python -m benchmarks`: a figure and its reference come out of one run. Nothing here asserts on speed."""

from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE, PATIENT_TOML
from typer.testing import CliRunner

from benchmarks import command, figures, moving, rows, training, words
from benchmarks.command import app
from benchmarks.efficiency import efficiencies
from benchmarks.match import play
from benchmarks.row import QUICK, Effort, NotMeasured, Outcome, Reach, Row, Samples, Scale
from benchmarks.sides import JobSide, ProcessSide
from benchmarks.task import Task
from syncline.bench import machine
from syncline.config import num_cores
from syncline.errors import ConfigError, JobFailed, WaitTimeout

AT_MOST = Reach("at most", 2.0)
FAST = Effort(num_pairs=5, turn_seconds=0.01)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a row puts its files: a folder of its own, which is gone afterwards."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in a hurry, and who is silent is slow: no death."""
    for name in ("turns.JOIN_SECONDS", "turns.TURN_SECONDS", "sides.WAIT_SECONDS", "sides.STOP_SECONDS"):
        monkeypatch.setattr(f"benchmarks.{name}", PATIENCE)
    begin, settings = JobSide.__init__, tomllib.loads(PATIENT_TOML)
    monkeypatch.setattr(JobSide, "__init__", lambda *args, **given: begin(*args, **{**settings, **given}))


def row_of(name: str, samples: Samples, reach: Reach = AT_MOST, **more: Any) -> Row:
    what = f"what {name} is"
    return Row(name=name, what=what, reference="something bare", reach=reach, measure=lambda _: samples, **more)


def check_samples(samples: Samples, count: int) -> None:
    assert len(samples.ours) == len(samples.reference) == count
    assert all(seconds > 0 for seconds in (*samples.ours, *samples.reference))


# -- what others take ---------------------------------------------------------------------------------------


def looking(monkeypatch: pytest.MonkeyPatch, *looks: tuple[float, float, float] | None) -> float | None:
    """The share that comes of these (busy, all, our own) CPU seconds, one look after the other."""
    rest = iter(looks)
    monkeypatch.setattr(machine, "look", lambda: next(rest))
    return machine.Others().share()


def test_what_others_take_is_what_is_busy_and_not_ours(monkeypatch: pytest.MonkeyPatch):
    assert looking(monkeypatch, (100.0, 200.0, 5.0), (110.0, 220.0, 9.0)) == pytest.approx(0.3)
    assert looking(monkeypatch, (100.0, 200.0, 5.0), (110.0, 220.0, 16.0)) == 0.0
    assert looking(monkeypatch, None) is None
    assert looking(monkeypatch, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)) is None


def test_a_look_at_this_machine():
    share = machine.Others().share()
    assert share is None or 0 <= share <= 1


# -- ratios -------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_over_pairs():
    """A machine that is slow for a while is slow for both sides of a pair: the third pair is no worse than others."""
    outcome = Outcome(row_of("r", Samples((), ())), Samples([3.0, 4.0, 300.0, 6.0, 2.0], [2.0, 2.0, 100.0, 2.0, 2.0]))
    assert outcome.ratios == [1.5, 2.0, 3.0, 3.0, 1.0]
    assert outcome.ratio == 2.0 and outcome.is_reached


def test_at_least_compares_speeds():
    reach = Reach("at least", 1.2)
    outcome = Outcome(row_of("r", Samples((), ()), reach), Samples([0.5] * 5, [1.0] * 5))
    assert outcome.ratio == 2.0 and outcome.is_reached
    assert not Outcome(outcome.row, Samples([1.0] * 5, [1.0] * 5)).is_reached


def test_seconds_that_are_free_count_for_the_reach_and_not_for_the_ratio():
    row = row_of("r", Samples((), ()), Reach("at most", 2, plus_seconds=1.5))
    outcome = Outcome(row, Samples([3.0, 3.25, 9.0, 3.5, 3.25], [1.0] * 5))
    assert outcome.ratio == 3.25 and outcome.is_reached
    assert not Outcome(row, Samples([3.625] * 5, [1.0] * 5)).is_reached


def test_a_printed_figure_has_nothing_to_come_to():
    outcome = Outcome(row_of("r", Samples((), ()), Reach("printed")), Samples([3.0] * 5, [2.0] * 5))
    assert outcome.ratio == 1.5 and outcome.is_reached is None


def test_reach_in_words():
    reaches = [
        Reach("at most", 1.03),
        Reach("at least", 1.2),
        Reach("at most", 2, plus_seconds=1.5),
        Reach("printed"),
    ]
    assert [str(reach) for reach in reaches] == ["≤ 1.03×", "≥ 1.2×", "≤ 2× + 1.5 s", "printed"]


def scaled(num_workers: int, ours: float, reference: float, **more: Any) -> Outcome:
    """A row of a series, 32 samples per worker and step."""
    row = row_of(f"scaling-{num_workers}", Samples((), ()), scale=Scale(num_workers, 32 * num_workers))
    return Outcome(row, Samples([ours] * 5, [reference] * 5), **more)


def test_efficiency_is_samples_per_second_over_those_of_as_many_single_workers():
    found = efficiencies([scaled(1, 0.5, 1.0), scaled(4, 1.0, 8.0), scaled(8, 0.5, 1.0, error="failed")])
    assert list(found) == ["scaling-1", "scaling-4"]
    assert (found["scaling-1"].ours, found["scaling-1"].reference) == (1.0, 1.0)
    assert (found["scaling-4"].ours, found["scaling-4"].reference) == (0.5, 0.125)
    assert (found["scaling-4"].ours_per_second, found["scaling-4"].reference_per_second) == (128.0, 16.0)


def test_no_efficiency_without_the_row_of_one_worker():
    assert efficiencies([scaled(2, 0.5, 1.0), Outcome(row_of("other", Samples((), ())))]) == {}


def test_a_median_of_four_is_refused():
    with pytest.raises(ConfigError, match="at least 5"):
        Effort(num_pairs=4)
    assert QUICK.num_pairs >= 5


# -- the command --------------------------------------------------------------------------------------------


def test_list_names_every_row_and_measures_nothing():
    result = CliRunner().invoke(app, ["--list"], env={"COLUMNS": "250"})
    assert result.exit_code == 0
    for row in rows.all_rows():
        assert f" {row.name} " in result.output and row.what in result.output and str(row.reach) in result.output


def test_names_differ():
    names = [row.name for row in rows.all_rows()]
    assert len(set(names)) == len(names)


def test_only_takes_names_and_patterns():
    every = rows.all_rows()
    assert [row.name for row in rows.choose(every, ["sync-*", "shm-small"])] == [
        "shm-small",
        "sync-2",
        "sync-4",
        "sync-scaling",
    ]
    assert rows.choose(every, []) == every
    with pytest.raises(ConfigError, match=r"--only nothing: must be one of shm-large, .*mlp-ddp"):
        rows.choose(every, ["nothing"])


def test_help_has_an_example():
    assert "Example:  python -m benchmarks --quick" in CliRunner().invoke(app, ["--help"]).output


@pytest.fixture
def two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is measured, one that fails."""

    def fail(_: Effort) -> Samples:
        raise JobFailed("worker-0 ended with exit code 3")

    good = row_of("good", Samples([3e-3] * 5, [2e-3] * 5))
    bad = Row(name="bad", what="what bad is", reference="r", reach=AT_MOST, measure=fail)
    monkeypatch.setattr(command, "all_rows", lambda: [good, bad])


@pytest.mark.usefixtures("two_rows")
def test_table_has_the_ratio_its_spread_and_the_reach():
    result = CliRunner().invoke(app, ["--only", "good"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    line = next(line for line in result.output.splitlines() if line.startswith(" good"))
    assert line.split("  ")[-1].strip() == "reached"
    for part in ("3.00 ms", "2.00 ms", "1.50×", "1.50 to 1.50", "≤ 2×"):
        assert part in line


@pytest.mark.usefixtures("two_rows")
def test_a_row_that_fails_says_why_and_leaves_the_others_alone():
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "1.50×" in result.output
    assert "bad: JobFailed: worker-0 ended with exit code 3" in result.output


@pytest.fixture
def odd_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of bytes, one that is printed only, one that cannot be measured here, one that wants more cores."""

    def need(_: Effort) -> Samples:
        raise NotMeasured("needs a GPU")

    mib = float(1 << 20)
    odd = [
        row_of("bytes", Samples([210 * mib] * 5, [140 * mib] * 5), unit="bytes"),
        row_of("printed", Samples([3.0] * 5, [2e-3] * 5), Reach("printed")),
        Row(name="gpu", what="what gpu is", reference="r", reach=AT_MOST, measure=need),
        row_of("cores", Samples([1.0] * 5, [1.0] * 5), num_cores=100_000),
    ]
    monkeypatch.setattr(command, "all_rows", lambda: odd)


def line_of(name: str, output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(f" {name} "))


@pytest.mark.usefixtures("odd_rows")
@pytest.mark.parametrize("columns", ["200", "40"])
def test_rows_that_cannot_be_measured_here_say_what_they_need_and_are_no_failure(columns: str):
    """A narrow terminal cuts nothing off."""
    result = CliRunner().invoke(app, [], env={"COLUMNS": columns})
    assert result.exit_code == 0
    assert line_of("gpu", result.output).rstrip().endswith("  ≤ 2×  not measured: needs a GPU")
    assert f"not measured: needs 100000 cores, there are {num_cores()}" in line_of("cores", result.output)


@pytest.mark.usefixtures("odd_rows")
def test_a_row_that_wants_more_cores_is_measured_when_it_is_named():
    result = CliRunner().invoke(app, ["--only", "core*"], env={"COLUMNS": "200"})
    assert "1.00×" in line_of("cores", result.output) and "not measured" not in result.output


@pytest.mark.usefixtures("odd_rows")
def test_bytes_and_printed_figures_in_the_table():
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert line_of("bytes", result.output).split()[1:5] == ["210.0", "MiB", "140.0", "MiB"]
    assert line_of("printed", result.output).split()[-1] == "printed"


@pytest.mark.usefixtures("odd_rows")
def test_json_says_the_unit_and_what_is_missing():
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == 0
    counted, printed, gpu, cores = json.loads(result.stdout)["rows"]
    assert counted["unit"] == "bytes" and counted["ours_bytes"] == [210.0 * (1 << 20)] * 5
    assert "ours_seconds" not in counted and counted["reached"] is True and counted["not_measured"] == ""
    assert printed["reach"] == {"kind": "printed"} and printed["reached"] is None
    assert gpu["not_measured"] == "needs a GPU" and gpu["error"] == "" and "ratio" not in gpu
    assert cores["not_measured"].startswith("needs 100000 cores")


def test_efficiency_is_shown_and_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "num_cores", lambda: 2)
    outcomes = [scaled(1, 0.5, 1.0), scaled(4, 1.0, 8.0)]
    figures.show_outcomes(outcomes)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" scaling-4")]
    assert lines[-1].split() == ["scaling-4", "128/s", "16/s", "50%", "12%", "50%"]
    first, second = figures.to_json(outcomes)["rows"]
    assert first["efficiency"] == {"ours": 1.0, "reference": 1.0}
    assert second["efficiency"] == {"ours": 0.5, "reference": 0.125}


@pytest.mark.usefixtures("two_rows")
def test_json_for_machines():
    result = CliRunner().invoke(app, ["--json"])
    found = json.loads(result.stdout)
    good, bad = found["rows"]
    assert set(found["machine"]) == {"cores", "memory_available_bytes", "system", "python", "torch", "gpus"}
    assert good["reach"] == {"kind": "at most", "ratio": 2.0, "plus_seconds": 0.0} and good["reached"] is True
    assert good["ratio"] == pytest.approx(1.5) and good["ours_seconds"] == [3e-3] * 5
    assert good["others_share"] is None or 0 <= good["others_share"] <= 1
    assert good["lowest_ratio"] <= good["ratio"] <= good["highest_ratio"] and good["error"] == ""
    assert bad["error"].startswith("JobFailed: worker-0") and "ratio" not in bad
    assert result.exit_code == 1


@pytest.mark.parametrize(("seconds", "expected"), [(0.0123, "12.30 ms"), (2e-5, "20.0 µs"), (1.5, "1.50 s")])
def test_durations(seconds: float, expected: str):
    assert words.duration(seconds) == expected


# -- real processes -----------------------------------------------------------------------------------------


def floor(kind: str, num_bytes: int = 1 << 16, side: str = "reference") -> ProcessSide:
    return ProcessSide("floors", Task(kind=kind, num_bytes=num_bytes), side=side)


@pytest.mark.parametrize(
    ("one", "two", "num_bytes"),
    [
        ("round trip", "shared memory", 1 << 16),
        ("stream", "stream", (4 << 20) + 4096),
        pytest.param("stream", "stream", 4096, marks=pytest.mark.proof),
    ],
)
def test_floors_take_turns(one: str, two: str, num_bytes: int, temporary: Path):
    check_samples(play(floor(one, num_bytes, "ours"), floor(two, num_bytes), FAST), 5)
    assert not list(temporary.iterdir())


def test_several_pairs_of_a_floor_are_there_at_once_and_five_turns_are_enough_when_time_is_up():
    several = ProcessSide("floors", Task(kind="round trip", num_bytes=64), processes=2, side="ours")
    effort = Effort(num_pairs=50, turn_seconds=0.01, row_seconds=0.0)
    check_samples(play(several, floor("round trip"), effort), 5)


def test_a_reference_that_fails_is_named_with_its_last_words(temporary: Path):
    with pytest.raises(JobFailed, match=r"reference 0 ended with exit code 1: (?s:.*)KeyError: 'no such floor'"):
        play(floor("round trip", side="ours"), floor("no such floor"), FAST)
    assert not list(temporary.iterdir())


def test_a_process_that_never_comes_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch):
    class Absent:
        num_processes = 1

        def start(self, folder: Path, path: str) -> None: ...
        def look(self) -> None: ...
        def stop(self) -> None: ...

    monkeypatch.setattr("benchmarks.turns.JOIN_SECONDS", 0.5)
    with pytest.raises(WaitTimeout, match=r"waited 0.5 s for .*reference 0"):
        play(Absent(), Absent(), FAST)


@pytest.mark.slow
@pytest.mark.proof  # the row beside DDP starts such processes too
def test_peers_take_turns():
    ranks = ProcessSide("peers", Task(kind="all_reduce", num_bytes=4096), processes=2, side="ours")
    check_samples(play(ranks, ProcessSide("peers", Task(kind="fused_adam", num_bytes=4096)), FAST), 5)


@pytest.mark.slow
def test_a_job_that_fails_is_named_with_its_last_words(temporary: Path):
    """The worker's script raises before its first turn."""
    with pytest.raises(JobFailed, match=r"worker-0 ended with exit code 1(?s:.*)KeyError: 'no such kind'"):
        play(JobSide(Task(kind="no such kind")), floor("round trip"), FAST)
    assert not list(temporary.iterdir())


TINY = {
    "shared memory": moving.push_pull("a", 4096, own_arrays=True, floor="shared memory", reach=AT_MOST),
    "tcp": moving.push_pull("b", 1 << 16, own_arrays=False, floor="stream", reach=AT_MOST, transport="tcp"),
    "several servers": moving.sync_scaling("e", 1 << 14, large=(2, 2), small=(1, 1), reach=AT_MOST),
    "crowd": moving.crowd("f", 1 << 16, workers=2, floor="stream", transport="tcp", reach=AT_MOST, num_cores=0),
    "embedded": training.embedded("c", "mlp-tiny", "a tiny MLP", reach=AT_MOST),
    "beside DDP": training.beside_ddp("d", "mlp-tiny", "a tiny MLP", workers=2, reach=AT_MOST),
    "strangers": training.beside_strangers("g", "mlp-tiny", "a tiny MLP", workers=2, reach=AT_MOST),
    "device": training.on_device(
        "h", "gpt-tiny", "a tiny GPT", policy="async", window=1, device="cpu", reach=AT_MOST
    ),
}


#: The others are `make proof`.
IN_TEST = {"shared memory"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name, marks=[] if name in IN_TEST else [pytest.mark.proof]) for name, row in TINY.items()],
)
def test_a_tiny_row_from_end_to_end(row: Row, temporary: Path):
    outcomes = command.measure_rows([row], FAST)
    assert not outcomes[0].error
    check_samples(outcomes[0].samples, 5)
    assert figures.to_json(outcomes)["rows"][0]["ratio"] > 0
    assert not list(temporary.iterdir())
