"""Parquet and Arrow files: the values that plain pyarrow reads, from no more row groups than are needed."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import syncline.data
from syncline.data import Source, batches
from syncline.data.arrow import ParquetFile
from syncline.data.table import TableSource
from syncline.errors import ConfigError, DataError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

NUM_ROWS = 1000


def table(num_rows: int = NUM_ROWS, first: int = 0) -> Any:
    numbers = np.arange(first, first + num_rows)
    return arrow.table(
        {
            "x": arrow.array(numbers, arrow.float32()),
            "y": arrow.array(numbers % 10, arrow.int64()),
            "flag": arrow.array(numbers % 2 == 0),
            "name": arrow.array([f"row {n}" for n in numbers]),
            "raw": arrow.array([str(n).encode() for n in numbers], arrow.binary()),
            "pair": arrow.array([[n, n + 1] for n in numbers], arrow.list_(arrow.int32())),
            "fixed": arrow.array([[n, n, n] for n in numbers.astype(float)], arrow.list_(arrow.float64(), 3)),
            "day": arrow.array(numbers.astype("datetime64[D]")),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Three files of 400, 350 and 250 rows in row groups of at most 128."""
    folder = tmp_path_factory.mktemp("tables")
    for name, first, last in (("a", 0, 400), ("b", 400, 750), ("c", 750, 1000)):
        rows = table(last - first, first)
        parquet.write_table(rows, folder / f"{name}.parquet", row_group_size=128)
        feather.write_feather(rows, folder / f"{name}.feather", chunksize=128, compression="lz4")
    return folder


@pytest.fixture(params=["*.parquet", "*.feather"])
def source(request: pytest.FixtureRequest, folder: pathlib.Path) -> TableSource:
    source = syncline.data.open(folder / request.param)
    assert isinstance(source, TableSource)
    return source


def test_a_table_describes_itself(source: TableSource) -> None:
    assert isinstance(source, Source) and len(source) == NUM_ROWS
    assert list(source.chunk_sizes) == [128, 128, 128, 16, 128, 128, 94, 128, 122]
    described = source.describe()
    assert described.endswith("files, 1,000 rows: columns x, y, flag, name, raw, pair, fixed, day")
    assert described.startswith("3 ")
    assert source.where(0).endswith(("a.parquet, row 0", "a.feather, row 0"))
    assert source.where(399).endswith(("a.parquet, row 399", "a.feather, row 399"))
    assert source.where(750 + 130).endswith(("c.parquet, row 130", "c.feather, row 130"))


def test_every_type_of_column_has_the_values_of_pyarrow(source: TableSource) -> None:
    expected = table()
    batch = source.read(np.arange(NUM_ROWS))
    for name in ("x", "y", "flag", "name", "raw", "day"):
        assert np.array_equal(batch[name], expected.column(name).to_numpy()), name
    assert batch["name"].dtype == object and isinstance(batch["name"][0], str) and isinstance(batch["raw"][0], bytes)
    assert batch["x"].dtype == np.float32 and batch["flag"].dtype == bool and batch["day"].dtype == "datetime64[D]"
    assert batch["pair"].dtype == np.int32 and batch["pair"].tolist() == expected.column("pair").to_pylist()
    assert batch["fixed"].shape == (NUM_ROWS, 3) and batch["fixed"].tolist() == expected.column("fixed").to_pylist()


@given(st.lists(st.integers(0, NUM_ROWS - 1), max_size=60))
@settings(max_examples=60)
def test_rows_come_in_the_order_asked_for(folder: pathlib.Path, asked: list[int]) -> None:
    source = syncline.data.open(folder / "*.parquet", columns=["y", "pair"])
    assert isinstance(source, TableSource)
    samples = np.array(asked, dtype=np.int64)
    batch = source.read(samples)
    assert list(batch) == ["y", "pair"]
    assert np.array_equal(batch["y"], samples % 10)
    assert batch["pair"].shape == (len(asked), 2) and np.array_equal(batch["pair"][:, 0], samples)


def test_a_read_does_not_go_through_all_chunks(source: TableSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set may have a hundred thousand row groups; where each begins is known since it was opened."""
    monkeypatch.setattr(source, "chunk_sizes", None)
    assert source.read(np.array([130, 131]))["x"].tolist() == [130, 131]
    assert source.read(np.array([5, 900]))["x"].tolist() == [5, 900]


def test_a_batch_is_the_callers_own(source: TableSource) -> None:
    for samples in (np.arange(5), np.array([4, 1]), np.array([0, 900])):
        batch = source.read(samples)
        batch["x"][:] = -1
        batch["pair"][:] = -1
        assert np.array_equal(source.read(samples)["x"], samples)


class Counting:
    """Counts which row groups are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[str, int]] = []
        original = ParquetFile.read_chunk

        def read_chunk(file: ParquetFile, index: int, columns: list[str]) -> Any:
            self.read.append((pathlib.Path(file.path).stem, index))
            return original(file, index, columns)

        monkeypatch.setattr(ParquetFile, "read_chunk", read_chunk)


def test_only_row_groups_with_asked_samples_are_read(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    source = syncline.data.open(folder / "*.parquet", columns=["x"])
    assert isinstance(source, TableSource) and counting.read == []
    source.read(np.array([130, 131, 760]))
    assert counting.read == [("a", 1), ("c", 0)]
    source.read(np.array([140, 761]))
    assert counting.read == [("a", 1), ("c", 0)]  # kept from before


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_reads_each_row_group_once(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    counting = Counting(monkeypatch)
    files = syncline.data.open(folder / "*.parquet", columns=["x"])
    assert isinstance(files, TableSource)
    files.cache_bytes = 0  # two row groups are kept even so
    seen = [batch["x"] for batch in batches(files, 32, shuffle=shuffle, seed=1) if isinstance(batch, dict)]
    assert [len(each) for each in seen] == [32] * 31 + [8]
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(NUM_ROWS))
    assert np.array_equal(np.concatenate(seen), np.arange(NUM_ROWS)) is not shuffle
    assert len(counting.read) == len(set(counting.read)) == 9
    assert files.num_kept == 2


def test_a_column_that_is_not_there_is_named(folder: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.parquet: there is no column 'z'; there are x, y, flag"):
        syncline.data.open(folder / "*.parquet", columns=["x", "z"])
    with pytest.raises(ConfigError, match="no columns to read"):
        syncline.data.open(folder / "*.parquet", columns=[])


@pytest.mark.parametrize("other", [{"x": [1.5]}, {"x": [1], "z": [2]}, {"w": [1]}])
def test_files_with_different_schemas_are_both_named(tmp_path: pathlib.Path, other: dict[str, list[float]]) -> None:
    parquet.write_table(arrow.table({"x": [1]}), tmp_path / "a.parquet")
    parquet.write_table(arrow.table(other), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column '[xz]' is .* in .*a\.parquet and .* in .*b\.parquet; .*columns="):
        syncline.data.open(tmp_path)


def test_columns_choose_what_files_share(tmp_path: pathlib.Path) -> None:
    parquet.write_table(arrow.table({"x": [1], "y": [1]}), tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"x": [2], "y": ["2"]}), tmp_path / "b.parquet")
    source = syncline.data.open(tmp_path, columns=["x"])
    assert isinstance(source, TableSource) and source.read(np.array([1, 0]))["x"].tolist() == [2, 1]


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
@pytest.mark.parametrize("keep", [0, 3, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_named(tmp_path: pathlib.Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"cut.{suffix}"
    (parquet.write_table if suffix == "parquet" else feather.write_feather)(table(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 1 else keep * len(content))])
    with pytest.raises(DataError, match=rf"cut\.{suffix}: .*copy or write it again"):
        syncline.data.open(path)


def test_damage_inside_a_row_group_is_named_when_it_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "damaged.parquet"
    parquet.write_table(arrow.table({"x": np.arange(10_000)}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[4:2000] = b"\xff" * 1996
    path.write_bytes(content)
    source = syncline.data.open(path)
    assert isinstance(source, TableSource)
    with pytest.raises(DataError, match=r"damaged\.parquet: "):
        source.read(np.array([0]))


def test_an_arrow_stream_is_called_one(tmp_path: pathlib.Path) -> None:
    rows = arrow.table({"x": [1, 2]})
    with arrow.OSFile(str(tmp_path / "s.arrow"), "wb") as file, arrow.ipc.new_stream(file, rows.schema) as stream:
        stream.write(rows)
    with pytest.raises(
        DataError, match=r"s\.arrow: an Arrow stream, .*write it as a file, with pyarrow\.ipc\.new_file"
    ):
        syncline.data.open(tmp_path / "s.arrow")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_an_error_where_they_are_read(tmp_path: pathlib.Path, suffix: str) -> None:
    rows = arrow.Table.from_arrays([[1, 2], [3, 4], [5, 6]], names=["a", "a", "b"])
    path = tmp_path / f"d.{suffix}"
    if suffix == "parquet":
        parquet.write_table(rows, path)
    else:
        with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, rows.schema) as written:
            written.write(rows)
    for columns in (None, ["a", "b"]):
        with pytest.raises(DataError, match=rf"d\.{suffix}: there are several columns 'a'; .*columns="):
            syncline.data.open(path, columns=columns)
    source = syncline.data.open(path, columns=["b"])
    assert isinstance(source, TableSource) and source.read(np.array([1, 0]))["b"].tolist() == [6, 5]


def test_an_empty_table_is_an_error(tmp_path: pathlib.Path) -> None:
    parquet.write_table(arrow.table({"x": arrow.array([], arrow.int64())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty\.parquet: no row in 1 Parquet file; write some"):
        syncline.data.open(tmp_path / "empty.parquet")


def test_missing_values_are_nan_none_or_an_error(tmp_path: pathlib.Path) -> None:
    columns = {"x": [1.0, None], "s": ["a", None], "n": [1, None]}
    parquet.write_table(arrow.table(columns), tmp_path / "missing.parquet")
    source = syncline.data.open(tmp_path / "missing.parquet", columns=["x", "s"])
    assert isinstance(source, TableSource)
    batch = source.read(np.array([0, 1]))
    assert np.isnan(batch["x"][1]) and batch["s"].tolist() == ["a", None]
    source = syncline.data.open(tmp_path / "missing.parquet", columns=["n"])
    with pytest.raises(DataError, match=r"missing\.parquet: column 'n' \(int64\) has 1 missing values; fill them"):
        source.read(np.array([0]))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1], [1, 2]], "lists of 1 and of 2 values; only lists of one length"),
        ([[1], None], "missing lists"),
        ([{"a": 1}, {"a": 2}], "has no NumPy array; leave it out with columns="),
    ],
)
def test_a_column_without_an_array_is_named(tmp_path: pathlib.Path, values: list[Any], message: str) -> None:
    parquet.write_table(arrow.table({"odd": values}), tmp_path / "odd.parquet")
    source = syncline.data.open(tmp_path / "odd.parquet")
    with pytest.raises(DataError, match=rf"odd\.parquet: column 'odd' .*{message}"):
        source.read(np.array([0]))  # type: ignore[union-attr]


def test_lists_of_another_length_in_another_row_group_are_an_error(tmp_path: pathlib.Path) -> None:
    parquet.write_table(arrow.table({"v": [[1], [1, 2]]}), tmp_path / "v.parquet", row_group_size=1)
    source = syncline.data.open(tmp_path / "v.parquet")
    with pytest.raises(DataError, match=r"v\.parquet: column 'v' has lists of \(2,\) values, elsewhere of \(1,\)"):
        source.read(np.array([0, 1]))  # type: ignore[union-attr]


def test_a_row_group_with_lists_is_read_in_pieces_and_is_whole(tmp_path: pathlib.Path) -> None:
    """Large lists come piece by piece, and with them every other column of the row group."""
    lists = np.arange(3000 * 500, dtype=np.float64).reshape(3000, 500)
    columns = {"v": arrow.FixedSizeListArray.from_arrays(lists.ravel(), 500), "s": [str(n) for n in range(3000)]}
    parquet.write_table(arrow.table(columns), tmp_path / "v.parquet", row_group_size=2000)
    source = syncline.data.open(tmp_path / "v.parquet")
    assert isinstance(source, TableSource) and len(list(source.files[0].read_chunk(0, ["v"]))) > 1
    batch = source.read(np.arange(3000))
    assert np.array_equal(batch["v"], lists) and batch["s"].tolist() == columns["s"]
    uneven = [[1.0] * (500 if n < 1500 else 400) for n in range(2000)]
    parquet.write_table(arrow.table({"v": uneven}), tmp_path / "u.parquet", use_dictionary=False)
    with pytest.raises(DataError, match=r"u\.parquet: column 'v' has lists of (different lengths; pad them|500)"):
        syncline.data.open(tmp_path / "u.parquet").read(np.array([0]))  # type: ignore[union-attr]


def test_nested_lists_dictionaries_and_slices_of_lists(tmp_path: pathlib.Path) -> None:
    grid = arrow.array([[[n, n], [n, n + 1]] for n in range(6)], arrow.list_(arrow.list_(arrow.int64())))
    word = arrow.array(["a", "b"] * 3).dictionary_encode()
    feather.write_feather(arrow.table({"grid": grid, "word": word}), tmp_path / "g.feather", chunksize=4)
    source = syncline.data.open(tmp_path / "g.feather")
    batch = source.read(np.array([5, 0]))  # type: ignore[union-attr]
    assert isinstance(batch, dict)
    assert batch["grid"].tolist() == [[[5, 5], [5, 6]], [[0, 0], [0, 1]]]
    assert batch["word"].tolist() == ["b", "a"]
