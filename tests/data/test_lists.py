"""Columns of lists: the values of pyarrow, however a chunk is cut into pieces and whichever rows are asked for."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import syncline.data
import syncline.data.arrow
from syncline.data import batches
from syncline.data.columns import as_array, empty
from syncline.data.source import put, run
from syncline.data.table import TableSource
from syncline.errors import DataError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NUM_ROWS, GROUP, PIECE = 200, 64, 24  # no size divides the one before it: pieces end inside of groups


def columns() -> dict[str, Any]:
    """Every form of list that becomes an array; row n has values that no other row has."""
    rows = range(NUM_ROWS)
    days = np.arange(NUM_ROWS * 2).astype("datetime64[D]").reshape(-1, 2).tolist()
    grids = [[[n, -n], [n + 1, n]] for n in rows]
    return {
        "fixed": arrow.array([[n % 256, 255 - n % 256, 7] for n in rows], arrow.list_(arrow.uint8(), 3)),
        "equal": arrow.array([[n, -n] for n in rows], arrow.list_(arrow.int32())),
        "large": arrow.array([[n + 0.5, n] for n in rows], arrow.large_list(arrow.float64())),
        "nan": arrow.array([[n, None] if n % 3 else [None, n] for n in rows], arrow.list_(arrow.float32())),
        "flag": arrow.array([[n % 2 == 0, n % 3 == 0] for n in rows], arrow.list_(arrow.bool_(), 2)),
        "day": arrow.array(days, arrow.list_(arrow.date32())),
        "word": arrow.array([[f"w{n}", None] for n in rows], arrow.list_(arrow.string())),
        "nothing": arrow.array([[] for _ in rows], arrow.list_(arrow.int64())),
        "grid": arrow.array(grids, arrow.list_(arrow.list_(arrow.int16()))),
        "board": arrow.array(grids, arrow.list_(arrow.list_(arrow.int64(), 2), 2)),
        "mixed": arrow.array(grids, arrow.list_(arrow.list_(arrow.int64()), 2)),
    }


FORMS = {
    "fixed": (np.uint8, (3,)),
    "equal": (np.int32, (2,)),
    "large": (np.float64, (2,)),
    "nan": (np.float32, (2,)),
    "flag": (np.bool_, (2,)),
    "day": ("datetime64[D]", (2,)),
    "word": (object, (2,)),
    "nothing": (np.int64, (0,)),
    "grid": (np.int16, (2, 2)),
    "board": (np.int64, (2, 2)),
    "mixed": (np.int64, (2, 2)),
}


def expected(name: str) -> Any:
    """By way of Python's own lists, which share no code with what is tested."""
    dtype, shape = FORMS[name]
    return np.array(columns()[name].to_pylist(), dtype=dtype).reshape(NUM_ROWS, *shape)


def same(got: Any, wanted: Any) -> bool:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    return bool(np.array_equal(got, wanted, equal_nan=wanted.dtype.kind == "f"))


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncline.data.arrow, "PIECE_BYTES", 1)
    monkeypatch.setattr(syncline.data.arrow, "LEAST_ROWS", PIECE)


@pytest.fixture
def source(tmp_path: pathlib.Path, in_pieces: None) -> TableSource:
    """Row groups of 64, 64, 64 and 8 rows, the first three read in pieces of 24, 24 and 16."""
    parquet.write_table(arrow.table(columns()), tmp_path / "lists.parquet", row_group_size=GROUP)
    source = syncline.data.open(tmp_path / "lists.parquet")
    assert isinstance(source, TableSource) and list(source.chunk_sizes) == [64, 64, 64, 8]
    sizes = [piece.num_rows for piece in source.files[0].read_chunk(0, ["equal"])]
    assert sizes == [24, 24, 16]
    return source


ASKED = {
    "all": np.arange(NUM_ROWS),
    "inside a piece": np.arange(3, 9),
    "over the border of pieces": np.arange(20, 30),
    "over the border of row groups": np.arange(60, 70),
    "mixed in a row group": np.random.default_rng(1).permutation(GROUP),
    "one row group after the other, mixed in each": np.concatenate(
        [np.random.default_rng(2).permutation(GROUP) + start for start in (64, 0, 128)]
    ),
    "mixed whole": np.random.default_rng(3).permutation(NUM_ROWS),
    "backwards": np.arange(NUM_ROWS)[::-1].copy(),
    "some twice": np.array([5, 5, 199, 63, 64, 5]),
    "a run, then others, then the run's row group again": np.array([0, 1, 2, 100, 99, 3, 4]),
    "none": np.array([], dtype=np.int64),
}


@pytest.mark.parametrize("asked", ASKED)
def test_lists_have_the_values_of_pyarrow_in_the_order_asked_for(source: TableSource, asked: str) -> None:
    batch = source.read(ASKED[asked])
    for name in FORMS:
        assert same(batch[name], expected(name)[ASKED[asked]]), name
        assert batch[name].flags.c_contiguous and batch[name].flags.writeable, name


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [10, 64, 150])
def test_an_epoch_of_lists_has_every_row_once(source: TableSource, shuffle: bool, batch_size: int) -> None:
    seen = [batch for batch in batches(source, batch_size, shuffle=shuffle, epoch=0) if isinstance(batch, dict)]
    order = np.concatenate([batch["equal"][:, 0] for batch in seen])
    assert np.array_equal(np.sort(order), np.arange(NUM_ROWS))
    assert np.array_equal(order, np.arange(NUM_ROWS)) is not shuffle
    for name in FORMS:
        assert same(np.concatenate([batch[name] for batch in seen]), expected(name)[order]), name


@pytest.mark.parametrize("asked", ["inside a piece", "mixed in a row group", "mixed whole", "all"])
def test_what_is_written_to_a_batch_of_lists_reaches_nobody_else(source: TableSource, asked: str) -> None:
    batch = source.read(ASKED[asked])
    for name in ("fixed", "equal", "grid"):
        batch[name][:] = 1
    again = source.read(ASKED[asked])
    for name in ("fixed", "equal", "grid"):
        assert same(again[name], expected(name)[ASKED[asked]]), name


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("start", "length"), [(0, 200), (7, 50), (150, 50), (9, 1)])
def test_a_part_of_an_array_of_lists_has_its_own_rows(name: str, start: int, length: int) -> None:
    """A slice shares its parent's values and begins somewhere in them; so does a slice of a slice."""
    part = columns()[name].slice(start, length)
    wanted = expected(name)[start : start + length]
    assert same(as_array(part, name, "here"), wanted)
    assert same(as_array(columns()[name].slice(start).slice(0, length), name, "here"), wanted)
    chunked = arrow.chunked_array([part.slice(0, length // 2), part.slice(length // 2)])
    assert same(as_array(chunked, name, "here"), wanted)


@pytest.mark.parametrize("name", FORMS)
def test_parts_written_as_record_batches_come_back_as_they_were(tmp_path: pathlib.Path, name: str) -> None:
    whole = arrow.table({name: columns()[name]})
    path = str(tmp_path / "parts.arrow")
    with arrow.OSFile(path, "wb") as file, arrow.ipc.new_file(file, whole.schema) as written:
        for start, stop in ((3, 50), (50, 51), (51, 200)):
            written.write(whole.slice(start, stop - start).to_batches()[0])
    source = syncline.data.open(path)
    asked = np.array([46, 47, 48, 196, 0, 100])
    assert isinstance(source, TableSource) and same(source.read(asked)[name], expected(name)[3 + asked])


@pytest.mark.parametrize("row", [1, 30, 63])
@pytest.mark.parametrize(
    ("kind", "odd", "message"),
    [
        (arrow.list_(arrow.int64()), [1, 2, 3], "lists of (2 and of 3|3 and of 2|different)"),
        (arrow.list_(arrow.int64()), [], "lists of (2 and of 0|0 and of 2|different)"),
        (arrow.list_(arrow.int64()), None, "1 missing lists"),
        (arrow.list_(arrow.int64(), 2), None, "1 missing lists"),
        (arrow.list_(arrow.int64()), [1, None], "1 missing values"),
        (arrow.list_(arrow.int64(), 2), [None, 1], "1 missing values"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error_in_whichever_piece(
    tmp_path: pathlib.Path, in_pieces: None, row: int, kind: Any, odd: list[int | None] | None, message: str
) -> None:
    lists: list[list[int | None] | None] = [[n, n] for n in range(GROUP)]
    lists[row] = odd
    parquet.write_table(arrow.table({"v": arrow.array(lists, kind)}), tmp_path / "odd.parquet")
    source = syncline.data.open(tmp_path / "odd.parquet")
    with pytest.raises(DataError, match=rf"odd\.parquet: column 'v' .*{message}"):
        source.read(np.array([0]))  # type: ignore[union-attr]


def test_lists_whose_length_changes_at_the_border_of_two_pieces_are_an_error(
    tmp_path: pathlib.Path, in_pieces: None
) -> None:
    lists = [[1, 2] if n < PIECE else [1, 2, 3] for n in range(2 * PIECE)]
    parquet.write_table(arrow.table({"v": lists}), tmp_path / "uneven.parquet")
    source = syncline.data.open(tmp_path / "uneven.parquet")
    with pytest.raises(DataError, match=r"uneven\.parquet: column 'v' has lists of different lengths; pad them"):
        source.read(np.array([0]))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["uint8", "float64", "bool", "datetime64[s]", "object"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 0), (2, 3, 4)])
def test_memory_to_be_filled_is_writable_and_of_the_form_asked_for(dtype: str, shape: tuple[int, ...]) -> None:
    array, other = empty(shape, np.dtype(dtype)), empty(shape, np.dtype(dtype))
    assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous
    array[...], other[...] = np.zeros((), dtype), np.ones((), dtype)
    assert (array == np.zeros((), dtype)).all() and not np.shares_memory(array, other)


@pytest.mark.parametrize("places", [[2, 3, 4], [6, 0, 3]])
@pytest.mark.parametrize("rows", [[1, 2, 3], [4, 4, 0]])
def test_rows_are_put_at_their_places_and_nowhere_else(places: list[int], rows: list[int]) -> None:
    array = np.arange(10).reshape(5, 2)
    whole, wanted = np.full((7, 2), -1), np.full((7, 2), -1)
    put(whole, run(np.array(places)), array, run(np.array(rows)))
    wanted[places] = array[rows]
    assert np.array_equal(whole, wanted)


def test_a_column_of_tensors_keeps_their_shape() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    tensors = arrow.FixedShapeTensorArray.from_numpy_ndarray(values)
    assert same(as_array(tensors, "x", "here"), values)
    assert same(as_array(arrow.chunked_array([tensors.slice(1, 2), tensors.slice(3)]), "x", "here"), values[1:])
