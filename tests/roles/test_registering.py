"""Registrations at the coordinator by itself, while servers and coordinators come and go."""

from __future__ import annotations

from typing import Any

import pytest
from tests.roles.played import Played, jobs, until

from syncline.core.control import Host, Register, Registered
from syncline.core.layout import Parameter
from syncline.core.rule import Rule
from syncline.errors import ProtocolError

__all__ = ["jobs"]


def registration(name: str = "w", num_items: int = 4096, ordinal: int = 0) -> Register:
    return Register(ordinal, [Parameter(name, "float32", (num_items,))], [Rule("Add").spec], "mean")


def hold(member: Played, kind: type[Any]) -> None:
    member.held.clear()
    member.holds.add(kind)


def test_a_segment_that_could_not_be_hosted_is_out_of_the_journal(jobs: Any) -> None:
    """The next coordinator would have it otherwise, without seats, and number all later segments differently."""
    job = jobs(slice_bytes=4096).begin()
    job.register()
    hold(job["server-1"], Host)
    call = job["worker-0"].endpoint.call(registration("v", ordinal=1))
    until(lambda: bool(job["server-1"].held), "asked to host")
    assert sorted(job.disk.segments) == [0, 1]
    job["server-1"].holds.clear()
    job["server-1"].held[0].refuse(ProtocolError("no memory"))
    with pytest.raises(ProtocolError, match="no memory"):
        call.wait(10.0)
    assert sorted(job.disk.segments) == [0] and job.disk.last.seats.keys() == job.coordinator.registry.seats.keys()
    again = jobs(disk=job.disk, slice_bytes=4096)
    assert [segment.index for segment in again.coordinator.registry.layout.segments] == [0]
    smaller = job["worker-0"].ask(registration("v", 2048, ordinal=1))
    assert isinstance(smaller, Registered) and sorted(job.disk.segments) == [0, 1], "its number is free again"
