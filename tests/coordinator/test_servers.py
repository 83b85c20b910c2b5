"""The coordinator by itself: servers that come, go and die, and the slices that they have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.coordinator.played import SECONDS, jobs, until

from syncline.core.membership import JobState
from syncline.core.slice_state import Copy
from syncline.core.wire.control import (
    Barrier,
    GiveCopies,
    Host,
    Install,
    Over,
    Passed,
    Prepare,
    Prepared,
    Retire,
    Roster,
    SeedTo,
)
from syncline.core.wire.message import Done

__all__ = ["jobs"]


def test_with_two_replicas_every_slice_gets_a_backup_before_it_is_used(jobs: Any) -> None:
    job = jobs(replicas=2, slice_bytes=4096).begin()
    job.register()
    assert len(job.replica_sets()) >= 4
    assert all({primary, backup} == {"server-0", "server-1"} for primary, backup in job.replica_sets().values())
    for server in ("server-0", "server-1"):
        seeded = [n for message in job[server].all(SeedTo) for n in message.slices]
        assert sorted(seeded) == sorted(n for n, (primary, _) in job.replica_sets().items() if primary == server)
    assert not any(message.moves for message in job["server-0"].all(Prepare)), "no worker has to do anything again"


def test_a_lost_server_s_slices_are_their_backups_and_kept_so_before_anyone_is_told(jobs: Any) -> None:
    job = jobs(replicas=2, slice_bytes=4096).begin()
    job.register()
    job["server-0"].holds.add(Prepare)
    job["server-0"].heard.clear()
    job["worker-0"].heard.clear()
    job.kill("server-1")
    until(lambda: bool(job["server-0"].held), "server-0 hears of it")
    kept = job.disk.last
    assert kept.is_changing and all(s.primary == "server-0" and not s.backups for s in kept.replica_sets.values())
    assert job["server-0"].all(Prepare)[0].moves
    assert not job["worker-0"].all(Roster)
    job["server-0"].holds.clear()
    job["server-0"].held[0].reply(Prepared(job["server-0"].standings, 0))
    until(lambda: bool(job["worker-0"].all(Roster)), "the workers are told")
    assert {replica_set.primary for replica_set in job["worker-0"].all(Roster)[-1].replica_sets} == {"server-0"}


def test_a_server_that_comes_gets_backups_and_then_primaries(jobs: Any) -> None:
    job = jobs(replicas=2, slice_bytes=4096).begin()
    job.register()
    job.kill("server-1")
    until(lambda: {p for p, _ in job.replica_sets().values()} == {"server-0"}, "promoted")
    again = job.play("server", "server-1")
    again.joined(again.ask_to_join())
    until(lambda: {p for p, _ in job.replica_sets().values()} == {"server-0", "server-1"}, "both are primaries again")
    assert all({p, b} == {"server-0", "server-1"} for p, b in job.replica_sets().values())
    assert again.all(Host), "it knows the layout"


def test_a_server_that_retires_hands_over_everything_first(jobs: Any) -> None:
    job = jobs(replicas=1, slice_bytes=4096).begin()
    job.register()
    mine = sorted(n for n, (primary, _) in job.replica_sets().items() if primary == "server-1")
    assert mine
    assert job["server-1"].ask(Retire()) == Done()
    assert {p for p, _ in job.replica_sets().values()} == {"server-0"}
    assert sorted(n for m in job["server-1"].all(SeedTo) for n in m.slices) == mine
    assert "server-1" not in job.coordinator.membership.state.members
    with pytest.raises(ValueError, match="the last server"):
        job["server-0"].ask(Retire())


def test_with_one_replica_the_freshest_copy_comes_back_and_the_loss_is_counted(jobs: Any) -> None:
    job = jobs(replicas=1, slice_bytes=4096).begin()
    job.register()
    mine = [n for n, (primary, _) in job.replica_sets().items() if primary == "server-1"]
    job["worker-0"].copies = [Copy(n, 7, {"worker-0": 7}, 9) for n in mine]
    job["worker-1"].copies = [Copy(n, 8, {"worker-1": 8}, 8) for n in mine]
    job.kill("server-1")
    until(lambda: bool(job["worker-1"].all(GiveCopies)), "the freshest is asked")
    until(lambda: any("1 acknowledged update was revoked" in line for line in job.log), "said")
    (given,) = job["worker-1"].all(GiveCopies)
    assert sorted(c.slice for c in given.copies) == sorted(mine) and given.target.name == "server-0"
    assert all((c.version, c.known, c.clocks) == (8, 9, {"worker-1": 8}) for c in given.copies)
    assert not job["worker-0"].all(GiveCopies)
    until(lambda: {p for p, _ in job.replica_sets().values()} == {"server-0"}, "installed")


def test_without_any_copy_the_job_ends_and_says_what_is_missing(jobs: Any) -> None:
    job = jobs(replicas=1, slice_bytes=4096).begin()
    job.register()
    job.kill("server-1")
    until(lambda: bool(job["worker-0"].all(Over)), "over")
    assert "no worker has a copy of 'w'" in job["worker-0"].all(Over)[0].reason


def test_a_server_s_death_is_kept_together_with_the_change_that_it_asks_for(jobs: Any) -> None:
    """A coordinator that dies before it has begun the change would never tell anybody of the promotion."""
    job = jobs(replicas=2, slice_bytes=4096).begin()
    job.register()
    job.kill("server-1")
    until(lambda: {p for p, _ in job.replica_sets().values()} == {"server-0"}, "promoted")
    kept = [msgspec.msgpack.decode(state, type=JobState) for state in job.disk.states]
    evicted = next(state for state in kept if state.formed and "server-1" not in state.members)
    assert evicted.is_changing


def test_all_are_told_after_a_disk_that_was_full_when_the_fence_was_everywhere(jobs: Any) -> None:
    """What could not be kept is done once more: nobody else would tell the survivors who they are."""
    job = jobs().begin()
    job["server-1"].holds.add(Install)
    waiting = job["worker-0"].endpoint.call(Barrier("b", 1, 0))
    job.kill("worker-1")
    until(lambda: bool(job["server-1"].held), "server-1 hears of it")
    job["server-1"].holds.clear()
    job.disk.full = True
    job["server-1"].held[0].reply(Done())
    until(lambda: any("the disk is full" in line for line in job.log), "it could not be kept")
    assert not waiting.is_done and not job["worker-0"].all(Roster)
    job.disk.full = False
    assert isinstance(waiting.wait(SECONDS), Passed)
    until(lambda: bool(job["worker-0"].all(Roster)), "told")
