"""`make proof`: reading keeps up with plain pyarrow, and a billion samples cost a coordinator as little as a few."""

from __future__ import annotations

import pytest

from benchmarks.row import QUICK, Outcome
from benchmarks.rows import all_rows
from benchmarks.words import figure

ROWS = {row.name: row for row in all_rows()}
READING = [name for name in ROWS if name.startswith("parquet-") and not name.endswith("-groups")]


def measured(name: str) -> Outcome:
    row = ROWS[name]
    outcome = Outcome(row, row.measure(QUICK))
    ours, reference = (figure(value, row.unit) for value in outcome.medians)
    print(f"{name}: {ours}, reference {reference}: {outcome.ratio:.2f}× ({row.reach})", flush=True)
    return outcome


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", READING)
def test_batches_keep_up_with_plain_pyarrow(name: str) -> None:
    pytest.importorskip("pyarrow")
    assert measured(name).is_reached


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_a_billion_samples_cost_the_coordinator_next_to_nothing() -> None:
    assert measured("lease-memory").is_reached


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_an_epoch_of_a_billion_samples_begins_as_one_of_a_thousand() -> None:
    assert measured("lease-epoch").ratio <= 2.0
