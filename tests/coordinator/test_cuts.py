"""Cuts for followers at the coordinator: who marks what, and what happens if they cannot; members are played."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from tests.coordinator.played import SECONDS, Job, jobs, until

from syncline.coordinator.cuts import LAST_HOLD_SECONDS
from syncline.core.wire.checkpoints import CloseSnapshotBarrier, Finish, OpenSnapshotBarrier
from syncline.core.wire.following import AskCut, AwaitEnd, EndCut, GivenCut, MarkCut
from syncline.core.wire.message import Done
from syncline.errors import StoreError
from syncline.net.memory import pair
from syncline.net.rpc import Call, Endpoint, Stamp
from syncline.net.transport import Peer

__all__ = ["jobs"]
HELD = 1.0


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members answer when they come to it. What is about the limit sets it again."""
    monkeypatch.setattr("syncline.coordinator.cuts.HOLD_SECONDS", SECONDS)


def begun(jobs: Any, **settings: Any) -> Job:
    job: Job = jobs(slice_bytes=4096, **settings).begin()
    job.register()
    for member in job.members.values():
        member.num_updates = 7
        member.clocks = [(f"worker-{k}", job[f"worker-{k}"].incarnation, 7) for k in range(2)]
    return job


def follower(job: Job) -> Endpoint:
    left, right = pair(Peer("follower", "f", 0), Peer("coordinator", "coordinator", 0))
    Endpoint(right, Stamp("job"), job.coordinator)
    return Endpoint(left, Stamp("job"))


def cut(endpoint: Endpoint, num_segments: int = 0) -> GivenCut:
    answer = endpoint.call(AskCut(num_segments)).wait(SECONDS)
    assert isinstance(answer, GivenCut)
    return answer


def placed(answer: GivenCut) -> dict[int, str]:
    return {number: place.server.name for place in answer.places for number in place.slices}


def test_all_slices_are_marked_at_one_point_then_commits_go_on(jobs: Any) -> None:
    job = begun(jobs)
    endpoint = follower(job)
    answer = cut(endpoint)
    primaries = {number: one.primary for number, one in job.coordinator.membership.state.replica_sets.items()}
    assert placed(answer) == primaries and len(primaries) == 4 and answer.step == 7
    assert {version for place in answer.places for version in place.versions} == {7}
    assert [segment.index for segment in answer.segments] == [0] and cut(endpoint, 1).segments == []
    for name in ("server-0", "server-1"):
        kinds = [type(message) for message in job[name].heard]
        wanted = (CloseSnapshotBarrier, MarkCut, OpenSnapshotBarrier)
        until(lambda name=name: len(job[name].all(OpenSnapshotBarrier)) == 2, "barriers open")  # type: ignore[misc]
        assert [kind for kind in kinds if kind in wanted][:2] == [CloseSnapshotBarrier, MarkCut]
        assert not any(message.is_save for message in job[name].all(CloseSnapshotBarrier))
        # Each server opens by itself, should this coordinator die.
        assert all(0 < message.seconds <= SECONDS for message in job[name].all(CloseSnapshotBarrier))
    endpoint.close()


def test_backups_are_read_where_there_are_some(jobs: Any) -> None:
    job = begun(jobs, replicas=2)
    endpoint = follower(job)
    backups = {n: one.backups[0] for n, one in job.coordinator.membership.state.replica_sets.items() if one.backups}
    assert placed(cut(endpoint)) == backups and len(backups) == 4
    endpoint.close()


def test_a_backup_that_is_behind_is_not_mixed_with_others(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slices have another version than at their primaries: after some tries these are read."""
    monkeypatch.setattr("syncline.coordinator.cuts.AGAIN_SECONDS", 0.001)
    job = begun(jobs, replicas=2)
    job["server-1"].num_versions = -1
    endpoint = follower(job)
    answer = cut(endpoint)
    primaries = {number: one.primary for number, one in job.coordinator.membership.state.replica_sets.items()}
    assert placed(answer) == primaries
    assert len({message.number for message in job["server-1"].all(EndCut)}) == 3  # of the tries before
    # Each may hold commits for twice as long as the one before: a slow host would give no cut in 20 ms.
    given = [message.seconds for message in job["server-0"].all(CloseSnapshotBarrier)]
    assert [0.5 < seconds / (SECONDS * 2**number) <= 1 for number, seconds in enumerate(given)] == [True] * 4
    endpoint.close()


def test_servers_that_are_apart_are_told_what_to_let_in(jobs: Any) -> None:
    job = begun(jobs)
    ahead = ("worker-0", job["worker-0"].incarnation, 8)
    job["server-1"].clocks = [ahead, job["server-1"].clocks[1]]
    endpoint = follower(job)
    cut(endpoint)
    turns = job["server-0"].all(CloseSnapshotBarrier)
    assert [turn.turn for turn in turns] == [0, 1] and ahead in turns[1].through
    endpoint.close()


def test_commits_are_not_held_for_long(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow to answer: the barriers open, and the follower hears why there is no cut."""
    monkeypatch.setattr("syncline.coordinator.cuts.HOLD_SECONDS", HELD)
    monkeypatch.setattr("syncline.coordinator.cuts.MOST_TRIES", 2)
    job = begun(jobs)
    job["server-1"].holds.add(CloseSnapshotBarrier)
    endpoint = follower(job)
    with pytest.raises(StoreError, match="no cut after 2 tries: open commits did not finish in time"):
        cut(endpoint)
    for name in ("server-0", "server-1"):
        asked = [message.number for message in job[name].all(CloseSnapshotBarrier)]
        assert len(asked) == 2
        until(
            lambda name=name, asked=asked: [m.number for m in job[name].all(OpenSnapshotBarrier)] == asked,  # type: ignore[misc]
            "barriers open",
        )
    assert not job["server-0"].all(MarkCut)
    endpoint.close()


def test_a_follower_that_is_gone_leaves_nothing(jobs: Any) -> None:
    job = begun(jobs)
    endpoint = follower(job)
    number = cut(endpoint).number
    assert job.coordinator.cuts.num_followers == 1
    endpoint.close()
    for name in ("server-0", "server-1"):
        until(lambda name=name: [m.number for m in job[name].all(EndCut)] == [number], "marks end")  # type: ignore[misc]
    assert job.coordinator.cuts.num_followers == 0


def ends(job: Job) -> list[Call]:
    """All scripts end."""
    return [job[f"worker-{k}"].endpoint.call(Finish()) for k in range(2)]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_end_waits_for_the_last_cut(jobs: Any, tmp_path: pathlib.Path, checkpoint: bool) -> None:
    """A follower that looks every few seconds would miss the last steps: servers end with the job."""
    job = begun(jobs, follower_seconds=10 * SECONDS, **({"checkpoint": str(tmp_path)} if checkpoint else {}))
    endpoint = follower(job)
    end = endpoint.call(AwaitEnd())
    before = cut(endpoint)  # is read after the end, and is none of it
    scripts = ends(job)
    assert end.wait(SECONDS) == Done()
    endpoint.tell(EndCut(before.number))
    last = cut(endpoint, 1)
    assert not scripts[1].is_done and (not checkpoint or not scripts[0].is_done)
    endpoint.tell(EndCut(last.number))
    assert [script.wait(SECONDS) for script in scripts] == [Done()] * 2
    endpoint.close()


def test_a_job_that_saves_nothing_and_has_no_follower_lets_its_workers_go(jobs: Any) -> None:
    """Each at once: a worker that ends early does not wait for the others."""
    job = begun(jobs)
    for k in range(2):
        assert job[f"worker-{k}"].ask(Finish()) == Done()


@pytest.mark.parametrize("how", ["killed", "silent", "does not ask"])
def test_the_end_does_not_need_the_follower(jobs: Any, how: str) -> None:
    job = begun(jobs, follower_seconds=0.05 if how == "silent" else 10 * SECONDS)
    endpoint = follower(job)
    end = endpoint.call(AwaitEnd()) if how != "does not ask" else None
    cut(endpoint)
    scripts = ends(job)
    if end is not None:
        end.wait(SECONDS)
    if how == "killed":
        assert not scripts[1].is_done
        endpoint.close()
    assert [script.wait(SECONDS) for script in scripts] == [Done()] * 2
    said = [line for line in job.log if "did not read the last step" in line]
    if how == "silent":
        assert len(said) == 1 and "f did not read the last step within 0.05 s; the job waits no longer" in said[0]
    else:
        assert said == []
    endpoint.close()


def test_a_worker_that_joins_takes_the_end_back(jobs: Any) -> None:
    """Its commits must not be held for as long as a last cut may hold them, and its end is waited for as well."""
    job = begun(jobs, follower_seconds=10 * SECONDS)
    endpoint = follower(job)
    end = endpoint.call(AwaitEnd())
    cut(endpoint)
    scripts = ends(job)
    assert end.wait(SECONDS) == Done()
    job.kill("worker-1")
    again = job.play("worker", "worker-1")
    again.joined(again.ask_to_join())
    number = cut(endpoint, 1).number
    # The limit of other cuts, which is that of the fixture.
    assert job["server-0"].all(CloseSnapshotBarrier)[-1].seconds > LAST_HOLD_SECONDS
    endpoint.tell(EndCut(number))
    scripts[1] = again.endpoint.call(Finish())
    number = cut(endpoint, 1).number
    assert not scripts[1].is_done
    endpoint.tell(EndCut(number))
    assert [script.wait(SECONDS) for script in scripts] == [Done()] * 2
    endpoint.close()


def test_a_job_without_parameters_has_no_cut(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.coordinator.cuts.AGAIN_SECONDS", 0.001)
    job: Job = jobs().begin()
    endpoint = follower(job)
    with pytest.raises(StoreError, match="the job has no parameters yet"):
        cut(endpoint)
    endpoint.close()
