"""Rows make their files in a folder, and leave none of them there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE

from benchmarks.row import Effort


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for patient in ("turns.JOIN_SECONDS", "turns.TURN_SECONDS", "sides.WAIT_SECONDS"):
        monkeypatch.setattr(f"benchmarks.{patient}", PATIENCE)
    yield folder
    assert not list(folder.glob("syncline-*"))  # torch may leave a cache of its own


@pytest.fixture
def fast() -> Effort:
    return Effort(num_pairs=5, turn_seconds=0.01)
