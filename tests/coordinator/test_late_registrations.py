"""What is registered in the middle of a job that was taken up: a second model, one that thaws; members are played."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from tests.coordinator.played import Disk, jobs, until
from tests.coordinator.saves import begun, folder

from syncline.core.layout import Parameter
from syncline.core.rule import Rule
from syncline.core.wire.checkpoints import Resume, Save
from syncline.core.wire.control import Register, Registered, Rejoin, Uploaded
from syncline.errors import LayoutError, StoreError

__all__ = ["folder", "jobs"]


def register(job: Any, *names: str, ordinal: int = 0) -> Any:
    parameters = [Parameter(name, "float32", (4096,)) for name in names]
    return job["worker-0"].ask(Register(ordinal, parameters, [Rule("Add").spec], "mean"))


def saved_before(jobs: Any, folder: pathlib.Path, *more: str) -> None:
    job = begun(jobs, folder)
    for ordinal, name in enumerate(more, 1):
        answer = register(job, name, ordinal=ordinal)
        job["worker-0"].ask(Uploaded(answer.upload))
    job["worker-0"].ask(Save())
    job.coordinator.close()


def resumed_from(jobs: Any, folder: pathlib.Path, **settings: Any) -> Any:
    job = jobs(checkpoint=str(folder), save_every="1h", slice_bytes=4096, **settings).begin()
    assert register(job, "w").upload is None
    return job


def test_what_came_after_the_save_starts_with_its_own_values(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = resumed_from(jobs, folder)
    num_read = len(job["server-0"].all(Resume))
    answer = register(job, "v", ordinal=1)
    assert isinstance(answer, Registered) and answer.upload == 1, "the chief is asked for its values"
    assert len(job["server-0"].all(Resume)) == num_read
    assert any("'v' is not in 000001-step-7, it was registered later" in line for line in job.log)
    with pytest.raises(LayoutError, match=r"'u'.*none of that name"):
        register(jobs(checkpoint=str(folder)).begin(), "u")


def test_a_mixture_is_still_another_model(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder, "v")
    job = resumed_from(jobs, folder)
    with pytest.raises(LayoutError, match=r"'u'.*none of that name"):
        register(job, "v", "u", ordinal=1)


def test_what_was_taken_up_is_kept_until_all_of_it_is_registered(jobs: Any, folder: pathlib.Path) -> None:
    """No save made meanwhile has it: retention would take the only copy."""
    saved_before(jobs, folder, "v")
    job = resumed_from(jobs, folder, keep=2)
    for _ in range(4):
        job["worker-0"].ask(Save())
    first = folder / "000001-step-7"
    assert sum(path.is_dir() for path in folder.iterdir()) == 3 and first.exists()
    assert sum("lacks 'v'" in line for line in job.log) == 1, "it is said once"
    assert register(job, "v", ordinal=1).upload is None, "its values are those of the checkpoint"
    job["worker-0"].ask(Save())
    assert not first.exists()


def test_a_coordinator_that_came_later_does_without_what_was_removed(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = resumed_from(jobs, folder, keep=2)
    for _ in range(3):
        job["worker-0"].ask(Save())
    assert not (folder / "000001-step-7").exists()
    job.coordinator.close()
    disk = Disk()
    disk.states, disk.segments = list(job.disk.states), dict(job.disk.segments)
    again = jobs(disk=disk, workers=2, servers=2)
    for name, member in job.members.items():
        played = again.play(member.role, name)
        played.incarnation = played.stamp.incarnation = member.incarnation
        played.ask(Rejoin(name, member.incarnation))
    until(lambda: all(name in again.coordinator.job.endpoints for name in job.members), "all are back")
    assert register(again, "v", ordinal=1).upload == 1
    assert again["worker-0"].ask(Uploaded(1))
    names = [again["worker-0"].ask(Save()).name for _ in range(2)]
    assert (folder / names[-1]).exists()
    assert sum(path.is_dir() for path in folder.iterdir()) == 2, "old ones still go"


def test_nothing_to_register_is_an_error_and_no_crash(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = resumed_from(jobs, folder)
    with pytest.raises(LayoutError, match="nothing to register"):
        register(job, ordinal=1)
    with pytest.raises(LayoutError, match="nothing to register"):
        register(jobs(checkpoint=str(folder)).begin())


def test_an_error_while_a_job_is_taken_up_ends_it(jobs: Any, folder: pathlib.Path, monkeypatch: Any) -> None:
    """It happens in a thread of its own: nobody else would hear of it."""
    saved_before(jobs, folder)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("syncline.coordinator.restore.ledger_to_resume", broken)
    job = jobs(checkpoint=str(folder))
    for role, name in (
        ("server", "server-0"),
        ("server", "server-1"),
        ("worker", "worker-0"),
        ("worker", "worker-1"),
    ):
        job.play(role, name).ask_to_join()
    until(lambda: job.coordinator.membership.outcome is not None, "it ends")
    assert "ZeroDivisionError" in job.coordinator.membership.outcome.reason


def test_trouble_with_the_store_leaves_what_was_taken_up(jobs: Any, folder: pathlib.Path, monkeypatch: Any) -> None:
    saved_before(jobs, folder, "v")
    job = resumed_from(jobs, folder, keep=2)
    job.coordinator.resume._manifest = None

    def fail(*_: Any) -> Any:
        raise StoreError("the store cannot be reached")

    monkeypatch.setattr("syncline.coordinator.restore.open_folder", fail)
    for _ in range(4):
        job["worker-0"].ask(Save())
    assert (folder / "000001-step-7").exists()
    assert any("the store cannot be reached" in line for line in job.log)
