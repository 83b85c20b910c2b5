"""The second copy: what is there is removed when it is damaged, never when its store only gives trouble."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import fsspec
import pytest
from tests.store.made import Made, make

from syncline.errors import DamagedError, StoreError
from syncline.store import checkpoints, disk, mirror, tensors
from syncline.store.folders import Folder, open_folder


@pytest.fixture
def mirrored(tmp_path: pathlib.Path) -> tuple[Folder, Folder, Made]:
    source, target = open_folder(tmp_path / "here"), open_folder(tmp_path / "there")
    made = make(source, 1)
    mirror.copy_checkpoint(source, target, made.name)
    return source, target, made


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_trouble_with_a_manifest_removes_nothing(
    mirrored: tuple[Folder, Folder, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, made = mirrored
    plain = open

    def only_here(path: Any, *arguments: Any) -> Any:
        return fail() if str(target.path) in str(path) else plain(path, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "open", only_here, raising=False)
        with pytest.raises(StoreError, match="see that the disk is sound") as caught:
            mirror.copy_checkpoint(source, target, made.name)
    assert not isinstance(caught.value, DamagedError)
    checkpoints.verify(target.join(made.name), checkpoints.read_manifest(target.join(made.name))[0])


def test_trouble_with_a_tensor_removes_nothing(
    mirrored: tuple[Folder, Folder, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, made = mirrored
    with monkeypatch.context() as patched:
        patched.setattr(tensors.os, "preadv", fail)
        with pytest.raises(StoreError, match="see that the disk is sound") as caught:
            mirror.copy_checkpoint(source, target, made.name)
    assert not isinstance(caught.value, DamagedError)
    assert target.join(made.name).exists("manifest.json")


@pytest.mark.parametrize("name", ["manifest.json", "server-0.safetensors"])
def test_what_is_damaged_there_is_copied_anew(mirrored: tuple[Folder, Folder, Made], name: str) -> None:
    source, target, made = mirrored
    file = target.join(made.name).path / name
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    mirror.copy_checkpoint(source, target, made.name)
    checkpoints.verify(target.join(made.name), checkpoints.read_manifest(target.join(made.name), made.digest)[0])


def test_a_store_out_of_reach_is_not_one_without_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's own `exists` takes any trouble for a no; a job would start over beside what it has."""
    folder = open_folder("memory://out-of-reach")
    folder.write("manifest.json", b"x")
    assert folder.exists("manifest.json") and not folder.exists("other")
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", fail)
    with pytest.raises(StoreError, match="cannot be looked at"):
        folder.exists("manifest.json")


def test_a_copy_that_came_to_no_end_is_pruned(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = open_folder(tmp_path / "here"), open_folder(tmp_path / "there")
    made = [make(source, number) for number in (1, 2)]
    with monkeypatch.context() as patched:
        patched.setattr(disk.shutil, "copyfileobj", fail)
        with pytest.raises(StoreError, match="see that the disk is sound"):
            mirror.copy_checkpoint(source, target, made[0].name)
    mirror.copy_checkpoint(source, target, made[1].name)
    assert target.list() == [made[0].name, made[1].name]
    assert checkpoints.prune(target, 2, "a") == [made[0].name]


def test_what_another_job_copies_under_the_same_name_is_left_to_it(tmp_path: pathlib.Path) -> None:
    source, target = open_folder(tmp_path / "here"), open_folder(tmp_path / "there")
    made = make(source, 1)
    checkpoints.begin(target, 1, 10, "b", "another")
    with pytest.raises(StoreError, match="another job"):
        mirror.copy_checkpoint(source, target, made.name)
