"""Saves at the coordinator: when, the cut, what is written, what is given up; servers and workers are played."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import pytest
from tests.coordinator.played import SECONDS, Disk, ask, jobs, until
from tests.coordinator.saves import begun, folder, manifest

from syncline.coordinator.checkpoint_writer import adopt
from syncline.core.layout import Parameter
from syncline.core.leasing.loader import Loader
from syncline.core.rule import Rule
from syncline.core.wire.checkpoints import (
    CloseSnapshotBarrier,
    EndSave,
    Expect,
    Finish,
    Mark,
    OpenSnapshotBarrier,
    Save,
    Saved,
    WriteMarked,
    WriteScript,
)
from syncline.core.wire.control import AskStatus, Barrier, Heartbeat, Install, Leave, Passed, Register, Registered
from syncline.core.wire.leases import AskLease, AskLeaseAcks, GivenLeaseAcks, OpenEpoch
from syncline.core.wire.message import Done
from syncline.errors import ConfigError, StoreError
from syncline.store import checkpoints
from syncline.store.folders import open_folder

__all__ = ["folder", "jobs"]


def test_a_save_is_expected_then_cut_then_written_then_over(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    saved = job["worker-0"].ask(Save())
    assert saved == Saved("000001-step-7", 7)
    kinds = [type(message) for message in job["server-0"].heard]
    assert [k for k in kinds if k in (CloseSnapshotBarrier, Mark, WriteMarked, EndSave)] == [
        CloseSnapshotBarrier, Mark, WriteMarked, EndSave,
    ]  # fmt: skip
    kinds = [type(message) for message in job["worker-1"].heard]
    assert [k for k in kinds if k in (Expect, WriteScript, EndSave)] == [
        Expect,
        WriteScript,
        EndSave,
    ]
    assert job["worker-1"].all(WriteScript)[0].clock == 7
    made = manifest(folder)
    assert [script.worker for script in made.scripts] == ["worker-0", "worker-1"]
    assert len(made.slices) == 4 and {part.version for part in made.slices} == {7}
    assert checkpoints.pointed(open_folder(str(folder)), "last") == {"checkpoint": "000001-step-7", "step": 7}
    assert job.disk.last.saves.last.name == "000001-step-7" and not job.disk.last.saves.open


def test_servers_that_are_apart_are_told_what_to_let_in(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    ahead = ("worker-0", job["worker-0"].incarnation, 8)
    job["server-1"].clocks = [ahead, job["server-1"].clocks[1]]
    job["worker-0"].ask(Save())
    turns = job["server-0"].all(CloseSnapshotBarrier)
    assert [turn.turn for turn in turns] == [0, 1] and ahead in turns[1].through
    assert job["worker-0"].all(WriteScript)[0].clock == 8


def test_what_was_used_at_the_cut_and_not_confirmed_is_done(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["worker-0"].ask(OpenEpoch("train", 0, Loader(40, 4)))
    lease = job["worker-0"].ask(AskLease("train", 0, []))
    for name in ("server-0", "server-1"):
        job[name].acks = [(lease.lease, 0, 4)]
    job["worker-0"].ask(Save())
    assert manifest(folder).leases.epochs["train"][0].num_done == 4


def test_no_cut_while_a_worker_is_to_say_what_it_has_used(jobs: Any, folder: pathlib.Path) -> None:
    """Slice 0 came back without that: it would be read once more by whoever takes the checkpoint up."""
    job = begun(jobs, folder)
    job["worker-1"].ask(OpenEpoch("train", 0, Loader(40, 4)))
    lease = job["worker-1"].ask(AskLease("train", 0, []))
    job["worker-1"].holds.add(AskLeaseAcks)
    with job.coordinator.job.lock:
        job.coordinator.membership.state.leases.unheard = {"worker-1": job["worker-1"].incarnation}
    call = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["worker-1"].held), "it is asked what it has used")
    assert not call.arrives(0.2) and not job["server-0"].all(CloseSnapshotBarrier)
    job["worker-1"].held[0].reply(GivenLeaseAcks([(lease.lease, 0, 4)]))
    assert isinstance(call.wait(SECONDS), Saved)
    assert manifest(folder).leases.epochs["train"][0].num_done == 4


def test_a_worker_that_is_slow_to_its_boundary_holds_up_nobody(
    jobs: Any, folder: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("syncline.coordinator.saves.EXPECT_SECONDS", 0.05)
    job = begun(jobs, folder)
    job["worker-1"].holds.add(Expect)
    job["worker-0"].ask(Save())
    assert [script.worker for script in manifest(folder).scripts] == ["worker-0"]
    told = "the state of worker-1's script is not in this save: it came to no boundary between two batches in time"
    assert told in str(job.log)


def test_the_chief_is_waited_for(jobs: Any, folder: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("syncline.coordinator.saves.EXPECT_SECONDS", 0.05)
    job = begun(jobs, folder)
    job["worker-0"].holds.add(Expect)
    call = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["worker-0"].held), "it is asked")
    assert not call.arrives(0.3) and not job["server-0"].all(CloseSnapshotBarrier)
    job["worker-0"].held[0].reply(Done())
    assert isinstance(call.wait(SECONDS), Saved)


def test_a_full_disk_costs_the_save_and_the_job_goes_on(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["server-1"].holds.add(WriteMarked)
    call = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is asked")
    job["server-1"].held[0].refuse(StoreError("no space left"))
    with pytest.raises(StoreError, match="no space left"):
        call.wait(SECONDS)
    assert any("a save was given up" in line and "no space left" in line for line in job.log)
    assert [entry.name for entry in folder.iterdir() if entry.is_dir()] == [], "nothing is left behind"
    assert job.disk.last.saves.num_failed == 1 and job["server-0"].all(EndSave)
    job["server-1"].holds.clear()
    assert isinstance(job["worker-0"].ask(Save()), Saved)


def test_a_server_that_is_lost_while_it_writes_has_the_save_made_again(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder, replicas=2)
    until(lambda: all(backup for _, backup in job.replica_sets().values()), "backups")
    job["server-1"].holds.add(WriteMarked)
    call = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is asked")
    job.kill("server-1")
    assert isinstance(call.wait(SECONDS), Saved)
    assert {part.file for part in manifest(folder).slices} == {"server-0.safetensors"}


def test_a_cut_that_does_not_come_to_be_level_is_given_up_after_three_tries(
    jobs: Any, folder: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("syncline.coordinator.saves.SNAPSHOT_SECONDS", 0.05)
    monkeypatch.setattr("syncline.coordinator.saves.AGAIN_SECONDS", 0.01)
    job = begun(jobs, folder)
    job["server-1"].holds.add(CloseSnapshotBarrier)
    with pytest.raises(StoreError, match="after 3 tries"):
        job["worker-0"].ask(Save())
    numbers = [message.number for message in job["server-1"].all(CloseSnapshotBarrier)]
    assert numbers == sorted(set(numbers)) and len(numbers) == 3
    assert [m.number for m in job["server-1"].all(OpenSnapshotBarrier)] == numbers, "commits go on each time"


def test_a_death_in_the_middle_of_a_cut_comes_first(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["server-1"].holds.add(CloseSnapshotBarrier)
    call = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "the gates are being closed")
    job["server-1"].holds.clear()
    for name in ("server-0", "server-1"):
        job[name].clocks = job[name].clocks[:1]
    job.kill("worker-1")
    assert isinstance(call.wait(SECONDS), Saved)
    heard = [
        type(m)
        for m in job["server-1"].heard
        if isinstance(m, CloseSnapshotBarrier | OpenSnapshotBarrier | Install | Mark)
    ]
    assert heard == [CloseSnapshotBarrier, OpenSnapshotBarrier, Install, CloseSnapshotBarrier, Mark]


def test_saves_come_by_steps(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder, save_every="5steps")
    until(lambda: job.coordinator.saves.due_step == 5, "it has begun to count")
    job["server-0"].ask(Heartbeat(num_updates=4))
    assert not job["worker-0"].all(Expect)
    job["server-0"].ask(Heartbeat(num_updates=5))
    until(lambda: bool(job.disk.last.saves.last), "it is time")
    assert job.coordinator.saves.due_step == 12, "from what was saved on"


def test_saves_come_by_time(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder, save_every="50ms", keep=2)
    until(lambda: job.disk.last.saves.num_saved >= 3, "they come by themselves")
    assert len([entry for entry in folder.iterdir() if entry.is_dir()]) <= 3, "old ones go"


def test_without_a_folder_a_save_is_an_error_that_says_so(jobs: Any) -> None:
    job = jobs().begin()
    with pytest.raises(ConfigError, match="--checkpoint DIR"):
        job["worker-0"].ask(Save())


def test_scripts_that_have_ended_wait_for_the_last_save(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    first = job["worker-0"].endpoint.call(Finish())
    assert not first.arrives(0.2)
    assert not job["worker-0"].all(Expect)
    second = job["worker-1"].endpoint.call(Finish())
    assert first.wait(SECONDS) == second.wait(SECONDS) == Done()
    assert manifest(folder).name == "000001-step-7"
    for name in ("worker-0", "worker-1"):
        job[name].ask(Leave())
    until(lambda: job.coordinator.membership.outcome is not None, "the job is over")
    assert not job.coordinator.membership.outcome.failed


def test_nothing_new_is_not_saved_again_at_the_end(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["worker-0"].ask(Save())
    calls = [job[name].endpoint.call(Finish()) for name in ("worker-0", "worker-1")]
    assert [call.wait(SECONDS) for call in calls] == [Done(), Done()]
    assert job.disk.last.saves.num_saved == 1


def test_a_worker_that_dies_is_not_waited_for_at_the_end(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    call = job["worker-0"].endpoint.call(Finish())
    assert not call.arrives(0.1)
    job.kill("worker-1")
    for name in ("server-0", "server-1"):
        job[name].clocks = job[name].clocks[:1]
    assert call.wait(SECONDS) == Done()


# -- a coordinator that dies ------------------------------------------------------------------------------


def test_the_next_coordinator_ends_the_save_and_makes_another(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["server-1"].holds.add(WriteMarked)
    job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is being written")
    left = job.disk.last.saves
    assert left.open == 1 and left.open_folder
    job.coordinator.close()
    job.coordinator.job.over.set()
    until(lambda: not pathlib.Path(left.open_folder).exists() or job.coordinator.saves is not None, "it ends")
    again = _next(jobs, job)
    until(lambda: any(m.number == 1 for m in again["server-0"].all(EndSave)), "what was marked is let go")
    until(lambda: again.disk.last.saves.num_saved == 1, "a new save is made soon")
    assert again.disk.last.saves.open == 0


def test_the_next_coordinator_waits_for_workers_that_come_back_late(jobs: Any, folder: pathlib.Path) -> None:
    """Its first save had no script of a worker that was slow to connect again, and said nothing."""
    job = begun(jobs, folder)
    job["server-1"].holds.add(WriteMarked)
    job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is being written")
    job.coordinator.close()
    job.coordinator.job.over.set()
    until(lambda: job.coordinator.saves.current is None, "it ends")
    again = _next(jobs, job, but="worker-1")
    until(lambda: bool(again["worker-0"].all(Expect)), "a new save has begun")
    assert not again["server-0"].all(CloseSnapshotBarrier)
    _rejoin(again, "worker-1", job["worker-1"])
    until(lambda: again.disk.last.saves.num_saved == 1, "it is made with both")
    assert [script.worker for script in manifest(folder).scripts] == ["worker-0", "worker-1"]


def _next(jobs: Any, job: Any, but: str = "") -> Any:
    """The coordinator of the next term, and the same members."""
    disk = Disk()
    disk.states, disk.segments = list(job.disk.states), dict(job.disk.segments)
    again = jobs(disk=disk, workers=2, servers=2)
    for name, member in job.members.items():
        if name != but:
            _rejoin(again, name, member)
    return again


def _rejoin(again: Any, name: str, member: Any) -> None:
    from syncline.core.wire.control import Rejoin

    played = again.play(member.role, name)
    played.incarnation = played.stamp.incarnation = member.incarnation
    played.clocks, played.num_updates = member.clocks, member.num_updates
    played.ask(Rejoin(name, member.incarnation))


def test_the_pointer_is_json(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    assert isinstance(ask(job, Save("SIGTERM")), Saved), "the launcher may ask too"
    assert json.loads((folder / "last").read_text())["checkpoint"] == "000001-step-7"
    assert any("saved" in line and "SIGTERM" in line for line in job.log)


def test_how_saves_stand_is_told(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["worker-0"].ask(Save())
    saves = ask(job, AskStatus()).status.saves
    assert (saves.num_saved, saves.last, saves.step) == (1, "000001-step-7", 7)
    assert saves.told() == f"1 saved in {folder}; the last: 000001-step-7"


def test_the_end_waits_for_the_second_copy(jobs: Any, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    job = begun(jobs, folder, checkpoint_mirror=str(tmp_path / "mirror"))
    calls = [job[name].endpoint.call(Finish()) for name in ("worker-0", "worker-1")]
    assert [call.wait(SECONDS) for call in calls] == [Done(), Done()]
    assert manifest(tmp_path / "mirror") == manifest(folder)
    assert checkpoints.pointed(open_folder(str(tmp_path / "mirror")), "last") == {
        "checkpoint": "000001-step-7",
        "step": 7,
    }


def test_a_mirror_that_refuses_costs_the_second_copy_only(
    jobs: Any, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("in its way")
    job = begun(jobs, folder, checkpoint_mirror=str(tmp_path / "file" / "mirror"))
    assert isinstance(job["worker-0"].ask(Save()), Saved)
    until(lambda: any("has no second copy" in line for line in job.log), "it is said")
    assert job.disk.last.saves.num_failed == 0


def test_who_registers_during_a_cut_waits_for_it(jobs: Any, folder: pathlib.Path) -> None:
    """A slice without its values must not be in a checkpoint."""
    job = begun(jobs, folder)
    job["server-1"].holds.add(CloseSnapshotBarrier)
    saving = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "the gates are being closed")
    message = Register(1, [Parameter("v", "float32", (4,))], [Rule("Add").spec], "mean")
    registering = job["worker-0"].endpoint.call(message)
    assert not registering.arrives(0.1)
    job["server-1"].holds.clear()
    job["server-1"].held[0].reply(job["server-1"].close_gate(CloseSnapshotBarrier(1)))
    assert isinstance(saving.wait(SECONDS), Saved)
    assert isinstance(registering.wait(SECONDS), Registered)
    assert [p.name for segment in manifest(folder).segments for p in segment.parameters] == ["w"]


def test_barriers_and_leases_do_not_wait_for_a_script_that_has_ended(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["worker-1"].endpoint.call(Finish())
    until(lambda: "worker-1" in job.coordinator.membership.finishing, "it is heard")
    assert isinstance(job["worker-0"].ask(Barrier("b", 1, 0)), Passed)
    job["worker-0"].ask(OpenEpoch("train", 0, Loader(8, 4)))
    assert len(job["worker-0"].ask(AskLease("train", 0, [])).span) == 8, "all of it is its own"


def test_a_folder_that_hosts_do_not_share_is_no_checkpoint(jobs: Any, folder: pathlib.Path) -> None:
    """A server on another host has written to a disk of its own."""
    job = begun(jobs, folder)
    job["server-1"].holds.add(WriteMarked)
    call = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is asked")
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (asked,) = job["server-1"].held
    message = msgspec.structs.replace(asked.message, folder=str(elsewhere))
    asked.reply(job["server-1"].write_marked(message))
    with pytest.raises(StoreError, match="must be a folder that all hosts share"):
        call.wait(SECONDS)
    assert not list(folder.glob("*/manifest.json"))


# -- what the store has against it ------------------------------------------------------------------------


def test_an_unforeseen_error_after_a_save_stops_neither_saves_nor_the_end(
    jobs: Any, folder: pathlib.Path, monkeypatch: Any
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("syncline.store.checkpoints.prune", broken)
    job = begun(jobs, folder)
    assert isinstance(job["worker-0"].ask(Save()), Saved)
    assert any("is saved, but: RuntimeError" in line for line in job.log)
    assert job["worker-0"].ask(Save()).name == "000002-step-7"
    calls = [job[name].endpoint.call(Finish()) for name in ("worker-0", "worker-1")]
    assert [call.wait(SECONDS) for call in calls] == [Done(), Done()]


def test_another_job_in_the_same_folder_gets_another_number(
    jobs: Any, folder: pathlib.Path, monkeypatch: Any
) -> None:
    """Both have found the same number; what fails in one takes nothing of the other away."""
    job = begun(jobs, folder)
    other = checkpoints.begin(open_folder(str(folder)), 1, 7, "another", "its own")
    monkeypatch.setattr("syncline.store.checkpoints.next_number", lambda folder: len(list(folder.list())))
    assert job["worker-0"].ask(Save()).name == "000002-step-7"
    assert other.list() == ["begun.json"]
    job["server-1"].holds.add(WriteMarked)
    call = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is asked")
    job["server-1"].held[0].refuse(StoreError("no space left"))
    with pytest.raises(StoreError, match="no space left"):
        call.wait(SECONDS)
    assert other.list() == ["begun.json"]


@pytest.mark.parametrize("trouble", [True, False])
def test_what_a_coordinator_left_is_removed_only_when_it_is_no_checkpoint(
    jobs: Any, folder: pathlib.Path, monkeypatch: Any, trouble: bool
) -> None:
    """It died right after the manifest was there; the next one's first look at the store fails."""
    job = begun(jobs, folder)
    name = job["worker-0"].ask(Save()).name
    token, said = job.disk.last.saves.token, []
    assert token
    path = folder / name / "manifest.json"
    if trouble:
        whole = open_folder(str(folder / name))

        def fail(*_: Any) -> Any:
            raise StoreError("the store cannot be reached")

        monkeypatch.setattr(type(whole), "read", fail)
    else:
        path.write_bytes(b"no manifest\n")
    assert adopt(str(folder / name), token, said.append) is None
    assert path.exists() == trouble
    assert bool(said) == trouble


def test_what_the_next_coordinator_finds_whole_is_pointed_at(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    name = job["worker-0"].ask(Save()).name
    job.coordinator.close()
    (folder / "last").unlink()
    state = job.disk.last
    state.saves.open, state.saves.open_folder, state.saves.last = 1, str(folder / name), None
    job.disk.states.append(msgspec.msgpack.encode(state))
    again = _next(jobs, job)
    until((folder / "last").exists, "it is pointed at")
    assert any("was already complete" in line for line in again.log)
