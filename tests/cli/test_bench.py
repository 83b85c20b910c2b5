"""`syncline bench`: a figure and its reference come out of one run. Nothing here looks at how fast anything is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from syncline.bench import machine, rows
from syncline.bench.match import play
from syncline.bench.row import QUICK, Effort, Outcome, Reach, Row, Samples
from syncline.bench.sides import JobSide, ProcessSide, Task
from syncline.cli import bench
from syncline.cli.main import app
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


def row_of(name: str, samples: Samples, reach: Reach = AT_MOST) -> Row:
    return Row(name=name, what=f"what {name} is", reference="something bare", reach=reach, measure=lambda _: samples)


def check_samples(samples: Samples, count: int) -> None:
    assert len(samples.ours) == len(samples.reference) == count
    assert all(seconds > 0 for seconds in (*samples.ours, *samples.reference))


# -- what others take ---------------------------------------------------------------------------------------


def looking(monkeypatch: pytest.MonkeyPatch, *looks: tuple[float, float, float] | None) -> float | None:
    """The share that comes of these (busy, all, our own) CPU seconds, one look after the other."""
    rest = iter(looks)
    monkeypatch.setattr(machine, "_look", lambda: next(rest))
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


def test_reach_in_words():
    assert [str(Reach("at most", 1.03)), str(Reach("at least", 1.2))] == ["≤ 1.03×", "≥ 1.2×"]


def test_a_median_of_four_is_refused():
    with pytest.raises(ConfigError, match="at least 5"):
        Effort(num_pairs=4)
    assert QUICK.num_pairs >= 5


# -- the command --------------------------------------------------------------------------------------------


def test_list_names_every_row_and_measures_nothing():
    result = CliRunner().invoke(app, ["bench", "--list"], env={"COLUMNS": "250"})
    assert result.exit_code == 0
    for row in rows.all_rows():
        assert f" {row.name} " in result.output and row.what in result.output and str(row.reach) in result.output


def test_names_differ():
    names = [row.name for row in rows.all_rows()]
    assert len(set(names)) == len(names)


def test_only_takes_names_and_patterns():
    every = rows.all_rows()
    assert [row.name for row in rows.choose(every, ["sync-*", "shm-small"])] == ["shm-small", "sync-2", "sync-4"]
    assert rows.choose(every, []) == every
    with pytest.raises(ConfigError, match=r"--only nothing: there are shm-large, .*mlp-ddp"):
        rows.choose(every, ["nothing"])


def test_help_has_an_example():
    assert "Example:  syncline bench --quick" in CliRunner().invoke(app, ["bench", "--help"]).output


@pytest.fixture
def two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is measured, one that fails."""

    def fail(_: Effort) -> Samples:
        raise JobFailed("worker-0 ended with exit code 3")

    good = row_of("good", Samples([3e-3] * 5, [2e-3] * 5))
    bad = Row(name="bad", what="what bad is", reference="r", reach=AT_MOST, measure=fail)
    monkeypatch.setattr(bench, "all_rows", lambda: [good, bad])


@pytest.mark.usefixtures("two_rows")
def test_table_has_the_ratio_its_spread_and_the_reach():
    result = CliRunner().invoke(app, ["bench", "--only", "good"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    line = next(line for line in result.output.splitlines() if line.startswith(" good"))
    assert line.split("  ")[-1].strip() == "reached"
    for part in ("3.00 ms", "2.00 ms", "1.50×", "1.50 to 1.50", "≤ 2×"):
        assert part in line


@pytest.mark.usefixtures("two_rows")
def test_a_row_that_fails_says_why_and_leaves_the_others_alone():
    result = CliRunner().invoke(app, ["bench"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "1.50×" in result.output
    assert "bad: JobFailed: worker-0 ended with exit code 3" in result.output


@pytest.mark.usefixtures("two_rows")
def test_json_for_machines():
    result = CliRunner().invoke(app, ["bench", "--json"])
    found = json.loads(result.stdout)
    good, bad = found["rows"]
    assert set(found["machine"]) == {"cores", "memory_available_bytes", "system", "python", "torch"}
    assert good["reach"] == {"kind": "at most", "ratio": 2.0} and good["reached"] is True
    assert good["ratio"] == pytest.approx(1.5) and good["ours_seconds"] == [3e-3] * 5
    assert good["others_share"] is None or 0 <= good["others_share"] <= 1
    assert good["lowest_ratio"] <= good["ratio"] <= good["highest_ratio"] and good["error"] == ""
    assert bad["error"].startswith("JobFailed: worker-0") and "ratio" not in bad
    assert result.exit_code == 1


@pytest.mark.parametrize(("seconds", "words"), [(0.0123, "12.30 ms"), (2e-5, "20.0 µs"), (1.5, "1500.00 ms")])
def test_durations(seconds: float, words: str):
    assert bench.duration(seconds) == words


# -- real processes -----------------------------------------------------------------------------------------


def floor(kind: str, num_bytes: int = 1 << 16, side: str = "reference") -> ProcessSide:
    return ProcessSide("floors", Task(kind=kind, num_bytes=num_bytes), side=side)


@pytest.mark.parametrize(
    ("one", "two", "num_bytes"),
    [("round trip", "shared memory", 1 << 16), ("stream", "stream", (4 << 20) + 4096), ("stream", "stream", 4096)],
)
def test_floors_take_turns(one: str, two: str, num_bytes: int, temporary: Path):
    check_samples(play(floor(one, num_bytes, "ours"), floor(two, num_bytes), FAST), 5)
    assert not list(temporary.iterdir())


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

    monkeypatch.setattr("syncline.bench.turns.SEAT_SECONDS", 0.5)
    with pytest.raises(WaitTimeout, match=r"waited 0.5 s for .*reference 0"):
        play(Absent(), Absent(), FAST)


def test_a_row_makes_do_with_five_pairs_when_its_time_is_up():
    effort = Effort(num_pairs=50, turn_seconds=0.01, row_seconds=0.0)
    check_samples(play(floor("round trip", side="ours"), floor("round trip"), effort), 5)


@pytest.mark.slow
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
    "shared memory": rows.push_pull("a", 4096, own_arrays=True, floor="shared memory", reach=AT_MOST),
    "tcp": rows.push_pull("b", 1 << 16, own_arrays=False, floor="stream", reach=AT_MOST, transport="tcp"),
    "embedded": rows.embedded("c", "mlp-tiny", "a tiny MLP", reach=AT_MOST),
    "beside DDP": rows.beside_ddp("d", "mlp-tiny", "a tiny MLP", workers=2, reach=AT_MOST),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", TINY.values(), ids=TINY)
def test_a_tiny_row_from_end_to_end(row: Row, temporary: Path):
    outcomes = bench.measure_rows([row], FAST)
    assert not outcomes[0].error
    check_samples(outcomes[0].samples, 5)
    assert bench.to_json(outcomes)["rows"][0]["ratio"] > 0
    assert not list(temporary.iterdir())
