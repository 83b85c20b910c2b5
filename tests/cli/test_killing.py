"""Whom `syncline chaos` may kill: what a job survives, and never more at once."""

from __future__ import annotations

from typing import Any

from syncline.cli.killing import candidates
from syncline.stats import JobStatus, MemberStatus

ROLES = ["worker", "server", "coordinator"]
ALL = ["coordinator", "server-0", "server-1", "worker-0", "worker-1"]


def member(name: str, incarnation: int) -> MemberStatus:
    role = name.partition("-")[0]
    slices = 3 if role == "server" else 0
    return MemberStatus(
        name=name, role=role, incarnation=incarnation, host="local", since=1, heard_seconds=0.0, deadline_seconds=2.0,
        rtt_seconds=0.0, state="working", num_primary=slices, num_backup=slices,
    )  # fmt: skip


def status(replicas: int = 2, **incarnations: int) -> JobStatus:
    known = {"server-0": 1, "server-1": 2, "worker-0": 3, "worker-1": 4}
    known |= {name.replace("_", "-"): number for name, number in incarnations.items()}
    return JobStatus(
        job="1", name="job", term=1, generation=1, policy="async", replicas=replicas, ack="replicated", protection="",
        seconds=1.0, members=[member(*one) for one in known.items()], waits=[], why="", events=[],
    )  # fmt: skip


def found(status: JobStatus, alive: Any = ALL, killed: Any = ()) -> set[str]:
    each = candidates(status, alive, ROLES, set(killed))
    assert all(name.startswith(role) for role, names in each.items() for name in names)
    return {name for names in each.values() for name in names}


def test_anyone_while_the_job_is_whole() -> None:
    assert found(status()) == set(ALL)
    assert found(status(), killed=[("server-0", 0), ("worker-1", 1)]) == set(ALL)  # lives that are over
    assert candidates(status(), ALL, ["worker"], ()) == {"worker": ["worker-0", "worker-1"]}


def test_a_server_that_was_killed_counts_as_there_until_the_job_says_otherwise() -> None:
    """Its process may still be seen to run, and the backups of the last look may be gone with it. A worker that dies
    in the same step would tear that step."""
    assert found(status(), killed=[("server-1", 2)]) == {"coordinator"}
    assert found(status(server_1=7), killed=[("server-1", 2)]) == set(ALL)


def test_no_server_beside_a_worker_whose_death_is_not_settled() -> None:
    spared = found(status(), killed=[("worker-1", 4)])
    assert spared == {"coordinator", "worker-0", "worker-1"}


def test_no_server_while_another_one_does_not_run() -> None:
    alive = [name for name in ALL if name != "server-0"]
    assert found(status(), alive) == {"coordinator", "worker-0", "worker-1"}
