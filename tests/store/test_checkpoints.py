"""Checkpoints of a folder: written, found, verified, pointed at, pruned."""

from __future__ import annotations

import pathlib

import pytest
from tests.store.made import make

from syncline.store import checkpoints
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
