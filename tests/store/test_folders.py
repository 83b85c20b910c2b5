"""Folders and files under trouble: what cannot be written is said with the remedy, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import numpy as np
import pytest
from tests.data.endpoint import Bucket
from tests.store.made import make

from syncline.errors import StoreError
from syncline.store import checkpoints, mirror, weights
from syncline.store.folders import check_writable, open_folder
from syncline.store.tensors import TensorReader, TensorWriter

PLAN = [("a", "float32", (4,)), ("b", "uint8", (3,)), ("c", "float64", ())]


def failing(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def write(folder: Any) -> Any:
    writer = TensorWriter(folder, "x.safetensors", PLAN)
    for name, data in (("b", b"123"), ("a", np.arange(4, dtype=np.float32)), ("c", np.array(2.0))):
        writer.write(name, data)
    return writer.finish()


@pytest.mark.parametrize(
    ("call", "number", "remedy"),
    [
        ("open", errno.EACCES, "let this process write there"),
        ("pwrite", errno.ENOSPC, "make space"),
        ("fsync", errno.EIO, "see that the disk is sound"),
        ("rename", errno.EROFS, "can be written to"),
    ],
)
def test_trouble_of_a_disk_names_the_remedy_and_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, remedy: str
) -> None:
    folder = open_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        with pytest.raises(StoreError, match=remedy):
            write(folder)
        with pytest.raises(StoreError, match=remedy):
            folder.write("manifest.json", b"x")
        with pytest.raises(StoreError, match=remedy):
            check_writable(folder)
    assert folder.list() == []
    check_writable(folder)
    assert folder.list() == []


def test_a_failed_fsync_is_not_tried_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(errno.EIO, "bad")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError):
        write(open_folder(tmp_path))
    assert len(calls) == 1


def test_tensors_come_in_any_order_each_once(tmp_path: pathlib.Path) -> None:
    folder = open_folder(tmp_path)
    saved = write(folder)
    with TensorReader(folder, saved) as reader:
        assert reader.read("a").view(np.float32).tolist() == [0, 1, 2, 3]
        assert reader.read("b").tobytes() == b"123" and reader.read("c").view(np.float64)[0] == 2.0
    writer = TensorWriter(folder, "y.safetensors", PLAN)
    writer.write("b", b"123")
    for name, data in (("b", b"123"), ("nobody", b"")):
        with pytest.raises(StoreError, match="not in the plan, or was written already"):
            writer.write(name, data)
    with pytest.raises(StoreError, match="2 tensors were not written"):
        writer.finish()
    writer = TensorWriter(folder, "y.safetensors", PLAN)
    with pytest.raises(StoreError, match="has 2 bytes, not 3"):
        writer.write("b", b"12")
    with pytest.raises(StoreError, match="has 2 bytes, not 3"):
        writer.finish()
    assert folder.list() == ["x.safetensors"]


def test_what_has_no_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="cannot be opened: Protocol not known"):
        open_folder("nobody://x")
    with pytest.raises(StoreError, match="empty"):
        open_folder("")
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(StoreError, match=r'needs fsspec: pip install "syncline\[data\]"'):
        open_folder("s3://bucket/x")


def through(url: str, other: str) -> None:
    """A checkpoint's whole life at an address."""
    folder = open_folder(url)
    check_writable(folder)
    made = [make(folder, number) for number in (1, 2, 3)]
    checkpoints.point(folder, "best", made[2].name)
    assert [one.name for one in checkpoints.find(folder)] == [one.name for one in reversed(made)]
    chosen = checkpoints.choose(folder, pytest.fail)
    assert chosen is not None and chosen.name == made[2].name
    read = {name: data.tobytes() for name, (_, data) in weights.load(f"{url}/best").items()}
    assert read == made[2].values
    mirror.copy_checkpoint(folder, open_folder(other), made[2].name)
    assert checkpoints.prune(folder, 2, "a") == [made[0].name]
    own = folder.join(made[2].name)
    data = bytearray(own.read("server-0.safetensors"))
    data[-1] ^= 1
    own.write("server-0.safetensors", bytes(data))
    said: list[str] = []
    chosen = checkpoints.choose(folder, said.append)
    assert chosen is not None and chosen.name == made[1].name and len(said) == 1
    assert checkpoints.choose(open_folder(other), pytest.fail) is not None


def test_in_memory(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("fsspec")
    through(f"memory://{tmp_path.name}/c", str(tmp_path / "m"))


def test_at_an_s3_endpoint(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    through(f"{bucket.url}/c", str(tmp_path / "m"))
    s3fs.S3FileSystem.clear_instance_cache()
