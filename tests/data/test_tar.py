"""Tar shards: samples by the names of their files, in sequence, and no shard that was cut short taken for whole."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import pathlib
import tarfile

import numpy as np
import pytest

import syncline.data
from syncline.data import IterableSource, ShardSource, batches
from syncline.data.files import found
from syncline.data.tar import TarSource
from syncline.errors import ConfigError, DataError


def npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def tar(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, inside in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(inside)
            archive.addfile(member, io.BytesIO(inside))
    return content.getvalue()


def samples(first: int, last: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for n in range(first, last):
        files[f"set/{n:04}.x.npy"] = npy(np.full((2, 2), n, dtype=np.int32))
        files[f"set/{n:04}.cls"] = str(n % 3).encode()
        files[f"set/{n:04}.json"] = json.dumps({"n": n}).encode()
        files[f"set/{n:04}.txt"] = f"sample {n}".encode()
        files[f"set/{n:04}.bin"] = bytes([n])
    return files


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "0.tar").write_bytes(tar(samples(0, 10)))
    (tmp_path / "1.tar.gz").write_bytes(gzip.compress(tar(samples(10, 17))))
    return tmp_path


def opened(path: pathlib.Path, columns: list[str] | None = None) -> TarSource:
    source = syncline.data.open(path, columns=columns)
    assert isinstance(source, TarSource) and isinstance(source, ShardSource)
    return source


def test_files_of_one_name_are_one_sample(folder: pathlib.Path) -> None:
    source = opened(folder)
    assert source.describe() == "2 tar shards" and [pathlib.Path(s).name for s in source.shards] == [
        "0.tar",
        "1.tar.gz",
    ]
    read = [sample for shard in (0, 1) for sample in source.iter_shard(shard)]
    assert [sample["__key__"] for sample in read] == [f"set/{n:04}" for n in range(17)]
    sample = read[12]
    assert sample["cls"] == 0 and sample["json"] == {"n": 12} and sample["txt"] == "sample 12"
    assert sample["bin"] == b"\x0c" and np.array_equal(sample["x.npy"], np.full((2, 2), 12, dtype=np.int32))


@pytest.mark.parametrize("skip", [0, 1, 9, 10, 11])
def test_reading_goes_on_where_it_stopped(folder: pathlib.Path, skip: int) -> None:
    keys = [sample["__key__"] for sample in opened(folder).iter_shard(0, skip)]
    assert keys == [f"set/{n:04}" for n in range(skip, 10)]


def test_columns_choose_fields_and_decode_may_be_off(folder: pathlib.Path) -> None:
    assert opened(folder, ["cls"]).describe() == "2 tar shards: fields cls"
    assert next(opened(folder, ["cls"]).iter_shard(0)) == {"__key__": "set/0000", "cls": 0}
    assert next(TarSource(found(folder, (".tar",)), ["cls"], decode=False).iter_shard(0))["cls"] == b"0"
    with pytest.raises(DataError, match=r"0\.tar, sample 0 \(set/0000\): there is no 'jpg'"):
        next(opened(folder, ["jpg"]).iter_shard(0))
    with pytest.raises(ConfigError, match="no columns to read"):
        opened(folder, [])


def test_batches_of_shards_are_stacked(folder: pathlib.Path) -> None:
    for shuffle in (False, True):
        read = list(batches(opened(folder, ["x.npy", "cls"]), 5, shuffle=shuffle, seed=3))
        assert [len(batch["cls"]) for batch in read if isinstance(batch, dict)] == [5, 5, 5, 2]
        first = read[0]
        assert isinstance(first, dict) and first["x.npy"].shape == (5, 2, 2) and first["x.npy"].dtype == np.int32
        assert first["__key__"].dtype == object
        seen = sorted(int(x[0, 0]) for batch in read if isinstance(batch, dict) for x in batch["x.npy"])
        assert seen == list(range(17))


@pytest.mark.parametrize("keep", [0, 100, 512, 700, 1536, 2048, 3000, 5120, 25600])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_shard_that_was_cut_short_is_named(tmp_path: pathlib.Path, keep: int, zipped: bool) -> None:
    """Also one cut between two files, which tarfile itself takes for the end."""
    whole = tar(samples(0, 10))
    assert keep < 51200  # the end of the last file
    path = tmp_path / ("cut.tar.gz" if zipped else "cut.tar")
    path.write_bytes(gzip.compress(whole[:keep]) if zipped else whole[:keep])
    with pytest.raises(DataError, match=r"cut\.tar(\.gz)?: not a whole tar file .*copy or write it again"):
        list(opened(path).iter_shard(0))


def test_a_gzip_stream_that_was_cut_short_is_named(tmp_path: pathlib.Path) -> None:
    content = gzip.compress(tar(samples(0, 10)))
    for keep in (20, len(content) // 2):
        (tmp_path / "cut.tgz").write_bytes(content[:keep])
        with pytest.raises(DataError, match=r"cut\.tgz: not a whole tar file"):
            list(opened(tmp_path / "cut.tgz").iter_shard(0))


def test_an_empty_shard_and_a_field_that_cannot_be_decoded_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty.tar").write_bytes(tar({}))
    with pytest.raises(DataError, match=r"empty\.tar: there is no sample in it"):
        list(opened(tmp_path / "empty.tar").iter_shard(0))
    (tmp_path / "odd.tar").write_bytes(tar({"a.cls": b"1", "b.cls": b"one"}))
    with pytest.raises(DataError, match=r"odd\.tar, sample 1 \(b\): 'cls' cannot be decoded"):
        list(opened(tmp_path / "odd.tar").iter_shard(0))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_a_link_in_a_shard_is_an_error_where_its_field_is_read(tmp_path: pathlib.Path, kind: bytes) -> None:
    """tar writes a file that it has seen before as a hard link: left out, the sample would lack a field."""
    with tarfile.open(tmp_path / "l.tar", mode="w") as archive:
        for name in ("a.cls", "a.txt", "b.cls"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"7"))
        member = tarfile.TarInfo("b.txt")
        member.type, member.linkname = kind, "a.txt"
        archive.addfile(member)
    with pytest.raises(
        DataError, match=r"l\.tar, sample 1 \(b\): b\.txt is a link, not a file.*`tar --dereference --hard-"
    ):
        list(opened(tmp_path / "l.tar").iter_shard(0))
    assert [sample["cls"] for sample in opened(tmp_path / "l.tar", ["cls"]).iter_shard(0)] == [7, 7]


def test_a_field_that_comes_twice_is_an_error(tmp_path: pathlib.Path) -> None:
    with tarfile.open(tmp_path / "t.tar", mode="w") as archive:
        for name in ("a.cls", "a.txt", "a.CLS"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"7"))
    with pytest.raises(DataError, match=r"t\.tar, sample 0 \(a\): there are two of 'cls' in it; give one"):
        list(opened(tmp_path / "t.tar").iter_shard(0))


def test_arrays_of_objects_are_never_unpickled(tmp_path: pathlib.Path) -> None:
    content = io.BytesIO()
    np.save(content, np.array([None], dtype=object), allow_pickle=True)
    (tmp_path / "evil.tar").write_bytes(tar({"a.npy": content.getvalue()}))
    with pytest.raises(
        DataError,
        match=r"'npy' cannot be decoded \(it holds Python objects \(dtype object, .*; decode=False leaves bytes",
    ):
        list(opened(tmp_path / "evil.tar").iter_shard(0))


def test_images_stay_bytes_without_pillow(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    (tmp_path / "i.tar").write_bytes(tar({"a.png": b"not decoded"}))
    assert next(opened(tmp_path / "i.tar").iter_shard(0))["png"] == b"not decoded"


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed")
def test_images_become_arrays_with_pillow(tmp_path: pathlib.Path) -> None:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), 7, dtype=np.uint8)).save(content, format="PNG")
    (tmp_path / "i.tar").write_bytes(tar({"a.png": content.getvalue()}))
    assert np.array_equal(next(opened(tmp_path / "i.tar").iter_shard(0))["png"], np.full((4, 5, 3), 7))


def test_samples_with_different_fields_are_not_put_together(tmp_path: pathlib.Path) -> None:
    (tmp_path / "d.tar").write_bytes(tar({"a.cls": b"1", "b.txt": b"one"}))
    with pytest.raises(DataError, match=r"some samples of a batch have 'cls' \(a\) and some do not \(b\); choose"):
        list(batches(opened(tmp_path / "d.tar"), 2))


def test_whatever_can_be_iterated_over_is_a_shard() -> None:
    shards = {"even": lambda: ({"n": n} for n in range(0, 10, 2)), "odd": lambda: ({"n": n} for n in range(1, 10, 2))}
    source = IterableSource(shards)
    assert isinstance(source, ShardSource)
    assert list(source.shards) == ["even", "odd"] and source.describe() == "2 iterables"
    assert [sample["n"] for sample in source.iter_shard(1, 3)] == [7, 9]
    read = list(batches(source, 4))
    assert [batch["n"].tolist() for batch in read if isinstance(batch, dict)] == [[0, 2, 4, 6], [8, 1, 3, 5], [7, 9]]
    with pytest.raises(ConfigError, match="there is no shard"):
        IterableSource({})


def test_shards_without_any_sample_are_an_error() -> None:
    source = IterableSource({"a": list, "b": list})
    with pytest.raises(DataError, match="2 iterables: there is no sample in any of them; write some"):
        list(batches(source, 4))
