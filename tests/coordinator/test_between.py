"""What comes between: registrations, joins and full disks in the middle of a change."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.coordinator.played import SECONDS, jobs, until
from tests.coordinator.test_registration import hold, registration

from syncline import Rule
from syncline.core.members import Member
from syncline.core.membership import JobState
from syncline.core.wire.control import Host, Over, Prepare, SeedTo, Uploaded
from syncline.core.wire.message import Done
from syncline.errors import FencedError, ProtocolError, StoreError
from syncline.net.memory import HeapMemory
from syncline.net.transport import Peer
from syncline.server.hosting import Hosting
from syncline.server.pool import InlinePool
from syncline.server.storage import SliceStorage
from syncline.testing.local import local_job
from syncline.worker.job import Job

__all__ = ["jobs"]


def test_slices_registered_while_backups_get_their_seats_are_hosted_anew_when_their_server_dies(jobs: Any) -> None:
    job = jobs(replicas=2, slice_bytes=4096).begin()
    chief, server = job["worker-0"], job["server-0"]
    assert chief.ask(registration()).upload == 0
    hold(server, Prepare)
    chief.endpoint.call(Uploaded(0))
    until(lambda: bool(server.held), "the replica sets are on their way")
    second = chief.ask(registration("v", ordinal=1))
    server.holds.clear()
    job.kill("server-1")

    def hosted() -> set[int]:
        return {number for message in server.all(Host) if message.segment.index == 1 for number in message.slices}

    until(lambda: hosted() == {part.id for part in second.segments[1].slices}, "all of it is here now")


def test_a_registration_that_is_taken_back_while_backups_get_their_seats_is_no_trouble(jobs: Any) -> None:
    job = jobs(replicas=2, slice_bytes=4096).begin()
    chief, server = job["worker-0"], job["server-0"]
    assert chief.ask(registration()).upload == 0
    hold(server, Host)
    call = chief.endpoint.call(registration("v", ordinal=1))
    until(lambda: bool(server.held), "it is asked to host it")
    refused = server.held.pop()
    server.holds = {Prepare}
    chief.endpoint.call(Uploaded(0))
    until(lambda: bool(server.held), "the replica sets are on their way")
    refused.refuse(ProtocolError("no memory"))
    with pytest.raises(ProtocolError):
        call.wait(SECONDS)
    server.holds.clear()
    job.kill("server-1")
    until(lambda: {primary for primary, _ in job.replica_sets().values()} == {"server-0"}, "the watch goes on")


def test_a_disk_that_is_full_for_one_save_leaves_nobody_waiting(jobs: Any) -> None:
    job = jobs(replicas=2, slice_bytes=4096).begin()
    chief, save, failed = job["worker-0"], job.disk.save, []
    assert chief.ask(registration()).upload == 0

    def once(state: bytes, *others: Any, **more: Any) -> None:
        if not failed and msgspec.msgpack.decode(state, type=JobState).ready:
            failed.append(1)
            raise StoreError("the disk is full")
        save(state, *others, **more)

    job.disk.save = once
    assert chief.ask(Uploaded(0)) == Done() and failed


def no_way(member: Member) -> Any:
    raise AssertionError("nothing is dialled")


def test_a_server_that_has_just_joined_is_not_taken_for_one_that_is_out() -> None:
    """The change was begun before it came; its word reaches us after the roster that names the newcomer."""
    hosting = Hosting(InlinePool(), SliceStorage(), create_memory=HeapMemory, dial=no_way, log=print)
    old, new = Member("server-0", "server", 1, "a", since=1), Member("server-1", "server", 9, "a", since=8)
    hosting.hear([old, new], ())
    hosting.fence_servers([("server-0", 1)], 7)
    for server in (Peer("server", "server-0", 1), Peer("server", "server-1", 9)):
        hosting.check_sender(server, 0)
    hosting.fence_servers([("server-0", 1)], 9)
    hosting.check_sender(Peer("server", "server-0", 1), 0)
    with pytest.raises(FencedError, match="incarnation 9, is out"):
        hosting.check_sender(Peer("server", "server-1", 9), 0)


def test_a_server_that_came_late_gets_no_new_parameters_before_it_knows_the_workers(tmp_path: Any) -> None:
    with local_job(1, 2, "sync", folder=str(tmp_path), replicas=1) as job:

        def first(worker: Job) -> None:
            worker.kv.register({"w": np.zeros(8, np.float32)}, Rule("Add"))
            worker.kv.push({"w": np.ones(8, np.float32)}).wait()

        def then(worker: Job) -> Any:
            worker.kv.register({"v": np.zeros(8, np.float32)}, Rule("Add"))
            worker.kv.push({"v": np.ones(8, np.float32)}).wait()
            return worker.kv.pull(["v"])["v"].tolist()

        job.run(first)
        state = job.coordinator.membership.state
        (replica_set,) = state.replica_sets.values()
        (idle,) = {"server-0", "server-1"} - {replica_set.primary}
        job.kill(idle)
        until(lambda: idle not in state.members and not state.is_changing, "it is out")
        job.add_server(idle)
        assert job.run(then, SECONDS) == [[1.0] * 8]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is shown, too
@pytest.mark.parametrize("where", ["_has_work", "_step"])
def test_a_bug_in_the_thread_of_changes_ends_in_a_verdict(jobs: Any, where: str) -> None:
    """Also where it only looks whether there is something to do: nobody would ever come, go or be fenced again."""
    job = jobs().begin()
    reconfigurer = job.coordinator.reconfigurer

    def broken() -> float:
        raise KeyError("server-9")

    setattr(reconfigurer, where, broken)
    job.coordinator.job.wake_reconfigurer()
    until(lambda: bool(job["worker-0"].all(Over)), "everyone hears of it")
    (over,) = job["worker-0"].all(Over)
    assert over.failed and "coordinator is gone: it has a bug: KeyError: 'server-9'" in over.reason


def test_no_slice_is_given_to_a_server_that_has_not_heard_of_it(jobs: Any) -> None:
    """It has just joined: whatever the thread of changes decides in that moment does not count on it yet."""
    job = jobs(replicas=2, slice_bytes=4096).begin()
    job.register()
    server, event = job["server-0"], job.coordinator.job.event
    job.kill("server-1")
    until(lambda: set(job.replica_sets().values()) == {("server-0", "")}, "all of it is on one")
    server.heard.clear()

    def slowly(text: str, *more: Any) -> None:
        event(text, *more)
        if "has joined" in text:
            job.coordinator.job.wake_reconfigurer()
            time.sleep(0.2)  # the thread of changes may do what it likes

    job.coordinator.job.event = slowly
    again = job.play("server", "server-1")
    again.holds.add(Host)
    assert again.joined(again.ask_to_join()).late
    until(lambda: bool(again.held), "it is told of the layout")
    assert not server.all(SeedTo)
    again.holds.clear()
    for request in again.held:
        request.reply(Done())
    until(lambda: bool(server.all(SeedTo)), "now it gets its backups")
