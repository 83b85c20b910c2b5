"""Members that are killed, stopped, or told to end: the job continues, and the ledger stays right."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.proof]
REPLICAS = ("-w", "3", "-s", "2", "--replicas", "2")


@pytest.mark.parametrize("policy", ["sync", "bounded:2", "async"])
@pytest.mark.parametrize("member", ["worker-1", "server-1", "coordinator"])
def test_a_killed_member_comes_back_and_nothing_is_lost(hurt: Callable[..., Any], member: str, policy: str) -> None:
    job = hurt(*REPLICAS, "--policy", policy)
    job.until_at_work("worker-2")
    job.hit(member)
    job.until_back(member)
    output = job.ends_well()
    assert f"{member} was killed by SIGKILL" in output


@pytest.mark.parametrize("seconds", [1.0, 5.0, 30.0])
@pytest.mark.parametrize("member", ["worker-1", "server-1", "coordinator"])
def test_a_stopped_member_is_evicted_after_its_deadline_and_does_no_harm_when_it_goes_on(
    hurt: Callable[..., Any], member: str, seconds: float
) -> None:
    """SIGSTOP, then SIGCONT: it comes back with stale state, hears that it is out, says so and ends as evicted."""
    job = hurt(*REPLICAS, "--policy", "sync")
    job.until_at_work("worker-2")
    pid = job.pid(member)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    is_out = seconds > 4.0 and member != "coordinator"
    if is_out:
        job.until_back(member)
    output = job.ends_well()
    assert job.evicted() == ([member] if is_out else []), output
    if is_out:
        assert re.search(rf"{member}, incarnation \d+, was removed from the job: ", output), output
        # The launcher gives an evicted process a few seconds to end by itself.
        again = rf"syncline: {member} was evicted(, and ended by the launcher)?; starts again"
        assert re.search(again, output), output


def test_sigterm_lets_a_worker_finish_its_step_and_a_server_hand_over_its_slices(hurt: Callable[..., Any]) -> None:
    job = hurt("-w", "3", "-s", "2", "--replicas", "1", "--policy", "async")
    job.until_at_work("worker-2")
    job.hit("worker-1", signal.SIGTERM)
    job.hit("server-1", signal.SIGTERM)
    job.until("server-1 has handed over its slices and leaves")
    output = job.ends_well()
    assert not job.evicted() and "revoked" not in output, output


def test_a_server_that_has_left_is_not_started_again(hurt: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """It beats until its process ends: such a beat comes after the coordinator has let it go, and is no offence."""
    (tmp_path / "syncline.toml").write_text("beat_seconds = 0.003\n")
    job = hurt("-w", "2", "-s", "2", "--replicas", "1", "--policy", "async")
    job.until_at_work("worker-0", "worker-1")
    job.hit("server-1", signal.SIGTERM)
    job.until("server-1 has handed over its slices and leaves")
    time.sleep(2.0)
    output = job.ends_well()
    assert "FencedError" not in output and "starts again" not in output, output


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_server_and_a_worker_in_the_same_step_are_said_and_the_job_goes_on(
    hurt: Callable[..., Any], policy: str
) -> None:
    """Outside of what is promised, where a push was told to some servers only: it is printed. Nothing is doubled."""
    faults = "worker-1@commit.told#40=kill,server-1@commit.decided#40=kill"
    job = hurt(*REPLICAS, "--policy", policy, fault=faults, script=["--may-lose"])
    for member in ("worker-1", "server-1"):
        job.until(f"{member} was killed by SIGKILL")
        job.until_back(member)
    output = job.ends_well(may_lose=True)
    found = re.findall(r"ledger: \d+ acknowledged, (\d+) lost, 0 doubled(.*)", output)
    was_said = "lost in one step, which is outside of what is promised" in output
    assert was_said or found[-1] == ("0", ""), output


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_the_coordinator_dies_while_a_backup_is_seeded(hurt: Callable[..., Any], policy: str) -> None:
    """The copy is under way and nobody is left to replica set it: the next coordinator has it made again, or takes
    it."""
    job = hurt(*REPLICAS, "--policy", policy, fault="server-1@seed.got=sleep:3")
    job.until((job.folder / "runs" / "hurt" / "fault-server-1").exists)
    job.hit("coordinator")
    job.until_back("coordinator")
    job.until_at_work("worker-0", "worker-1", "worker-2")
    job.hit("server-0")
    job.until_back("server-0")
    output = job.ends_well()
    assert "revoked" not in output, output
