"""Rows, their jobs, and what their figures mean."""

from __future__ import annotations

import pytest
from tests.patience import PATIENCE

from syncline.bench import jobs, links
from syncline.bench.rows import ROWS, RowOutcome, choose, groups
from syncline.bench.script import Effort
from syncline.errors import ConfigError


def test_every_row_is_measured_once_here_and_says_what_to_do():
    here = [row for group in groups() for row in group.rows]
    assert sorted(row.name for row in here) == sorted(row.name for row in ROWS)
    assert all(row.advice.endswith(".") and row.good > 1 for row in ROWS)


def test_between_hosts_there_is_no_row_of_one_host():
    over = groups("a,b", "ssh {host}", "10.0.0.1")
    assert [row.name for group in over for row in group.rows] == ["tls", "all-reduce", "all-reduce-small", "step"]
    assert over[0].settings == {"hosts": "a,b", "remote": "ssh {host}", "bind": "10.0.0.1", "policy": "async"}


def test_only_takes_names_and_patterns():
    chosen = choose(groups(), ["shm*", "step"])
    assert [[row.name for row in group.rows] for group in chosen] == [["shm", "shm-small"], ["step"]]
    with pytest.raises(ConfigError, match=r"--only nothing: the rows are shm, "):
        choose(groups(), ["nothing"])


def test_a_ratio_is_the_median_over_pairs():
    """The machine was slow during the third pair, for both sides: that pair is no worse than the others."""
    row = ROWS[0]
    outcome = RowOutcome(row, [3.0, 4.0, 300.0, 6.0, 2.0], [2.0, 2.0, 100.0, 2.0, 2.0])
    assert outcome.ratios == [1.5, 2.0, 3.0, 3.0, 1.0] and outcome.ratio == 2.0
    assert outcome.is_good is (row.good >= 2.0)
    assert RowOutcome(row, error="failed").is_good is None


def test_without_an_address_there_is_no_tls_to_measure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "address_towards", lambda host: "")
    (outcome,) = jobs.measure(choose(groups(), ["tls"])[0], Effort())
    assert outcome.not_measured == "needs a network address besides loopback" and not outcome.error


TINY = Effort(num_pairs=5, turn_seconds=0.01)


@pytest.mark.proof
@pytest.mark.parametrize(
    "names",
    [
        ["shm", "shm-small", "all-reduce", "all-reduce-small"],
        ["tcp"],
        ["tls"],
        ["step"],
    ],
    ids="+".join,
)
def test_real_jobs_give_figures(names: list[str]):
    (group,) = choose(groups(), names)
    group.settings["start_seconds"] = PATIENCE
    outcomes = jobs.measure(group, TINY)
    assert [outcome.error for outcome in outcomes] == [""] * len(names)
    for outcome in outcomes:
        assert outcome.not_measured or (len(outcome.ratios) == 5 and min(outcome.ratios) > 0)
