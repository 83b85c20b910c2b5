"""What a batch is, by source: the table in docs/guides/data.md, row by row."""

from __future__ import annotations

import io
import pathlib
import tarfile
from typing import Any

import numpy as np
import pytest
import torch

import syncline.data
from syncline.data import ArraySource, IterableSource, batches, mapped
from syncline.torch.batches import tensors

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6)


def form(batch: Any) -> Any:
    """The same with dtype and shape in the place of arrays."""
    if isinstance(batch, dict):
        return {name: form(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(form(value) for value in batch)
    return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"


def first(source: Any) -> Any:
    return next(iter(batches(source, 2, alone=True)))


def tar_shard(path: pathlib.Path) -> None:
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    fields = {"npy": array.getvalue(), "cls": b"7", "txt": b"a", "json": b"{}", "bin": b"\0"}
    with tarfile.open(path, "w") as archive:
        for n in range(2):
            for field, content in fields.items():
                member = tarfile.TarInfo(f"{n}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


FLOWER = ("sepal_length", "sepal_width", "petal_length", "petal_width")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ArraySource(X), ("float64[2, 2]",)),
        (ArraySource((X, Y)), ("float64[2, 2]", "int64[2]")),
        (ArraySource({"x": X, "y": Y}), {"x": "float64[2, 2]", "y": "int64[2]"}),
        (IterableSource({"a": lambda: ({"n": k, "s": "t"} for k in range(3))}), {"n": "int64[2]", "s": "object[2]"}),
        (mapped(ArraySource((X, Y)), lambda sample: {"n": sample[1]}), {"n": "int64[2]"}),
        (mapped(ArraySource((X, Y)), lambda sample: (sample[1], 1.5)), ("int64[2]", "float64[2]")),
        (mapped(ArraySource((X, Y)), lambda sample: sample[0]), ("float64[2, 2]",)),
        ("iris", {**dict.fromkeys(FLOWER, "float64[2]"), "species": "int64[2]"}),
    ],
)
def test_in_memory(source: Any, expected: Any) -> None:
    assert form(first(syncline.data.open(source) if isinstance(source, str) else source)) == expected


def test_files_of_arrays(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "xy.npz", x=X, y=Y)
    assert form(first(syncline.data.open(tmp_path / "x.npy"))) == ("float64[2, 2]",)
    assert form(first(syncline.data.open(tmp_path / "xy.npz"))) == {"x": "float64[2, 2]", "y": "int64[2]"}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables(tmp_path: pathlib.Path, kind: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"x": [1.0, 2.0], "l": [[1, 2, 3], [4, 5, 6]], "s": ["a", "b"]})
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "t.parquet")
    else:
        with arrow.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as file:
            file.write_table(table)
    batch = first(syncline.data.open(tmp_path / f"t.{kind}"))
    assert form(batch) == {"x": "float64[2]", "l": "int64[2, 3]", "s": "object[2]"}
    assert isinstance(tensors(batch)["s"], np.ndarray) and isinstance(tensors(batch)["l"], torch.Tensor)


def test_tar_shards(tmp_path: pathlib.Path) -> None:
    tar_shard(tmp_path / "s.tar")
    objects = dict.fromkeys(("__key__", "txt", "json", "bin"), "object[2]")
    assert form(first(syncline.data.open(tmp_path / "s.tar"))) == {
        **objects,
        "npy": "float64[2, 3]",
        "cls": "int64[2]",
    }


def test_a_loader_gives_lists_where_batches_gives_tuples() -> None:
    assert form(tensors((X, Y))) == ["float64[6, 2]", "int64[6]"]
    assert form(tensors({"x": X})) == {"x": "float64[6, 2]"}
