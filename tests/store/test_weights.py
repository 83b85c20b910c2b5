"""Weights of a checkpoint by the model's own names, and files that others can open."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
import torch
from tests.store.made import BUFFERS, MODEL, Made, make, segments_of

import syncline
from syncline.errors import ConfigError, StoreError
from syncline.store import checkpoints, mirror, weights
from syncline.store.folders import open_folder
from syncline.torch.weights import export_state_dict

safetensors = pytest.importorskip("safetensors.torch")


def check(state: dict[str, torch.Tensor], values: dict[str, bytes]) -> None:
    assert state.keys() == values.keys()
    for parameter in MODEL + BUFFERS:
        tensor = state[parameter.name]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{parameter.dtype}", parameter.shape)
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert raw == values[parameter.name], parameter.name


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> tuple[pathlib.Path, list[Made]]:
    folder = open_folder(tmp_path / "c")
    made = [make(folder, number) for number in (1, 2)]
    checkpoints.point(folder, "best", made[0].name, metric="accuracy", value=0.9)
    checkpoints.point(folder, "last", made[1].name)
    return tmp_path / "c", made


def test_every_way_to_name_a_checkpoint(pair: tuple[pathlib.Path, list[Made]]) -> None:
    path, (first, second) = pair
    check(syncline.load_state_dict(path), second.values)
    check(syncline.load_state_dict(path / "last"), second.values)
    check(syncline.load_state_dict(path / "best"), first.values)
    check(syncline.load_state_dict(path / first.name), first.values)


def test_some_names_another_dtype_and_the_average(pair: tuple[pathlib.Path, list[Made]]) -> None:
    path, (_, second) = pair
    some = syncline.load_state_dict(path, names=["embed.weight"], dtype=torch.float64)
    assert list(some) == ["embed.weight"] and some["embed.weight"].dtype == torch.float64
    check(syncline.load_state_dict(path, weights="average"), second.averages)
    with pytest.raises(ConfigError, match="has no 'nobody'"):
        syncline.load_state_dict(path, names=["nobody"])


def test_a_damaged_one_is_passed_over_by_name(pair: tuple[pathlib.Path, list[Made]]) -> None:
    path, (first, second) = pair
    file = path / second.name / "server-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    said: list[str] = []
    chosen = checkpoints.choose(open_folder(path), said.append)
    assert chosen is not None and chosen.name == first.name and second.name in said[0]
    (path / second.name / "server-1.safetensors").unlink()
    with pytest.warns(RuntimeWarning, match=second.name):
        check(syncline.load_state_dict(path), first.values)
    with pytest.raises(StoreError, match=second.name):
        syncline.load_state_dict(path / second.name)


def test_the_formats_own_reader_opens_our_files(pair: tuple[pathlib.Path, list[Made]]) -> None:
    path, (_, second) = pair
    opened = safetensors.load_file(path / second.name / "server-0.safetensors")
    file = next(file for file in second.manifest.files if file.name == "server-0.safetensors")
    assert opened.keys() == {tensor.name for tensor in file.tensors}
    weights.export(path, path / "model.safetensors")
    check(safetensors.load_file(path / "model.safetensors"), second.values)
    export_state_dict(path, path / "model.pt")
    check(torch.load(path / "model.pt", weights_only=True), second.values)


def test_weights_only_are_read_but_no_job_goes_on_from_them(tmp_path: pathlib.Path) -> None:
    made = make(open_folder(tmp_path), 1, kind="weights")
    check(syncline.load_state_dict(tmp_path), made.values)
    assert checkpoints.choose(open_folder(tmp_path), pytest.fail) is None


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_mirror_holds_the_same(pair: tuple[pathlib.Path, list[Made]], kind: str, tmp_path: pathlib.Path) -> None:
    path, (_, second) = pair
    url = str(tmp_path / "m") if kind == "local" else f"memory://{tmp_path.name}"
    target = open_folder(url)
    assert mirror.copy_checkpoint(open_folder(path), target, second.name) == second.digest
    check(syncline.load_state_dict(url), second.values)
    assert mirror.copy_checkpoint(open_folder(path), target, second.name) == second.digest
    other = open_folder(tmp_path / "other")
    make(other, 2, seed=77)
    with pytest.raises(StoreError, match="another checkpoint of that name"):
        mirror.copy_checkpoint(other, target, second.name)


def test_parameters_that_no_optimizer_had_have_their_own_names(tmp_path: pathlib.Path) -> None:
    segments, _ = segments_of()
    renamed = [msgspec.structs.replace(p, name=f"fixed.{p.name}") for p in segments[1].parameters]
    fixed = msgspec.structs.replace(segments[1], parameters=tuple(renamed))
    manifest = make(open_folder(tmp_path)).manifest
    names = weights.own_names(msgspec.structs.replace(manifest, segments=(segments[0], fixed)))
    assert names["fixed.bn.mask"] == "bn.mask" and names["fc.bias"] == "fc.bias"
    names = weights.own_names(msgspec.structs.replace(manifest, segments=(segments[1], fixed)))
    assert names["fixed.bn.mask"] == "fixed.bn.mask", "another parameter has that name"
