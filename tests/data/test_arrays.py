"""Arrays as a source: in memory, in files, mapped from disk."""

from __future__ import annotations

import io
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import syncline.data
from syncline.data import ArraySource, Source, batches
from syncline.errors import ConfigError, DataError

X = np.arange(30, dtype=np.float32).reshape(10, 3)
Y = np.arange(10)


def test_one_array_a_tuple_and_a_dict_are_read_in_the_form_they_were_given() -> None:
    some = np.array([7, 0, 7])
    (alone,) = ArraySource(X).read(some)
    assert np.array_equal(alone, X[some])
    x, y = ArraySource((X, Y)).read(some)
    assert np.array_equal(x, X[some]) and np.array_equal(y, Y[some])
    named = ArraySource({"x": X, "y": Y}).read(some)
    assert isinstance(named, dict) and list(named) == ["x", "y"] and np.array_equal(named["y"], Y[some])


def test_a_source_describes_itself() -> None:
    source = ArraySource({"x": X, "y": Y}, "points")
    assert isinstance(source, Source)
    assert source.describe() == "points, 10 samples: x float32[3], y int64[]"
    assert len(source) == 10 and list(source.chunk_sizes) == [10] and source.where(3) == "points, element 3"


@given(st.lists(st.integers(0, 9), max_size=25))
def test_samples_come_in_the_order_asked_for(asked: list[int]) -> None:
    samples = np.array(asked, dtype=np.int64)
    x, y = ArraySource((X, Y)).read(samples)
    assert np.array_equal(x, X[samples]) and np.array_equal(y, Y[samples])


@pytest.mark.parametrize("samples", [[2, 3, 4], [4, 2]])
def test_a_batch_is_the_callers_own(samples: list[int]) -> None:
    """Writing to a batch, in sequence or not, must not reach the data of the next epoch."""
    held = X.copy()
    (batch,) = ArraySource(held).read(np.array(samples))
    batch[:] = -1
    assert np.array_equal(held, X)


@pytest.mark.parametrize("sample", [-1, 10])
def test_a_sample_that_is_not_there_is_named(sample: int) -> None:
    with pytest.raises(DataError, match=rf"sample {sample} was asked for; there are 10, from 0 to 9"):
        ArraySource(X).read(np.array([0, sample]))


def test_arrays_of_different_lengths_are_named() -> None:
    with pytest.raises(DataError, match=r"x float32\[3\] has 10 samples and y int64\[\] has 9.*same length"):
        ArraySource({"x": X, "y": Y[:9]})
    with pytest.raises(DataError, match=r"array 0 .* has 10 samples and array 1 .* has 9"):
        ArraySource((X, Y[:9]))


def test_nothing_to_read_is_said() -> None:
    with pytest.raises(DataError, match="there is no sample in it; give arrays with at least one element"):
        ArraySource(X[:0])
    with pytest.raises(DataError, match="there is no array in it"):
        ArraySource({})
    with pytest.raises(DataError, match="is a single value"):
        ArraySource({"x": np.float32(1.0)})


def test_a_npy_file_is_mapped_and_an_npz_file_has_columns(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "xy.npz", x=X, y=Y)
    mapped = syncline.data.open(tmp_path / "x.npy")
    assert isinstance(mapped, ArraySource) and isinstance(mapped.arrays[0], np.memmap)
    (batch,) = mapped.read(np.array([3, 1]))
    assert np.array_equal(batch, X[[3, 1]]) and type(batch) is np.ndarray and batch.flags.writeable
    both = syncline.data.open(f"file://{tmp_path}/xy.npz", columns=["y"])
    assert isinstance(both, ArraySource)
    assert both.describe().endswith("xy.npz, 10 samples: y int64[]")
    with pytest.raises(ConfigError, match="there is no column 'z'; there are x, y"):
        syncline.data.open(tmp_path / "xy.npz", columns=["z"])
    with pytest.raises(ConfigError, match="there is no column 'z'; its arrays have no names"):
        syncline.data.open(tmp_path / "x.npy", columns=["z"])


def test_a_damaged_npy_file_is_named(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "x.npy", X)
    content = (tmp_path / "x.npy").read_bytes()
    for end in (5, len(content) - 8):
        (tmp_path / "x.npy").write_bytes(content[:end])
        with pytest.raises(DataError, match=r"x\.npy: not a whole NumPy file .*write it again"):
            syncline.data.open(tmp_path / "x.npy")
    np.savez(tmp_path / "x.npz", x=X)
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"x\.npz: not a whole NumPy file"):
        syncline.data.open(tmp_path / "x.npz")


def test_objects_are_never_unpickled(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    with pytest.raises(DataError) as caught:
        syncline.data.open(tmp_path / "objects.npy")
    said = str(caught.value)
    assert "objects.npy: it holds Python objects (dtype object, shape (2,)), which only unpickling could read" in said
    assert 'numpy.save(path, array.astype("float32"))' in said and "text as array.astype(str)" in said
    assert "write it again" not in said and "whole" not in said, "it is whole, and would be the same again"


@pytest.mark.parametrize("place", ["", "memory://objects/"])
def test_which_array_of_a_file_holds_objects(tmp_path: pathlib.Path, place: str) -> None:
    content = io.BytesIO()
    mixed = np.zeros(3, dtype=[("n", "i4"), ("o", "O")])
    np.savez(content, x=np.zeros(3), y=mixed)
    if place:
        pytest.importorskip("fsspec").filesystem("memory").pipe(f"{place}x.npz", content.getvalue())
    else:
        (tmp_path / "x.npz").write_bytes(content.getvalue())
    with pytest.raises(
        DataError, match=r"x\.npz, array 'y': it holds Python objects \(dtype .*'O'.*, shape \(3,\)\)"
    ):
        syncline.data.open(f"{place or f'{tmp_path}/'}x.npz")


def test_text_that_was_saved_as_the_error_says(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "text.npy", np.array(["a", "bcd"], dtype=object).astype(str))
    (words,) = syncline.data.open(tmp_path / "text.npy").read(np.array([1, 0]))  # type: ignore[union-attr]
    assert words.tolist() == ["bcd", "a"]


def test_several_npy_files_are_refused(tmp_path: pathlib.Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", X)
    with pytest.raises(DataError, match=r"2 NumPy files; one is read at a time"):
        syncline.data.open(tmp_path)


def test_batches_of_tuples_cover_every_sample_once() -> None:
    for shuffle in (False, True):
        seen = list(batches(ArraySource((X, Y)), 4, shuffle=shuffle, seed=2))
        assert [len(batch[1]) for batch in seen] == [4, 4, 2]
        y = np.concatenate([batch[1] for batch in seen])
        assert sorted(y.tolist()) == list(range(10)) and (y.tolist() == list(range(10))) is not shuffle
        assert all(np.array_equal(batch[0], X[batch[1]]) for batch in seen)
