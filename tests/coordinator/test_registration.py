"""Registrations at the coordinator by itself, while servers and coordinators come and go."""

from __future__ import annotations

from typing import Any

import pytest
from tests.coordinator.played import Played, jobs, until
from tests.patience import PATIENCE

from syncline.core.layout import Parameter
from syncline.core.rule import Rule
from syncline.core.wire.control import Host, Prepare, Register, Registered, Rejoin, Roster, SeedTo, Uploaded
from syncline.core.wire.message import Done
from syncline.errors import ProtocolError

__all__ = ["jobs"]


def registration(name: str = "w", num_items: int = 4096, ordinal: int = 0) -> Register:
    return Register(ordinal, [Parameter(name, "float32", (num_items,))], [Rule("Add").spec], "mean")


def hold(member: Played, kind: type[Any]) -> None:
    member.held.clear()
    member.holds.add(kind)


def test_a_segment_that_could_not_be_hosted_is_out_of_the_journal(jobs: Any) -> None:
    """The next coordinator would have it otherwise, without replica sets, and number all later segments
    differently."""
    job = jobs(slice_bytes=4096).begin()
    job.register()
    hold(job["server-1"], Host)
    call = job["worker-0"].endpoint.call(registration("v", ordinal=1))
    until(lambda: bool(job["server-1"].held), "asked to host")
    assert sorted(job.disk.segments) == [0, 1]
    job["server-1"].holds.clear()
    job["server-1"].held[0].refuse(ProtocolError("no memory"))
    with pytest.raises(ProtocolError, match="no memory"):
        call.wait(PATIENCE)
    assert (
        sorted(job.disk.segments) == [0]
        and job.disk.last.replica_sets.keys() == job.coordinator.job.registry.replica_sets.keys()
    )
    again = jobs(disk=job.disk, slice_bytes=4096)
    assert [segment.index for segment in again.coordinator.job.registry.layout.segments] == [0]
    smaller = job["worker-0"].ask(registration("v", 2048, ordinal=1))
    assert isinstance(smaller, Registered) and sorted(job.disk.segments) == [0, 1], "its number is free again"


def check_it_is_uploaded_again(chief: Played, answer: Any) -> None:
    """The first word of values that are gone by now does not count; the second does."""
    assert isinstance(answer, Registered) and answer.upload == 0
    told = chief.all(Roster)[-1]
    assert (
        {replica_set.primary for replica_set in told.replica_sets}
        == {replica_set.primary for replica_set in answer.replica_sets}
        == {"server-0"}
    )
    assert chief.ask(Uploaded(0)) == Done()


def test_values_that_went_with_a_server_before_the_chief_s_word_are_uploaded_again(jobs: Any) -> None:
    """Its slices are hosted again, full of zeros, when the late word comes: they must not become the values."""
    job = jobs(slice_bytes=4096).begin()
    chief = job["worker-0"]
    assert chief.ask(registration()).upload == 0
    job.kill("server-1")
    until(
        lambda: {p for p, _ in job.replica_sets().values()} == {"server-0"} and not job.disk.last.is_changing,
        "settled",
    )
    answer = chief.ask(Uploaded(0))
    assert not job.disk.last.ready
    check_it_is_uploaded_again(chief, answer)
    assert job.disk.last.ready == [0]


def test_so_are_values_whose_server_dies_before_they_have_a_backup(jobs: Any) -> None:
    job = jobs(replicas=2, slice_bytes=4096).begin()
    chief = job["worker-0"]
    assert chief.ask(registration()).upload == 0
    hold(job["server-1"], SeedTo)
    call = chief.endpoint.call(Uploaded(0))
    until(lambda: bool(job["server-1"].held), "being seeded")
    job.kill("server-1")
    check_it_is_uploaded_again(chief, call.wait(PATIENCE))
    assert job.disk.last.ready == [0]


def test_so_are_values_whose_server_dies_while_their_backups_are_named(jobs: Any) -> None:
    """The plan is taken back, and with it the backups: nobody has the values, whatever the replica sets said just
    before."""
    job = jobs(replicas=2, slice_bytes=4096).begin()
    chief = job["worker-0"]
    assert chief.ask(registration()).upload == 0
    hold(job["server-0"], Prepare)
    call = chief.endpoint.call(Uploaded(0))
    until(lambda: bool(job["server-0"].held), "prepared")
    job["server-0"].holds.clear()
    job.kill("server-1")
    check_it_is_uploaded_again(chief, call.wait(PATIENCE))
    assert job.disk.last.ready == [0]


def test_a_word_that_comes_while_a_server_s_death_is_seen_to_waits(jobs: Any) -> None:
    """Asked too early, the chief would upload to a server that is out, and that may live and say yes."""
    job = jobs(slice_bytes=4096).begin()
    chief = job["worker-0"]
    assert chief.ask(registration()).upload == 0
    hold(job["server-0"], Host)
    job.kill("server-1")
    until(lambda: bool(job["server-0"].held), "being hosted again")
    call = chief.endpoint.call(Uploaded(0))
    assert not call.arrives(0.05)
    job["server-0"].holds.clear()
    job["server-0"].held[0].reply(Done())
    check_it_is_uploaded_again(chief, call.wait(PATIENCE))


def test_a_coordinator_that_comes_back_asks_for_values_that_it_does_not_know_of(jobs: Any) -> None:
    first = jobs(servers=1, slice_bytes=4096).begin()
    assert first["worker-0"].ask(registration()).upload == 0
    first.coordinator.close()
    second = jobs(servers=1, disk=first.disk, slice_bytes=4096)
    for name in ("server-0", "worker-0", "worker-1"):
        member = second.members[name] = first[name]
        member.job = second
        member.connect()
        member.ask(Rejoin(name, member.incarnation))
    check_it_is_uploaded_again(second["worker-0"], second["worker-0"].ask(Uploaded(0)))
