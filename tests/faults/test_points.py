"""kill -9 of each role at each named point of the protocol: every acknowledged push counts once, none twice.

In `make test` a job of tests/launch/test_survive.py passes one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from syncline.faults import POINTS

VICTIM = {"coordinator": "coordinator", "server": "server-1", "worker": "worker-1"}
#: Passed only when something else happens: a server or a worker is killed as well, long before.
AFTER_A_DEATH = {
    "reconfigure.kept",
    "reconfigure.prepared",
    "reconfigure.installed",
    "prepare.held",
    "install.begun",
    "install.done",
}
#: Passed when the timing is so: a worker that hears of a move by itself does not fetch the roster.
NOT_ALWAYS = {"refresh.done", "enter.asked"}


def cases() -> list[Any]:
    found = []
    for role, points in POINTS.items():
        for point in points:
            if point.startswith(("save.", "manifest.", "snapshot_barrier.", "script.")):  # passed by jobs that save
                continue
            found += [pytest.param(role, point, p, id=f"{role}-{point}-{p}") for p in ("sync", "async")]
    return found


@pytest.mark.proof
@pytest.mark.parametrize(("role", "point", "policy"), cases())
def test_a_death_at_this_point_loses_and_doubles_nothing(
    hurt: Callable[..., Any], role: str, point: str, policy: str
) -> None:
    victim = VICTIM[role]
    often = 20 if point.partition(".")[0] in ("commit", "replicate", "slice") else 1
    if point in ("prepare.held", "install.begun", "install.done"):
        # The change that seeds the first backups passes these too: the next one is meant.
        often = 3
    faults = [f"{victim}@{point}#{often}=kill"]
    other = "worker-2" if role != "worker" else "server-1"
    is_after_a_death = point in AFTER_A_DEATH or point in NOT_ALWAYS
    if is_after_a_death:
        faults.append(f"{other}@{'commit.landed' if other != 'server-1' else 'slice.applied'}#30=kill")
    job = hurt("-w", "3", "-s", "2", "--replicas", "2", "--policy", policy, fault=",".join(faults))
    dead = [other] if is_after_a_death else []
    if point not in NOT_ALWAYS:
        dead.append(victim)
    for member in dead:
        job.until(f"{member} was killed by SIGKILL")
        job.until_back(member)
    if point in NOT_ALWAYS:
        time.sleep(2.0)
    job.until_at_work("worker-0", "worker-1")  # some points are passed before the first push
    job.ends_well()
