"""Jobs that save, with played members: shared by the tests of saving and of taking up."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from tests.coordinator.played import SECONDS

from syncline.store.checkpoints import choose
from syncline.store.folders import open_folder


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Whoever asks for a save waits for it, and it for workers and servers, however slow the machine is."""
    monkeypatch.setattr("syncline.coordinator.saves.ASKER_SECONDS", SECONDS)
    monkeypatch.setattr("syncline.coordinator.saves.EXPECT_SECONDS", SECONDS)
    monkeypatch.setattr("syncline.coordinator.saves.SNAPSHOT_SECONDS", SECONDS)
    return tmp_path / "saves"


def begun(jobs: Any, folder: pathlib.Path, **settings: Any) -> Any:
    settings = {"checkpoint": str(folder), "save_every": "1h", "slice_bytes": 4096, **settings}
    job = jobs(**settings).begin()
    job.register()
    for member in job.members.values():
        member.num_updates = 7
        member.clocks = [(f"worker-{k}", job[f"worker-{k}"].incarnation, 7) for k in range(2)]
    return job


def manifest(folder: pathlib.Path) -> Any:
    found = choose(open_folder(str(folder)), print)
    assert found is not None
    return found.manifest
