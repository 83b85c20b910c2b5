"""Paths on this machine and elsewhere: what is found, and what each thing that can be wrong is called."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import pathlib
import sys
import tarfile
from typing import Any

import numpy as np
import pytest
from tests.data.endpoint import Bucket
from tests.patience import PATIENCE

import syncline.data
from syncline.data import ShardSource, Source
from syncline.data.files import explained, found
from syncline.errors import ConfigError, DataError

fsspec = pytest.importorskip("fsspec")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def table_bytes(first: int, last: int) -> bytes:
    content = io.BytesIO()
    parquet.write_table(arrow.table({"x": np.arange(first, last)}), content, row_group_size=10)
    return content.getvalue()


def values(source: Any, samples: list[int]) -> list[int]:
    assert isinstance(source, Source)
    batch = source.read(np.array(samples))
    return (batch["x"] if isinstance(batch, dict) else batch[0]).tolist()


def test_a_folder_gives_its_data_files_in_order(tmp_path: pathlib.Path) -> None:
    for name in ("b.npy", "a.npy", "sub/c.npy", ".hidden.npy", "_temporary/d.npy", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    files = found(tmp_path, (".npy",))
    assert [pathlib.Path(path).relative_to(tmp_path).as_posix() for path in files.paths] == [
        "a.npy",
        "b.npy",
        "sub/c.npy",
    ]
    assert files.is_local
    assert len(found(f"file://{tmp_path}/*.npy", (".npy",)).paths) == 2
    assert len(found(f"{tmp_path}/**/*.npy", (".npy",)).paths) == 4  # a glob is taken at its word


def test_a_folder_is_read_through_links_and_each_part_of_it_once(tmp_path: pathlib.Path) -> None:
    """Parts of a data set often lie on several disks; links to what is above, or beside, add nothing."""
    folder, disk = tmp_path / "set", tmp_path / "disk"
    for name in (folder / "a.npy", folder / "sub/b.npy", disk / "c.npy", disk / "deep/d.npy"):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(b"")
    (folder / "far").symlink_to(disk)
    (folder / "latest").symlink_to(folder / "sub")
    (folder / "sub/up").symlink_to(folder)
    (disk / "round").symlink_to(disk)
    files = found(folder, (".npy",))
    assert [pathlib.Path(path).relative_to(folder).as_posix() for path in files.paths] == [
        "a.npy",
        "far/c.npy",
        "far/deep/d.npy",
        "sub/b.npy",
    ]


def test_a_part_of_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.npy", "locked/b.npy", ".trash/c.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    scandir = os.scandir

    def refusing(folder: str) -> Any:
        if folder.endswith(("locked", "trash")):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=r"locked: access was refused .*; let this user read it \(`chmod`, `chown`\)"):
        found(tmp_path, (".npy",))


def test_a_name_with_brackets_is_itself_before_it_is_a_glob(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x[1].npy").write_bytes(npy(np.arange(3)))
    assert values(syncline.data.open(tmp_path / "x[1].npy"), [2]) == [2]


def test_paths_that_lead_nowhere(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=r"\*\.parquet: matches no file; check the path"):
        syncline.data.open(tmp_path / "*.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: there is no such file or folder; check the path"):
        syncline.data.open(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"is a folder without \.parquet or \.pq files"):
        syncline.data.open(tmp_path, kind="parquet")
    with pytest.raises(DataError, match=r"memory://nowhere/\*\.npy: matches no file"):
        syncline.data.open("memory://nowhere/*.npy")
    with pytest.raises(DataError, match=r"memory://nowhere/x\.npy: there is no such file"):
        syncline.data.open("memory://nowhere/x.npy")


def test_memory_is_a_place_like_any_other() -> None:
    memory = fsspec.filesystem("memory")
    try:
        for name, first, last in (("a", 0, 25), ("b", 25, 40)):
            memory.pipe(f"/place/{name}.parquet", table_bytes(first, last))
        memory.pipe("/place/x.npy", npy(np.arange(7)))
        source = syncline.data.open("memory://place/*.parquet")
        assert values(source, [39, 0, 24, 25]) == [39, 0, 24, 25]
        assert list(source.chunk_sizes) == [10, 10, 5, 10, 5]  # type: ignore[union-attr]
        assert values(syncline.data.open("memory://place", kind="parquet"), [30]) == [30]
        assert values(syncline.data.open("memory://place/x.npy"), [6, 1]) == [6, 1]
        memory.pipe("/place/cut.parquet", table_bytes(0, 25)[:-20])
        with pytest.raises(DataError, match=r"memory:///?place/cut\.parquet: .*copy or write it again"):
            syncline.data.open("memory://place/cut.parquet")
    finally:
        memory.rm("/place", recursive=True)


def test_s3_is_read_by_file_glob_and_folder(bucket: Bucket) -> None:
    bucket.write("set/a.parquet", table_bytes(0, 25))
    bucket.write("set/b.parquet", table_bytes(25, 40))
    bucket.write("x.npy", npy(np.arange(7)))
    for path in ("set/*.parquet", "set", "set/"):
        source = syncline.data.open(f"{bucket.url}/{path}", storage_options=bucket.options)
        assert isinstance(source, Source)
        assert source.describe() == "2 Parquet files, 40 rows: columns x"
        assert values(source, [39, 0, 24, 25]) == [39, 0, 24, 25]
        assert source.where(26) == "s3://bucket/set/b.parquet, row 1"
    assert values(syncline.data.open(f"{bucket.url}/x.npy", storage_options=bucket.options), [6]) == [6]
    assert isinstance(syncline.data.open(f"{bucket.url}/*", kind="numpy", storage_options=bucket.options), Source)
    with pytest.raises(DataError, match=r"s3://bucket/none/\*\.parquet: matches no file"):
        syncline.data.open(f"{bucket.url}/none/*.parquet", storage_options=bucket.options)
    with pytest.raises(DataError, match=r"s3://bucket/none\.parquet: there is no such file"):
        syncline.data.open(f"{bucket.url}/none.parquet", storage_options=bucket.options)


def test_a_forked_process_reads_from_s3(bucket: Bucket) -> None:
    """torch's data processes are forked; the driver's own thread stays behind, and a driver as it is would refuse."""
    bucket.write("a.parquet", table_bytes(0, 25))
    source = syncline.data.open(f"{bucket.url}/a.parquet", storage_options=bucket.options)
    assert values(source, [3]) == [3]
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    with here, there:
        process = fork.Process(target=lambda: there.send(values(source, [24, 0])))
        process.start()
        assert here.poll(PATIENCE) and here.recv() == [24, 0]
        process.join()
        process.close()


@pytest.mark.proof
def test_tar_shards_are_read_from_s3(bucket: Bucket) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for n in range(20):
            member = tarfile.TarInfo(f"{n:02}.cls")
            member.size = 2
            archive.addfile(member, io.BytesIO(f"{n:02}".encode()))
    bucket.write("shards/0.tar", content.getvalue())
    source = syncline.data.open(f"{bucket.url}/shards", storage_options=bucket.options)
    assert isinstance(source, ShardSource) and list(source.shards) == ["s3://bucket/shards/0.tar"]
    assert [sample["cls"] for sample in source.iter_shard(0, 15)] == [15, 16, 17, 18, 19]


def test_s3_without_credentials_says_how_to_give_them(bucket: Bucket) -> None:
    bucket.write("a.parquet", table_bytes(0, 25))
    nobody = {"endpoint_url": bucket.endpoint, "skip_instance_cache": True}
    with pytest.raises(
        DataError, match=r"s3://bucket/a\.parquet: there are no credentials for s3://: set AWS_ACCESS"
    ):
        syncline.data.open(f"{bucket.url}/a.parquet", storage_options=nobody)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("s3://b/x", "set AWS_ACCESS_KEY_ID"),
        ("gs://b/x", "gcloud auth application-default login"),
        ("abfs://b/x", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("oss://b/x", "pass them in storage_options= as ossfs takes them"),
        ("odd://b/x", "pass them in storage_options= as its driver takes them"),
    ],
)
def test_credentials_go_where_their_driver_looks_for_them(path: str, remedy: str) -> None:
    class DefaultCredentialsError(Exception):
        """As Google's library calls it."""

    for error in (DefaultCredentialsError("none"), PermissionError("Forbidden")):
        with pytest.raises(DataError) as caught, explained(path):
            raise error
        assert remedy in str(caught.value)
        assert ("AWS" in str(caught.value)) is path.startswith("s3")


def test_a_local_file_that_may_not_be_read_has_no_credentials() -> None:
    for path in ("/data/x.npy", "file:///data/x.npy"):
        with pytest.raises(DataError, match=r"refused .*; let this user read it") as caught, explained(path):
            raise PermissionError(13, "Permission denied")
        assert "credentials" not in str(caught.value)


def test_an_access_that_is_refused_is_not_called_missing() -> None:
    with (
        pytest.raises(DataError, match=r"s3://b/x: access was refused .*check whose credentials"),
        explained("s3://b/x"),
    ):
        raise PermissionError("Forbidden")


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if these were not installed."""
    for module in modules:
        for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_driver_that_is_not_installed_is_named_with_its_package() -> None:
    with pytest.raises(ConfigError, match=r"gs://b/x\.npy: no driver for gs:// is installed: pip install gcsfs"):
        syncline.data.open("gs://b/x.npy")
    with (
        pytest.raises(ConfigError, match=r"no driver for s3:// is installed: pip install s3fs"),
        explained("s3://b/x"),
    ):
        raise ImportError("Install s3fs to access S3")


def test_a_protocol_nobody_knows_is_said() -> None:
    with pytest.raises(ConfigError, match=r"odd://x\.npy: odd:// is not known; known are .*s3"):
        syncline.data.open("odd://x.npy")


def test_without_fsspec_or_pyarrow_the_extra_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.npy").write_bytes(npy(np.arange(3)))
    (tmp_path / "x.parquet").write_bytes(table_bytes(0, 3))
    with monkeypatch.context() as patch:
        without(patch, "fsspec")
        with pytest.raises(ConfigError, match=r'memory:// need fsspec: pip install "syncline\[data\]"'):
            syncline.data.open("memory://x.npy")
        assert values(syncline.data.open(tmp_path / "x.npy"), [2]) == [2]
    with monkeypatch.context() as patch:
        without(patch, "pyarrow.parquet")
        with pytest.raises(ConfigError, match=r'Parquet files need pyarrow: pip install "syncline\[data\]"'):
            syncline.data.open(tmp_path / "x.parquet")


def test_storage_options_are_for_remote_paths(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="storage_options are for remote paths"):
        syncline.data.open(tmp_path, storage_options={"anon": True})
