"""The reader of idx files takes exactly what the format says, and names the file otherwise."""

from __future__ import annotations

import gzip
import pathlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.data.idx import parse_idx, read_idx, unzipped
from syncline.errors import DataError


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("name", ["images", "images.gz"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_is_read_zipped_or_not_whatever_its_name(tmp_path: pathlib.Path, name: str, zipped: bool) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(idx(IMAGES)) if zipped else idx(IMAGES))
    array = read_idx(path)
    assert array.dtype == np.uint8
    assert np.array_equal(array, IMAGES)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_any_shape_survives(shape: list[int]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(parse_idx(idx(array), "made"), array)


GOOD = idx(IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "made: not an idx file: it starts with nothing"),
        (b"\0\0\x08", "made: not an idx file"),
        (b"<!DOCTYPE html>", "made: not an idx file: it starts with 3c 21 44 4f"),
        (b"\0\1" + GOOD[2:], "made: not an idx file"),
        (GOOD[:2] + b"\x0d" + GOOD[3:], "made: elements of type 0x0d; only unsigned bytes"),
        (GOOD[:3] + b"\0", "made: 0 dimensions"),
        (GOOD[:3] + b"\xff" * 2000, "made: 255 dimensions"),
        (GOOD[:15], "made: cut short: 15 bytes, the dimensions alone take 16"),
        (GOOD[:-1], r"made: cut short: 39 bytes, dimensions \[2, 3, 4\] want 40"),
        (GOOD + b"\0", r"made: too long: 41 bytes, dimensions \[2, 3, 4\] want 40"),
        (GOOD[:4] + b"\xff" * 12, r"made: cut short: 16 bytes"),
        (b"\0\0\x08\x02" + struct.pack(">2I", 0, 2**32 - 1), "made: .* there is nothing in it"),
    ],
)
def test_what_is_not_an_idx_file_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_idx(content, "made")


@given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda tail: GOOD[:12] + tail))
def test_random_bytes_are_an_array_or_a_data_error(content: bytes) -> None:
    try:
        array = parse_idx(content, "made")
    except DataError:
        return
    assert idx(array) == content


@pytest.mark.parametrize(
    "damage",
    [
        lambda zipped: zipped[:-9],
        lambda zipped: zipped[:12],
        lambda zipped: zipped[:-8] + b"\0\0\0\0" + zipped[-4:],
        lambda zipped: zipped[:10] + b"\xff\xff" + zipped[12:],
        lambda zipped: zipped + b"more",
    ],
    ids=["cut", "head only", "crc", "deflate", "tail"],
)
def test_a_damaged_gzip_file_is_named(tmp_path: pathlib.Path, damage: object) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(GOOD)))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"images\.gz: cannot be unzipped: "):
        read_idx(path)


def test_a_small_file_cannot_unzip_into_all_memory() -> None:
    bomb = gzip.compress(bytes(5_000_000))
    assert len(bomb) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="bomb: longer than the 10000 bytes expected at most, unzipped"):
            unzipped(bomb, "bomb", 10_000)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_the_bound_is_exact(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "images"
    for content in (GOOD, gzip.compress(GOOD, mtime=0)):
        path.write_bytes(content)
        most = max(len(GOOD), len(content))
        assert np.array_equal(read_idx(path, most), IMAGES)
        with pytest.raises(DataError, match=f"images: longer than the {len(GOOD) - 1} bytes"):
            read_idx(path, len(GOOD) - 1)


def test_a_file_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match="nothing: cannot be read: No such file"):
        read_idx(tmp_path / "nothing")
