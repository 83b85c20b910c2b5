"""The rows about reading and leases in small: both sides read all of the same file, and figures come out."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import syncline.data
from benchmarks import leases, reader, reading
from benchmarks.row import Effort, NotMeasured, Outcome, Reach, Row
from benchmarks.task import Task

parquet = pytest.importorskip("pyarrow.parquet")
PRINTED = Reach("printed")


@pytest.mark.parametrize("shape", reading.SHAPES)
def test_all_readers_read_the_same_rows(tmp_path: pathlib.Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "rows.parquet")
    reading.write(path, shape, 3000)
    columns, _ = reading.SHAPES[shape][0](3000)
    assert parquet.read_metadata(path).num_rows == 3000
    seen: list[tuple[int, ...]] = []
    original = reader._to_numpy

    def count(column: object) -> object:
        array = original(column)
        seen.append(array.shape)
        return array

    monkeypatch.setattr(reader, "_to_numpy", count)
    for kind in ("iter_batches", "row_groups"):
        seen.clear()
        reader.READERS[kind](Task(kind=kind, path=path))()
        assert sum(shape[0] for shape in seen) == 3000 * len(columns)
    source = syncline.data.open(path)
    assert isinstance(source, syncline.data.Source)
    batch = source.read(np.arange(3000))
    assert isinstance(batch, dict) and {array.shape[1:] for array in batch.values()} == {one[1:] for one in seen}
    for shuffle in (False, True):
        reader.READERS["batches"](Task(kind="batches", path=path, shuffle=shuffle))()


@pytest.mark.slow
def test_a_small_file_has_a_figure(fast: Effort) -> None:
    row = reading.parquet("p", "lists", 3000, reach=PRINTED, shuffle=True)
    assert Outcome(row, row.measure(fast)).ratio > 0


def test_without_pyarrow_it_is_said(monkeypatch: pytest.MonkeyPatch, fast: Effort) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotMeasured, match="needs pyarrow"):
        reading.parquet("p", "narrow", 10, reach=PRINTED).measure(fast)


@pytest.mark.proof
@pytest.mark.parametrize(
    "row",
    [
        leases.lease_share("share", policy="async", reach=PRINTED),
        leases.epoch_start("start", 10**9, reach=PRINTED),
    ],
    ids=lambda row: row.name,
)
def test_leases_have_figures(row: Row, fast: Effort) -> None:
    samples = row.measure(fast)
    assert len(samples.ours) == len(samples.reference) == 5
