"""Checkpoints of a folder: written, found, verified, pointed at, pruned."""

from __future__ import annotations

import hashlib
import pathlib
import subprocess
import sys

import msgspec
import pytest
from tests.store.made import make

from syncline import faults
from syncline.core.leasing.leases import LeaseState
from syncline.core.leasing.ledger import Epoch
from syncline.core.leasing.loader import Loader
from syncline.core.leasing.ranges import Span
from syncline.errors import StoreError
from syncline.store import checkpoints
from syncline.store.begun import BEGUN, begun_here
from syncline.store.folders import open_folder


def test_what_is_written_is_found_and_verifies(tmp_path: pathlib.Path) -> None:
    folder = open_folder(tmp_path / "c")
    made = [make(folder, number) for number in (1, 2)]
    found = checkpoints.find(folder)
    assert [one.name for one in found] == ["000002-step-20", "000001-step-10"]
    assert found[0].manifest == made[1].manifest and found[0].digest == made[1].digest
    chosen = checkpoints.choose(folder, pytest.fail)
    assert chosen is not None and chosen.name == made[1].name
    assert checkpoints.next_number(folder) == 3


def test_retention_keeps_the_best_and_other_lineages_and_takes_unfinished_tries(tmp_path: pathlib.Path) -> None:
    folder = open_folder(tmp_path)
    for number in (1, 2, 4, 5):
        make(folder, number)
    make(folder, 6, lineage="b")
    checkpoints.begin(folder, 3, 30, "a")
    checkpoints.begin(folder, 7, 70, "a")
    (tmp_path / "000008-step-80").mkdir()  # nobody knows whose
    checkpoints.point(folder, "best", "000001-step-10")
    assert checkpoints.prune(folder, 2, "a") == ["000002-step-20", "000003-step-30"]
    left = [one.name for one in checkpoints.find(folder)]
    assert left == [
        "000008-step-80",
        "000007-step-70",
        "000006-step-60",
        "000005-step-50",
        "000004-step-40",
        "000001-step-10",
    ]


def test_what_could_not_be_replaced_is_not_pruned(tmp_path: pathlib.Path) -> None:
    folder = open_folder(tmp_path)
    made = [make(folder, number) for number in (1, 2, 3)]
    (tmp_path / made[2].name / "server-1.safetensors").unlink()
    assert checkpoints.prune(folder, 2, "a") == []
    file = tmp_path / made[1].name / "server-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    make(folder, 4)
    assert checkpoints.prune(folder, 2, "a", wholly=True) == []
    assert checkpoints.prune(folder, 2, "a") == [made[0].name]


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: pathlib.Path) -> None:
    folder = open_folder(tmp_path)
    made = make(folder, 1, metrics={"loss": float("nan"), "accuracy": 0.5})
    found = checkpoints.find(folder)[0].manifest
    assert found is not None and found.metrics == {"accuracy": 0.5}
    own = checkpoints.begin(folder, 2, 20, "a")
    with pytest.raises(StoreError, match="its name is"):
        checkpoints.write_manifest(own, msgspec.structs.replace(made.manifest, step=20))
    with pytest.raises(StoreError, match="slices are missing"):
        checkpoints.write_manifest(own, msgspec.structs.replace(made.manifest, slices=made.manifest.slices[1:]))
    with pytest.raises(StoreError, match="NaN or Inf"):
        checkpoints.write_manifest(own, msgspec.structs.replace(made.manifest, steering={"best": [float("inf")]}))
    assert not own.exists("manifest.json")
    with pytest.raises(StoreError, match="another one than expected"):
        checkpoints.read_manifest(folder.join(made.name), "0" * 64)


def test_a_checkpoint_whose_ledger_cannot_be_is_passed_over(tmp_path: pathlib.Path) -> None:
    """Its samples would be read twice, or there would be none: whoever takes it up must not begin to count."""
    folder = open_folder(tmp_path)
    first, second = make(folder, 1), make(folder, 2)
    ledger = LeaseState(loaders={"train": Loader(10, 2)}, epochs={"train": {0: Epoch(10, 0, [Span(0, 10)])}})
    lying = msgspec.structs.replace(second.manifest, leases=ledger)
    with pytest.raises(StoreError, match="batches of 0"):
        checkpoints.write_manifest(folder.join(second.name), lying)
    text = msgspec.json.encode(lying) + b"\n"
    content = text + hashlib.sha256(text).hexdigest().encode() + b"\n"
    (tmp_path / second.name / "manifest.json").write_bytes(content)
    said: list[str] = []
    chosen = checkpoints.choose(folder, said.append)
    assert chosen is not None and chosen.name == first.name and "batches of 0" in said[0]


def test_the_points_of_a_save_are_passed_in_order(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(faults, "armed", ("nowhere", 1, "kill"))
    monkeypatch.setattr(faults, "reach", passed.append)
    folder = open_folder(tmp_path)
    make(folder, 1)
    assert passed == ["save.written", "save.renamed"] * 3 + ["manifest.written", "manifest.renamed"]
    for number in (2, 3):
        make(folder, number)
    passed.clear()
    checkpoints.prune(folder, 2, "a")
    assert passed == ["save.pruned"]
    assert {"save.written", "save.renamed"} <= set(faults.POINTS["server"])
    assert {"manifest.written", "manifest.renamed", "save.pruned"} <= set(faults.POINTS["coordinator"])


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_two_jobs_in_one_folder_never_share_a_checkpoint(tmp_path: pathlib.Path, where: str) -> None:
    """A job is put in the queue again while the old one still ends: both have found number 12, step 480."""
    folder = open_folder(tmp_path if where == "disk" else f"memory://{tmp_path}")
    numbers = [checkpoints.next_number(folder)] * 3
    steps = (480, 480, 481)
    made = [
        checkpoints.begin(folder, n, s, "a", f"t{k}") for k, (n, s) in enumerate(zip(numbers, steps, strict=True))
    ]
    assert [one.name for one in made] == ["000001-step-480", "000002-step-480", "000003-step-481"]
    made[1].write("server-0.safetensors", b"x")
    checkpoints.abandon(made[1], "t0")
    assert made[1].exists("server-0.safetensors")
    checkpoints.abandon(made[1], "t1")
    assert folder.list() == [made[0].name, made[2].name]


def test_whoever_meets_another_of_its_number_gives_way(tmp_path: pathlib.Path) -> None:
    """Both have looked before either has made its folder."""
    folder = open_folder(tmp_path)
    checkpoints.begin(folder, 12, 480, "a", "t0")
    assert checkpoints.begin(folder, 12, 470, "a", "t1").name == "000013-step-470"
    assert folder.list() == ["000012-step-480", "000013-step-470"]


def test_what_another_job_is_writing_is_not_pruned(tmp_path: pathlib.Path) -> None:
    """Of the same lineage too: both may have been taken up from the same checkpoint."""
    folder = open_folder(tmp_path)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    begun = begun_here("a", "t1")
    for number, facts in enumerate(
        ({}, {"pid": int(ended.stdout)}, {"machine": "another"}, {"machine": "another", "at": 1.0}, {"token": "t0"}),
        1,
    ):
        own = checkpoints.begin(folder, number, number, "a", "t1")
        own.write(BEGUN, msgspec.json.encode(msgspec.structs.replace(begun, **facts)))
    for number in (7, 8):
        make(folder, number)
    assert checkpoints.prune(folder, 2, "a", token="t0") == ["000002-step-2", "000004-step-4", "000005-step-5"]
