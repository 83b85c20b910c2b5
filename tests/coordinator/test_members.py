"""The coordinator by itself: comings and goings of workers, its own death, what it tells."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tests.coordinator.played import SECONDS, jobs, until

from syncline.core.members import Standing
from syncline.core.replica_sets import ReplicaSet, protection
from syncline.core.slice_state import life_of
from syncline.core.versions import InstalledVersions
from syncline.core.wire.control import (
    AskRoster,
    AskStatus,
    AskWhy,
    Barrier,
    Died,
    Enter,
    Entered,
    GivenStatus,
    GivenWhy,
    Heartbeat,
    Install,
    Leave,
    Over,
    Passed,
    Prepare,
    Rejoin,
    Retire,
    Roster,
    Scale,
)
from syncline.core.wire.message import Done
from syncline.errors import ConfigError, ConnectionLost, FencedError, JobFailed, ProtocolError
from syncline.net.memory import pair
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Peer
from syncline.stats import Wait

__all__ = ["jobs"]


HERE = InstalledVersions("3.11.4", "1.0", "2.13.0")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize(
    ("there", "told"),
    [
        (
            InstalledVersions("3.12.1", "1.0", "2.13.0"),
            "worker-2 on host b has Python 3.12.1, worker-0 on host a 3.11.4",
        ),
        (InstalledVersions("3.11.4", "0.9", "2.13.0"), "worker-2 on host b has syncline 0.9, worker-0 on host a 1.0"),
    ],
)
def test_ranks_with_other_versions_end_the_job_before_it_begins(
    jobs: Any, order: Sequence[int], there: InstalledVersions, told: str
) -> None:
    """Whichever rank comes first: all hear which host has what, and none waits for the deadline of the start."""
    job = jobs(workers=3, servers=1)
    job.play("server", "server-0").ask_to_join()
    calls = []
    for rank in order:
        member = job.play("worker", f"worker-{rank}", "b" if rank == 2 else "a")
        member.versions = there if rank == 2 else HERE
        calls.append(member.ask_to_join())
    for call in calls:
        with pytest.raises((JobFailed, ConnectionLost), match=re.escape(told)):
            call.wait(SECONDS)
    assert job.coordinator.membership.outcome.culprit == "worker-2"


def test_ranks_with_another_patch_of_python_or_another_torch_join_and_torch_is_told(jobs: Any) -> None:
    job = jobs(workers=2, servers=1)
    calls = [job.play("server", "server-0").ask_to_join()]
    for rank, versions in enumerate([HERE, InstalledVersions("3.11.9", "1.0", "")]):
        member = job.play("worker", f"worker-{rank}", "local")
        member.versions = versions
        calls.append(member.ask_to_join())
    for call in calls:
        call.wait(SECONDS)
    assert any("worker-1 has torch not installed, worker-0 2.13.0" in line for line in job.log)


def test_an_evicted_worker_is_kept_on_disk_then_fenced_everywhere_then_barriers_open(jobs: Any) -> None:
    """Who releases before every server has fenced the dead one lets its late commit into a round without it."""
    job = jobs(workers=2, servers=2).begin()
    job["server-1"].holds.add(Install)
    waiting = job["worker-0"].endpoint.call(Barrier("b", 1, 0))
    saves = len(job.disk.states)
    generation = job.coordinator.membership.generation
    job.kill("worker-1")
    until(lambda: bool(job["server-1"].held), "server-1 hears of it")
    assert job["server-0"].all(Prepare)[0].fenced == [("worker-1", job["worker-1"].incarnation)]
    assert job.disk.last.generation > generation and len(job.disk.states) > saves
    assert job.disk.last.fencing, "the fence is on disk before anybody is asked to fence"
    assert not waiting.is_done, "server-1 has not acknowledged yet"
    job["server-1"].held[0].reply(Done())
    assert isinstance(waiting.wait(SECONDS), Passed)
    until(lambda: not job.disk.last.fencing, "settled")
    until(lambda: bool(job["worker-0"].all(Roster)), "the survivors are told")
    assert [m.name for m in job["worker-0"].all(Roster)[-1].members if m.role == "worker"] == ["worker-0"]


def test_a_step_that_one_server_committed_is_settled_on_all(jobs: Any) -> None:
    job = jobs().begin()
    worker = job["worker-1"]
    job["server-0"].standings = [Standing("worker-0", 3, clock=4), Standing("worker-1", worker.incarnation, clock=5)]
    job["server-1"].standings = [Standing("worker-0", 3, clock=4), Standing("worker-1", worker.incarnation, clock=4)]
    job.kill("worker-1")
    until(lambda: bool(job["server-1"].all(Install)), "installed")
    for server in ("server-0", "server-1"):
        assert job[server].all(Install)[0].settle == [("worker-1", worker.incarnation, 5)]
    assert not any("outside" in line for line in job.log)


def test_a_step_that_cannot_be_settled_is_said(jobs: Any) -> None:
    job = jobs().begin()
    worker = job["worker-1"]
    for server, clock in (("server-0", 5), ("server-1", 4)):
        life = life_of(server, job[server].incarnation)
        job[server].clocks = [("worker-1", worker.incarnation, clock)]
        job[server].reach = [("worker-1", worker.incarnation, clock, life)]
    job.kill("worker-1")
    until(lambda: any("may be applied to some slices only" in line for line in job.log), "said")
    (said,) = [line for line in job.log if "may be applied to some slices only" in line]
    assert said.endswith(": step 5 of worker-1 is on some slices and not on others")
    until(lambda: bool(job["server-1"].all(Install)), "the others go on all the same")


def test_a_worker_that_comes_back_enters_after_the_highest_round_that_any_server_has_opened(jobs: Any) -> None:
    """By the word of one server only, it could be asked for a round that another has applied without it."""
    job = jobs().begin()
    job.kill("worker-1")
    until(lambda: bool(job["server-1"].all(Install)), "evicted")
    again = job.play("worker", "worker-1")
    answer = again.joined(again.ask_to_join())
    assert answer.late and answer.incarnation > 4
    job["server-0"].standings = [Standing("worker-0", 3, clock=7)]
    job["server-1"].standings = [Standing("worker-0", 3, clock=8, phase=2, phase_began=5)]
    entered = again.ask(Enter())
    assert entered == Entered(2, entered.back_at)
    for server in ("server-0", "server-1"):
        (standing,) = job[server].all(Install)[-1].standings
        assert (standing.name, standing.incarnation, standing.turn()) == ("worker-1", answer.incarnation, (2, 3))


def test_ranks_follow_the_time_of_joining_so_that_the_chief_is_the_oldest(jobs: Any) -> None:
    job = jobs().begin()
    job.kill("worker-0")
    until(lambda: job.coordinator.membership.chief == "worker-1", "the next one is the chief")
    again = job.play("worker", "worker-0")
    again.joined(again.ask_to_join())
    assert job.coordinator.membership.workers() == ["worker-1", "worker-0"]


def test_an_incarnation_that_is_out_stays_out(jobs: Any) -> None:
    job = jobs().begin()
    old = job["worker-1"]
    job.kill("worker-1")
    until(lambda: not job.disk.last.fencing and "worker-1" not in job.disk.last.members, "evicted")
    old.connect()
    with pytest.raises(FencedError, match="worker-1, incarnation"):
        old.ask(Rejoin("worker-1", old.incarnation))


def test_a_process_that_asks_twice_for_any_name_has_one(jobs: Any) -> None:
    """The answer was lost with the connection: a second name would be a member that nobody plays."""
    job = jobs(workers=3, suspect_seconds=60.0).begin()
    job["worker-1"].ask(Leave())
    job["worker-2"].ask(Leave())
    nameless = job.play("worker", "")
    first = nameless.joined(nameless.ask_to_join())
    nameless.incarnation = 0
    nameless.endpoint.close("the answer is lost")
    nameless.connect()
    again = nameless.joined(nameless.ask_to_join())
    assert again.incarnation == first.incarnation
    assert job.coordinator.membership.workers() == ["worker-0", "worker-1"]
    other = job.play("worker", "")
    assert other.joined(other.ask_to_join()).incarnation != first.incarnation
    assert job.coordinator.membership.workers() == ["worker-0", "worker-1", "worker-2"]


def test_a_connection_that_broke_and_came_back_is_no_death(jobs: Any) -> None:
    job = jobs(suspect_seconds=SECONDS).begin()
    worker = job["worker-1"]
    worker.endpoint.close("a hiccup")
    worker.connect()
    assert isinstance(worker.ask(Rejoin("worker-1", worker.incarnation)), Roster)
    time.sleep(0.2)
    assert "worker-1" in job.coordinator.membership.state.members
    assert not job["server-0"].all(Prepare)


def test_silence_is_noticed(jobs: Any) -> None:
    """Of one; the others beat, and where this machine lets none of their beats through, are heard all the same."""
    job = jobs(deadline_seconds=0.5, longest_deadline_seconds=0.5, suspect_seconds=0.5)
    liveness = job.coordinator.job.liveness
    dead, hear, beaten = liveness.dead, liveness.heard, []
    staying, silent = ["server-0", "server-1", "worker-0"], []

    def look(now: float) -> Any:
        for name in set(job.members) - set(silent):
            hear(name, now)
        return dead(now)

    def note(name: str, now: float) -> None:
        beaten.append(name)
        hear(name, now)

    liveness.dead, liveness.heard = look, note
    job.begin()
    silent.append("worker-1")
    beaten.clear()
    for name in staying:
        job[name].ask(Heartbeat())
    assert beaten == staying
    until(lambda: "worker-1" not in job.coordinator.membership.state.members, "evicted")
    assert set(job.coordinator.membership.state.members) == set(staying)
    assert any("worker-1" in line and "not heard of" in line for line in job.log)


@pytest.mark.parametrize("exchange", ["servers", "ring"])
def test_a_worker_has_the_longest_deadline_until_its_first_step(jobs: Any, exchange: str) -> None:
    """While it loads a framework, no thread of its process beats; in a ring, neither does the server in it."""
    ring = {"exchange": "ring"} if exchange == "ring" else {}
    job = jobs(deadline_seconds=3600.0, longest_deadline_seconds=7200.0, **ring).begin()
    liveness = job.coordinator.job.liveness

    def allowed() -> dict[str, float]:
        return {name: round(liveness.deadline(name) - liveness.members[name].since) for name in sorted(job.members)}

    of_server = 7200.0 if ring else 3600.0
    assert allowed() == {"server-0": of_server, "server-1": of_server, "worker-0": 7200.0, "worker-1": 7200.0}
    job["worker-1"].ask(Heartbeat())
    assert allowed()["worker-1"] == 7200.0
    job["worker-1"].ask(Heartbeat(step=1))
    assert allowed() == {"server-0": of_server, "server-1": 3600.0, "worker-0": 7200.0, "worker-1": 3600.0}


def test_a_coordinator_that_comes_back_goes_on_with_what_it_had_begun(jobs: Any) -> None:
    """It died between the journal and the servers: the change is made by the next one, and nobody enters twice."""
    first = jobs(replicas=2, slice_bytes=4096).begin()
    first.register()
    first["server-0"].holds.add(Prepare)
    first.kill("server-1")
    until(lambda: bool(first["server-0"].held), "begun")
    first.coordinator.close()
    second = jobs(disk=first.disk, replicas=2, slice_bytes=4096)
    assert second.coordinator.membership.generation == first.disk.last.generation
    for name in ("server-0", "worker-0", "worker-1"):
        member = second.members[name] = first[name]
        member.job = second
        member.holds.clear()
        member.heard.clear()
        member.connect()
        member.ask(Rejoin(name, member.incarnation))
    until(lambda: bool(second["worker-0"].all(Roster)), "told")
    assert {replica_set.primary for replica_set in second["worker-0"].all(Roster)[-1].replica_sets} == {"server-0"}
    assert second["server-0"].all(Prepare)[-1].moves
    again = second.play("worker", "")
    with pytest.raises(ValueError, match="no worker more is expected"):
        again.joined(again.ask_to_join())


def test_a_full_disk_stops_changes_and_nothing_else(jobs: Any) -> None:
    job = jobs().begin()
    job.disk.full = True
    job.kill("worker-1")
    until(lambda: any("the disk is full" in line for line in job.log), "said")
    assert not job["server-0"].all(Prepare), "nobody is told what is not kept"
    assert job["worker-0"].ask(Heartbeat()) == Done()
    job.disk.full = False
    until(lambda: bool(job["server-0"].all(Install)), "made as soon as there is space")


def test_why_names_who_is_waited_for_and_when_it_is_evicted(jobs: Any) -> None:
    job = jobs().begin()
    wait = Wait("", 812, ["worker-1"], 3.1, "round")
    job["server-0"].ask(Heartbeat(waits=[wait]))
    answer = job["worker-0"].ask(AskWhy(812))
    assert isinstance(answer, GivenWhy)
    assert re.match(r"step 812 has waited [0-9.]+ s", answer.reason)
    assert "for worker-1 on host a (last heard of" in answer.reason


def test_status_shows_everyone(jobs: Any) -> None:
    job = jobs(replicas=2, slice_bytes=4096).begin()
    job.register()
    job["worker-1"].ask(Heartbeat(rtt_seconds=0.002, step=5))
    left, right = pair(Peer("launcher", "launcher", 0), Peer("coordinator", "coordinator", 0))
    Endpoint(right, Stamp("job"), job.coordinator)
    answer = Endpoint(left, Stamp("job")).call(AskStatus()).wait(SECONDS)
    assert isinstance(answer, GivenStatus)
    by_name = {member.name: member for member in answer.status.members}
    assert set(by_name) == {"server-0", "server-1", "worker-0", "worker-1"}
    assert (by_name["worker-1"].step, by_name["worker-1"].rtt_seconds) == (5, 0.002)
    assert by_name["server-0"].num_primary and by_name["server-0"].num_backup
    replica_sets = job.coordinator.membership.state.replica_sets.values()
    assert answer.status.protection == protection(2, ["a", "a"], replica_sets), "the same words as at the start"
    assert "all servers are on it" in answer.status.protection
    one_alone = [ReplicaSet(0, "server-0"), *list(replica_sets)[1:]]
    alone = f"1 of {len(replica_sets)} slices has no backup now; a server's death can lose it"
    assert alone in protection(2, ["a", "b"], one_alone)
    left.close()


def test_the_job_ends_well_when_all_have_left_and_nobody_is_awaited(jobs: Any) -> None:
    job = jobs(workers=2, servers=1).begin()
    left, right = pair(Peer("launcher", "launcher", 0), Peer("coordinator", "coordinator", 0))
    Endpoint(right, Stamp("job"), job.coordinator)
    launcher = Endpoint(left, Stamp("job"))
    launcher.call(Died("worker-1", "was killed by SIGKILL", True)).wait(SECONDS)
    job["worker-0"].ask(Leave())
    assert job.coordinator.membership.outcome is None, "worker-1 comes back"
    again = job.play("worker", "worker-1")
    again.joined(again.ask_to_join())
    again.ask(Leave())
    assert job.coordinator.membership.outcome is not None and not job.coordinator.membership.outcome.failed
    left.close()


def test_a_worker_that_left_for_now_is_not_awaited_for_ever(jobs: Any) -> None:
    """Its pod may stay pending for hours; the scripts of the others have ended, and wait for it."""
    job = jobs(workers=2, servers=1, start_seconds=5.0).begin()
    job["worker-1"].ask(Leave(True, True))
    now = time.monotonic()
    job.coordinator.watch.run_checks(now)
    assert job.coordinator.membership.awaited == {"worker-1": "worker"}
    job.coordinator.watch.run_checks(now + 6.0)
    assert job.coordinator.membership.awaited == {}
    assert any("worker-1 left and has not come back within 5 s" in event for event in job.coordinator.job.events)


def test_a_member_that_does_not_come_back_is_the_verdict(jobs: Any) -> None:
    job = jobs(workers=2, servers=1).begin()
    left, right = pair(Peer("launcher", "launcher", 0), Peer("coordinator", "coordinator", 0))
    Endpoint(right, Stamp("job"), job.coordinator)
    Endpoint(left, Stamp("job")).call(Died("worker-1", "was killed by SIGKILL four times", False)).wait(SECONDS)
    (over,) = job["worker-0"].all(Over)
    assert over.failed and over.reason == "worker-1 was killed by SIGKILL four times"
    left.close()


def test_scaling_down_retires_the_youngest(jobs: Any) -> None:
    job = jobs(workers=3, servers=1).begin()
    left, right = pair(Peer("launcher", "launcher", 0), Peer("coordinator", "coordinator", 0))
    Endpoint(right, Stamp("job"), job.coordinator)
    Endpoint(left, Stamp("job")).call(Scale(1, None)).wait(SECONDS)
    assert job["worker-1"].all(Retire) and job["worker-2"].all(Retire) and not job["worker-0"].all(Retire)
    left.close()


def test_scaling_a_job_of_pipelines_counts_processes(jobs: Any) -> None:
    """As `syncline run -w` does: `-w 4` of a job with two stages are two pipelines."""
    job = jobs(workers=3, servers=1, stages=2).begin()
    left, right = pair(Peer("launcher", "launcher", 0), Peer("coordinator", "coordinator", 0))
    Endpoint(right, Stamp("job"), job.coordinator)
    launcher = Endpoint(left, Stamp("job"))
    with pytest.raises(ConfigError, match=r"-w 3 is not divisible by --stages 2: .* use -w 2"):
        launcher.call(Scale(3, None)).wait(SECONDS)
    launcher.call(Scale(4, None)).wait(SECONDS)
    assert job["worker-2"].all(Retire) and not job["worker-1"].all(Retire)
    left.close()


def test_a_roster_asked_for_early_comes_with_its_generation(jobs: Any) -> None:
    job = jobs().begin()
    generation = job.coordinator.membership.generation
    call = job["worker-0"].endpoint.call(AskRoster(generation + 1))
    assert not call.is_done
    job.kill("worker-1")
    roster = call.wait(SECONDS)
    assert isinstance(roster, Roster) and roster.generation > generation


def test_a_server_that_dies_within_a_change_is_part_of_the_next(jobs: Any) -> None:
    job = jobs(workers=2, servers=3).begin()
    job["server-2"].holds.add(Prepare)
    job.kill("worker-1")
    until(lambda: bool(job["server-2"].held), "begun")
    job.kill("server-2")
    until(lambda: bool(job["server-0"].all(Install)), "made without it")
    last = job["server-0"].all(Prepare)[-1]
    assert last.fenced and last.moves
    until(lambda: not job.disk.last.is_changing, "settled")
    with pytest.raises(ConnectionLost):
        job["server-2"].ask(Heartbeat())


def test_holds_last_longer_with_each_try_that_failed(jobs: Any) -> None:
    """On a starved machine every Install would come after the end of a short hold, for ever."""
    job = jobs(workers=3, servers=2).begin()
    job["server-1"].holds.add(Install)
    job.kill("worker-1")
    held = job["server-1"].held
    for _ in range(6):
        until(lambda: bool(held), "another try")
        held.pop().refuse(ProtocolError("generation 2 was superseded"))
    until(lambda: bool(held), "another try")
    held.pop().reply(Done())
    until(lambda: not job.disk.last.fencing, "settled")
    times = [message.times for message in job["server-0"].all(Prepare)]
    assert sorted(set(times)) == [1, 2, 4, 8, 16] and times == sorted(times)
    job["server-1"].holds.clear()
    job["server-0"].heard.clear()
    job.kill("worker-2")
    until(lambda: bool(job["server-0"].all(Prepare)), "another change")
    assert job["server-0"].all(Prepare)[0].times == 1


def test_a_thousand_joins_and_deaths_leave_nothing_behind(jobs: Any) -> None:
    """A name that comes back again and again must not leave an entry for every life that it had."""
    job = jobs(workers=2, servers=1).begin()

    def live_and_die() -> None:
        member = job.play("worker", "worker-1")
        member.joined(member.ask_to_join())
        member.ask(Heartbeat(step=1))
        member.ask(Enter())
        member.endpoint.close("killed")
        again = job.play("worker", "worker-1")  # whoever takes its name knows that it is dead
        again.joined(again.ask_to_join())
        again.ask(Leave())
        again.endpoint.close()
        for known in job.members.values():
            known.heard.clear()

    job["worker-1"].ask(Leave())
    for _ in range(20):
        live_and_die()
    before = len(job.disk.states[-1])
    coordinator = job.coordinator
    tables = (
        coordinator.job.endpoints,
        coordinator.job.heartbeats,
        coordinator.job.reports,
        coordinator.job.evicted,
        coordinator.job.retiring,
    )
    sizes = [len(table) for table in tables]
    for _ in range(480):
        live_and_die()
    assert [len(table) for table in tables] == sizes
    until(lambda: not job.disk.last.fencing, "all settled")
    assert len(job.disk.states[-1]) <= before + 64, "the state does not grow with lives"
    assert coordinator.debug_state().num_defaults <= 1


def test_a_worker_that_beats_and_does_not_advance_is_evicted_when_others_have_waited_long_enough(jobs: Any) -> None:
    """One that advances is not, however long somebody waits for it at a barrier."""
    job = jobs(workers=3, servers=1, stuck_seconds=1.0).begin()
    job.beat_before_looks({"worker-1": itertools.repeat(1), "worker-2": itertools.count(1)})
    waiting = job["worker-0"].endpoint.call(Barrier("b", 1, 0))
    until(lambda: any("worker-1" in line and "has not advanced" in line for line in job.log), "evicted, and why")
    assert "worker-1" not in job.coordinator.membership.state.members
    assert "worker-2" in job.coordinator.membership.state.members
    assert not waiting.is_done


def test_when_everyone_is_quarantined_the_job_ends_and_says_so(jobs: Any) -> None:
    job = jobs(workers=2, servers=1).begin()
    job["worker-0"].ask(Heartbeat(is_quarantined=True))
    job["worker-1"].ask(Heartbeat())
    time.sleep(0.2)
    assert job.coordinator.membership.outcome is None
    job["worker-1"].ask(Heartbeat(is_quarantined=True))
    until(lambda: bool(job["worker-0"].all(Over)), "over")
    assert "quarantined" in job["worker-0"].all(Over)[0].reason
