"""A function applied to each sample: its result is the sample, its error names the sample."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import syncline.data
from syncline.data import ArraySource, IterableSource, ShardSource, Source, batches, mapped
from syncline.errors import DataError

SOURCE = ArraySource({"x": np.arange(6.0), "y": np.arange(6)}, "points")


def test_samples_are_what_the_function_returns() -> None:
    def doubled(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"] * 2, "pair": np.array([sample["y"], 1]), "name": f"n{sample['y']}"}

    source = mapped(SOURCE, doubled)
    assert isinstance(source, Source) and len(source) == 6 and list(source.chunk_sizes) == [6]
    assert source.describe().endswith("doubled") and source.where(2) == "points, element 2"
    batch = source.read(np.array([4, 1]))
    assert isinstance(batch, dict)
    assert batch["x"].tolist() == [8.0, 2.0] and batch["pair"].tolist() == [[4, 1], [1, 1]]
    assert batch["name"].tolist() == ["n4", "n1"]


def test_tuples_and_single_values_become_tuples() -> None:
    pairs = mapped(ArraySource((np.arange(6.0), np.arange(6))), lambda pair: (pair[1], pair[0] + 1))
    y, x = pairs.read(np.array([3, 5]))
    assert y.tolist() == [3, 5] and x.tolist() == [4.0, 6.0]
    (single,) = mapped(SOURCE, lambda sample: sample["y"]).read(np.array([2]))
    assert single.tolist() == [2]


def test_tuples_of_different_lengths_are_refused() -> None:
    uneven = mapped(SOURCE, lambda sample: (1,) * (1 + int(sample["y"]) % 2))
    with pytest.raises(DataError, match="returned tuples of 1 and 2 values; return as many each time"):
        uneven.read(np.array([0, 1]))
    mixed = mapped(SOURCE, lambda sample: sample if int(sample["y"]) % 2 else 1)
    for samples in ([0, 1], [1, 0]):
        with pytest.raises(DataError, match="returned a dict for some samples only; return one each time"):
            mixed.read(np.array(samples))


def test_an_error_names_the_sample_and_where_it_lies(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6))

    def fails(sample: tuple[Any]) -> Any:
        if sample[0] == 4:
            raise ZeroDivisionError("by nothing")
        return sample

    source = syncline.data.open(tmp_path / "x.npy")
    assert isinstance(source, Source)
    with pytest.raises(
        DataError, match=r"fails raised ZeroDivisionError on sample 4 \(.*x\.npy, element 4\): by nothing"
    ) as caught:
        list(batches(mapped(source, fails), 2))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_in_a_shard_names_the_shard() -> None:
    def fails(sample: dict[str, Any]) -> Any:
        if sample["n"] == 3:
            raise ValueError("odd")
        return {"n": sample["n"] + 1}

    source = mapped(IterableSource({"first": lambda: ({"n": n} for n in range(5))}), fails)
    assert isinstance(source, ShardSource) and list(source.shards) == ["first"]
    read = source.iter_shard(0, 1)
    assert next(read) == {"n": 2}
    next(read)
    with pytest.raises(DataError, match=r"fails raised ValueError on sample 3 of first: odd"):
        next(read)
