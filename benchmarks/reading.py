"""Rows about reading: a Parquet file to batches of NumPy arrays in one process, beside plain pyarrow."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.match import play
from benchmarks.reader import BATCH_SIZE
from benchmarks.row import Effort, NotMeasured, Reach, Row, Samples
from benchmarks.sides import ProcessSide
from benchmarks.task import Task
from syncline.data.extra import needed


def narrow(num_rows: int) -> tuple[dict[str, Any], int]:
    """Columns, and the rows of a row group."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {f"x{n}": random.random(num_rows, dtype=np.float32) for n in range(16)}
    return {**columns, "y": random.integers(0, 10, num_rows)}, 1 << 16


def wide(num_rows: int) -> tuple[dict[str, Any], int]:
    random = np.random.default_rng(0)
    return {f"x{n}": random.random(num_rows, dtype=np.float32) for n in range(512)}, 1 << 13


def lists(num_rows: int) -> tuple[dict[str, Any], int]:
    pyarrow = needed("pyarrow", "lists")
    random = np.random.default_rng(0)
    pixels = pyarrow.array(random.integers(0, 256, num_rows * 784, dtype=np.uint8))
    images = pyarrow.FixedSizeListArray.from_arrays(pixels, 784)
    return {"image": images, "label": random.integers(0, 10, num_rows)}, 1 << 12


#: What is in the file, and in words.
SHAPES: dict[str, tuple[Callable[[int], tuple[dict[str, Any], int]], str]] = {
    "narrow": (narrow, "16 float32 columns and one of int64"),
    "wide": (wide, "512 float32 columns"),
    "lists": (lists, "lists of 784 uint8 and a column of int64"),
}


def write(path: str, shape: str, num_rows: int) -> None:
    columns, size = SHAPES[shape][0](num_rows)
    table = needed("pyarrow", "tables").table(columns)
    needed("pyarrow.parquet", "Parquet files").write_table(table, path, row_group_size=size)


def parquet(
    name: str, shape: str, num_rows: int, *, reach: Reach, shuffle: bool = False, beside: str = "iter_batches"
) -> Row:
    """One pass over a file, beside another by pyarrow: its own batches, or whole row groups."""

    def measure(effort: Effort) -> Samples:
        if importlib.util.find_spec("pyarrow") is None:
            raise NotMeasured('needs pyarrow: pip install "syncline[data]"')
        with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
            path = os.path.join(folder, "rows.parquet")
            write(path, shape, num_rows)
            ours = ProcessSide("reader", Task(kind="batches", path=path, shuffle=shuffle), side="ours")
            return play(ours, ProcessSide("reader", Task(kind=beside, path=path)), effort)

    order = "shuffled" if shuffle else "in order"
    plain = "iter_batches" if beside == "iter_batches" else "read_row_group, which gives no batches"
    return Row(
        name=name,
        what=f"Parquet to batches of {BATCH_SIZE} as NumPy, {order}, {num_rows:,} rows of {SHAPES[shape][1]}: rows/s",
        reference=f"pyarrow's {plain}, of the same columns to NumPy",
        reach=reach,
        measure=measure,
    )
