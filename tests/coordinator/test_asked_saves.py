"""Who asks for a save, and what it gets: none from before it asked, none lost, nobody who waits for nothing."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from tests.coordinator.played import SECONDS, ask, jobs, until
from tests.coordinator.saves import begun, folder

from syncline.core.wire.checkpoints import CloseSnapshotBarrier, Expect, Finish, Mark, Save, Saved, WriteMarked
from syncline.core.wire.message import Done
from syncline.errors import ConnectionLost

__all__ = ["folder", "jobs"]


@pytest.mark.parametrize("message", [CloseSnapshotBarrier, Mark])
def test_a_save_that_is_being_cut_is_nobodys_who_asks_now(jobs: Any, folder: pathlib.Path, message: Any) -> None:
    """Its commit was held by the gate, and is in no slice that was marked: it gets the next one."""
    job = begun(jobs, folder)
    job["server-1"].holds.add(message)
    first = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is being cut")
    second = ask_later(job, "worker-1")
    job["server-1"].holds.clear()
    answer_held(job["server-1"])
    assert first.wait(SECONDS) == Saved("000001-step-7", 7)
    assert second.wait(SECONDS) == Saved("000002-step-7", 7)


def ask_later(job: Any, name: str) -> Any:
    call = job[name].endpoint.call(Save())
    until(lambda: job.coordinator.debug_state().next_save, "it is heard")
    return call


def answer_held(server: Any) -> None:
    (request,) = server.held
    if isinstance(request.message, CloseSnapshotBarrier):
        request.reply(server.close_gate(request.message))
    else:
        server.marked = server.slices()
        request.reply(Done())


def test_who_hurries_hurries_also_when_a_save_is_made_again(jobs: Any, folder: pathlib.Path) -> None:
    """SIGTERM came while one was being written, which then fails: the launcher's time is short."""
    job = begun(jobs, folder)
    job["server-1"].holds.add(WriteMarked)
    first = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is being written")
    saves = job.coordinator.saves
    with job.coordinator.job.lock:
        saves.request_save("SIGTERM", hurries=True, is_final=True)
    job["server-1"].holds.clear()
    job["worker-0"].holds.add(Expect)
    job["server-1"].held[0].refuse(ConnectionLost("server-1 is gone"))
    until(lambda: bool(job["worker-0"].held), "it is made again")
    assert saves.current.request.hurries and saves.current.request.is_final
    job["worker-0"].held[0].reply(Done())
    assert isinstance(first.wait(SECONDS), Saved)


def test_in_rounds_the_asker_does_not_wait_for_those_who_wait_for_it(
    jobs: Any, folder: pathlib.Path, monkeypatch: Any
) -> None:
    """`if job.rank == 0: job.save()`: the others are in their next step, which needs the asker's."""
    monkeypatch.setattr("syncline.coordinator.saves.ASKER_SECONDS", 0.05)
    job = begun(jobs, folder)
    job["worker-1"].holds.add(Expect)
    assert job["worker-0"].ask(Save()).name == ""
    assert not job["server-0"].all(CloseSnapshotBarrier)
    job["worker-1"].held[0].reply(Done())
    until(lambda: job.disk.last.saves.num_saved == 1, "it is made when all have come to a boundary")


def test_in_rounds_the_asker_does_not_wait_for_the_save_before(
    jobs: Any, folder: pathlib.Path, monkeypatch: Any
) -> None:
    """Which may wait for the script of one that waits for the asker's step."""
    monkeypatch.setattr("syncline.coordinator.saves.ASKER_SECONDS", 0.05)
    job = begun(jobs, folder)
    job["server-1"].holds.add(WriteMarked)
    first = job["worker-1"].endpoint.call(Save())
    until(lambda: bool(job["server-1"].held), "it is being written")
    assert job["worker-0"].ask(Save()).name == ""
    job["server-1"].holds.clear()
    job["server-1"].held[0].reply(job["server-1"].write_marked(job["server-1"].held[0].message))
    assert first.wait(SECONDS).name == "000001-step-7"
    until(lambda: job.disk.last.saves.num_saved == 2, "it is made all the same")


@pytest.mark.parametrize("policy", ["async", "sync"])
def test_whoever_is_waited_for_by_nobody_waits_for_its_save(
    jobs: Any, folder: pathlib.Path, monkeypatch: Any, policy: str
) -> None:
    monkeypatch.setattr("syncline.coordinator.saves.ASKER_SECONDS", 0.05)
    job = begun(jobs, folder, policy=policy)
    slow = "worker-1" if policy == "async" else "worker-0"
    job[slow].holds.add(Expect)
    call = job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job[slow].held), "it is expected")
    assert not call.arrives(0.3)
    job[slow].held[0].reply(Done())
    assert call.wait(SECONDS).name == "000001-step-7"


def test_nothing_spins_while_a_slice_is_nowhere(jobs: Any, folder: pathlib.Path) -> None:
    """Its server is gone and it has no other yet: there is nothing to do before that is known."""
    job = begun(jobs, folder)
    saves, replica_sets = job.coordinator.saves, job.coordinator.membership.state.replica_sets
    job["worker-0"].holds.add(Expect)
    job["worker-0"].endpoint.call(Save())
    until(lambda: bool(job["worker-0"].held), "it is expected")
    with job.coordinator.job.lock:
        known, replica_sets[0] = replica_sets[0], type(replica_sets[0])(0, "server-9")
        job["worker-0"].held[0].reply(Done())
        assert not saves.has_work(saves.current.began + 1e6)
        replica_sets[0] = known


def test_what_only_slices_of_few_updates_have_got_is_saved_at_the_end(jobs: Any, folder: pathlib.Path) -> None:
    """The second phase of a script pushes to a part of the model that is behind in updates: the highest stays."""
    job = begun(jobs, folder)
    job["worker-0"].ask(Save())
    job["server-1"].num_versions += 3
    calls = [job[name].endpoint.call(Finish()) for name in ("worker-0", "worker-1")]
    assert [call.wait(SECONDS) for call in calls] == [Done(), Done()]
    assert job.disk.last.saves.num_saved == 2


def test_the_log_says_how_large_a_save_is_and_how_long_the_gate_was_closed(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    ask(job, Save("SIGTERM"))
    (line,) = [line for line in job.log if "saved 000001-step-7" in line]
    words = r"saved 000001-step-7: 16 KiB in [\d.]+ s; commits were held for [\d.]+ ms \(SIGTERM\)"
    assert re.search(words, line)
