"""`syncline bench`: the table, the advice and the JSON. Nothing here asserts on speed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from syncline.bench.rows import RowGroup, RowOutcome
from syncline.bench.script import Effort
from syncline.cli import bench
from syncline.cli.main import app
from syncline.errors import ConfigError


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[RowGroup]:
    """The groups that were asked for. `shm` is good, `tls` cannot be measured, `tcp` fails, the rest is slow."""
    seen: list[RowGroup] = []

    def measure(group: RowGroup, effort: Effort) -> list[RowOutcome]:
        seen.append(group)
        odd = {"tls": {"not_measured": "needs an address"}, "tcp": {"error": "JobFailed: worker-0 is gone"}}
        return [
            RowOutcome(row, **odd[row.name])
            if row.name in odd
            else RowOutcome(row, [0.2 if row.name != "shm" else 0.01] * 5, [0.01] * 5, others_share=0.25)
            for row in group.rows
        ]

    monkeypatch.setattr(bench, "measure", measure)
    return seen


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "60"})
    return result.exit_code, result.stdout


def test_the_table_has_the_ratio_and_slow_rows_say_what_to_do():
    code, output = invoke("--only", "shm", "--only", "step")
    lines = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert code == 0
    cells = "shm 10.00 ms 1.68 GB/s 10.00 ms 1.00× 1.00 to 1.00 ≤ 2× 25% good"
    assert lines["shm"].split() == cells.split()
    assert "20.00×" in output and "--profile" in output and "kv.gradients()" not in output


def test_a_row_that_fails_is_a_failure_and_one_that_cannot_be_measured_is_none():
    code, output = invoke("--only", "tls")
    assert code == 0 and "not measured: needs an address" in output
    code, output = invoke("--only", "t*")
    assert code == 1 and "tcp: JobFailed: worker-0 is gone" in output


def test_json_for_machines():
    code, output = invoke("--json")
    found = json.loads(output)
    rows = {row["name"]: row for row in found["rows"]}
    assert code == 1 and set(found) == {"machine", "hosts", "rows"}
    assert rows["shm"]["ratio"] == 1.0 and rows["shm"]["is_good"] is True and rows["shm"]["advice"]
    assert rows["step"]["is_good"] is False and rows["step"]["others_share"] == 0.25
    assert rows["tls"]["not_measured"] and rows["tcp"]["error"] and "ratio" not in rows["tcp"]


def test_list_measures_nothing(measured: list[RowGroup]):
    code, output = invoke("--list")
    assert code == 0 and measured == []
    assert "all-reduce: 16 MiB all_reduce_" in output and "if it is slower: " in output


def test_between_hosts(measured: list[RowGroup]):
    invoke("-H", "a,b", "--remote", "ssh -p 2222 {host}")
    assert {group.settings["hosts"] for group in measured} == {"a,b"}


@pytest.mark.parametrize(
    ("words", "said"), [(["-H", "a:2"], "name two hosts or more"), (["--remote", "ssh {host}"], "need -H")]
)
def test_hosts_that_make_no_sense(words: list[str], said: str):
    result = CliRunner().invoke(app, ["bench", *words])
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)
