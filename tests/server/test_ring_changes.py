"""A ring inside one process whose members die, come and leave: no step is lost, and all copies stay the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE
from tests.server.conftest import eventually
from tests.server.rings import WAYS, check_all_equal, check_ledger, check_way, copies, kill, push_cells, start

from syncline import Rule
from syncline.core.policy import parse_policy
from syncline.core.rounds import Commit
from syncline.core.wire.control import Prepare, Retire
from syncline.errors import ConnectionLost, JobFailed, RuleError
from syncline.server import hosting
from syncline.server.backups import Backups
from syncline.server.executor import RoundExecutor
from syncline.server.reconfigure import ServerReconfiguration
from syncline.server.ring_sums import RingReducer
from syncline.server.tasks import RoundTask, StagedCommit, key_of
from syncline.testing import local_job

STEPS = 12
LEADERS = [
    "by host leaders",
    *(pytest.param(way, marks=pytest.mark.proof) for way in ("straight", "by host leaders for two")),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_dies_costs_nobody_a_step(victim: int, way: str) -> None:
    """The others go on without it; all that was acknowledged counts, every step on all slices or on none."""
    with local_job(workers=3, exchange="ring", slice_bytes=64, **WAYS[way]) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 50, acknowledged), gone)
        eventually(lambda: acknowledged.get(f"worker-{victim}", 0) >= 7)
        kill(jobs, victim, gone)
        left = [rank for rank in range(3) if rank != victim]
        for rank in left:
            threads[rank].join(PATIENCE)
        counts = check_ledger(jobs[left[0]], acknowledged)
        assert [counts[rank] for rank in left] == [50, 50]
        check_all_equal(jobs)
        check_way(jobs, way, 2)
        lone = jobs.servers.values()
        assert {name for server in lone for name in server.ring.voting.votes.voters} == {f"server-{r}" for r in left}


def join_late(jobs: Any) -> None:
    """Two push 60 times; a third comes meanwhile, and pushes 20 times: all of it counts."""
    acknowledged: dict[str, int] = {}

    def work(job: Any) -> None:
        push_cells(job, 60 if job.name != "worker-2" else 20, acknowledged)
        job.barrier("all")

    threads = start(jobs, work, set())
    eventually(lambda: acknowledged.get("worker-0", 0) >= 5)
    late = jobs.add_worker("worker-2")
    for thread in [*threads, *start([late], work, set())]:
        thread.join(PATIENCE)
    assert check_ledger(late, acknowledged)[:3] == [60, 60, 20]


@pytest.mark.parametrize("way", LEADERS)
def test_one_that_comes_gets_everything_and_takes_part(way: str) -> None:
    with local_job(workers=2, exchange="ring", slice_bytes=64, most_workers=3, **WAYS[way]) as jobs:
        join_late(jobs)
        eventually(lambda: "server-2" in jobs.servers["server-0"].ring.voting.votes.voters)
        check_all_equal(jobs)
        check_way(jobs, way, 3)


def test_one_that_holds_no_longer_does_not_stop_those_who_supply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine a server lets go of a change before its Install comes, and refuses that. Others have it, and
    would wait for the one until it has it too: all of it begins again."""
    install, refused = ServerReconfiguration._install, []

    def late(self: Any, request: Any, message: Any) -> None:
        hold, known = self._hold, self._hosting.replica_sets
        replica_sets = hold.message.replica_sets if hold is not None else ()
        moved = {
            replica_set.primary
            for replica_set in replica_sets
            if known.get(replica_set.slice, replica_set).primary != replica_set.primary
        }
        if moved and self._name not in moved and len(refused) < 6:  # who is to have more supplies the others
            refused.append(self._name)
            self._end_by_itself(self._hold)
        install(self, request, message)

    monkeypatch.setattr(ServerReconfiguration, "_install", late)
    with local_job(workers=2, exchange="ring", slice_bytes=64, most_workers=3) as jobs:
        join_late(jobs)
        assert refused
        check_all_equal(jobs)


@pytest.mark.parametrize("way", LEADERS)
@pytest.mark.parametrize("slice_bytes", [64, 1 << 20])
def test_one_that_died_comes_back(slice_bytes: int, way: str) -> None:
    """Also where there are fewer slices than servers: it is nobody's primary then, and has its vote all the same."""
    with local_job(workers=3, exchange="ring", slice_bytes=slice_bytes, **WAYS[way]) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()

        def work(job: Any) -> None:
            push_cells(job, 60 if job.name != "worker-1" else 20, acknowledged)
            job.barrier("all")

        threads = start(jobs, work, gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 3)
        kill(jobs, 1, gone)
        before = dict(acknowledged)
        eventually(lambda: acknowledged["worker-0"] > before["worker-0"] + 1)
        back = jobs.add_worker("worker-1")
        second: dict[str, int] = {}

        def again(job: Any) -> None:
            zeros = np.zeros((4, 64), np.float32)
            job.kv.register({"here": zeros, "there": zeros}, Rule("Add"), reduce="sum")
            job.resume_at(20)
            for number in range(20, 30):
                cell = zeros.copy()
                cell[1, number] = 1.0
                job.kv.push({"here": cell, "there": cell}).wait()
            second[job.name] = 10
            job.barrier("all")

        threads += start([back], again, set())
        for thread in (threads[0], threads[2], threads[3]):
            thread.join(PATIENCE)
        found = back.kv.pull(["here", "there"])
        assert np.array_equal(found["here"], found["there"]) and second
        assert list(np.asarray(found["here"])[[0, 2]].sum(axis=1)) == [60, 60]
        assert np.asarray(found["here"])[1, 20:].sum() == 10
        eventually(lambda: "server-1" in jobs.servers["server-0"].ring.voting.votes.voters)
        check_all_equal(jobs)


@pytest.mark.parametrize("way", LEADERS)
@pytest.mark.parametrize("victim", [0, 2])
def test_who_dies_before_a_joiner_has_everything(monkeypatch: pytest.MonkeyPatch, victim: int, way: str) -> None:
    """A joiner is named as a backup of all, and lacks what this primary was to give it: it is none of that. Nor does
    it matter when the joiner itself is gone again."""
    begun, is_over = threading.Event(), threading.Event()
    original = hosting.supply

    def supplies(partner: Any, slots: Any, goes_on: Callable[[], bool]) -> None:
        if partner.name == "server-2" and any(slot.part.id == 0 for slot in slots) and not is_over.is_set():
            begun.set()
            is_over.wait(PATIENCE)
            raise ConnectionLost("it is dead")
        original(partner, slots, goes_on)

    monkeypatch.setattr(hosting, "supply", supplies)
    with local_job(workers=2, exchange="ring", slice_bytes=64, most_workers=3, **WAYS[way]) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        first = "server-0" if victim == 0 else ""

        def work(job: Any) -> None:
            push_cells(job, 40 if job.name != "worker-2" else 10, acknowledged)
            job.barrier("all")

        threads = start(jobs, work, gone)
        eventually(lambda: acknowledged.get("worker-0", 0) >= 5)
        assert not first or 0 in jobs.servers[first].slices
        late = jobs.add_worker("worker-2")
        eventually(begun.is_set)
        kill(jobs, victim, gone)
        is_over.set()
        if victim == 0:
            threads += start([late], work, gone)
        left = [1, 2] if victim == 0 else [0, 1]
        for rank in left:
            threads[rank].join(PATIENCE)
            assert not threads[rank].is_alive(), f"worker-{rank} stands still"
        counts = check_ledger(jobs[1], acknowledged)
        assert [counts[rank] for rank in left] == ([40, 10] if victim == 0 else [40, 40])
        check_all_equal(jobs)


def test_one_that_leaves_has_its_say_until_it_is_out(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It does not hold a sum when it is released from its replica set: the primary must not take that for a vote,
    and apply what the others then drop."""
    stops, hold = threading.Event(), Backups.hold

    def holds(self: Any, backup: Any, request: Any, message: Any, ballot: Any, voting: Any) -> bool:
        if stops.is_set() and (voting._name, request.peer.name) == ("server-1", "server-2"):
            return False  # it has come, and is not looked at yet
        return hold(self, backup, request, message, ballot, voting)

    release = hosting.Hosting.release_backups
    asked: list[Any] = []  # the others, which have answered before that one lets go of anybody

    def releases(self: Any, replica_sets: Any) -> None:
        if stops.is_set() and self.name == "server-2":
            eventually(lambda: all((hold := one._generations._hold) and hold.is_answered for one in asked))
        release(self, replica_sets)
        if stops.is_set() and self.name == "server-2":
            threading.Event().wait(0.1)  # whatever that has let loose comes to its end

    monkeypatch.setattr(Backups, "hold", holds)
    monkeypatch.setattr(hosting.Hosting, "release_backups", releases)
    with local_job(workers=3, exchange="ring", slice_bytes=64, **WAYS["straight"]) as jobs:
        acknowledged: dict[str, int] = {}
        passed, go = threading.Barrier(4), threading.Event()

        def work(job: Any) -> None:
            push_cells(job, 3, acknowledged)
            passed.wait(PATIENCE)
            go.wait(PATIENCE)
            cell = np.zeros((4, 64), np.float32)
            cell[int(job.name[-1]), 3] = 1.0
            job.kv.push({"here": cell, "there": cell}).wait()
            acknowledged[job.name] = 4
            job.barrier("all")

        threads = start(jobs, work, set())
        passed.wait(PATIENCE)
        stops.set()
        go.set()
        servers = jobs.servers
        asked += [servers["server-0"], servers["server-1"]]
        eventually(lambda: {name for w in servers["server-0"].beat().waits for name in w.for_whom} == {"server-2"})
        jobs.process.links["server-1"].call(Retire(), PATIENCE)
        stops.clear()
        for thread in threads:
            thread.join(PATIENCE)
        assert check_ledger(jobs[0], acknowledged) == [4, 4, 4, 0]
        staying = {name: slots for name, slots in copies(jobs).items() if name != "server-1"}
        for number, slot in staying["server-0"].items():
            assert np.array_equal(slot.memory, staying["server-2"][number].memory), f"slice {number}"
            assert slot.state.version == staying["server-2"][number].state.version == 4
        assert "refused an update" not in capsys.readouterr().err, "copies were apart"


def test_a_fence_does_not_wait_for_a_round_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker leaves while the next round is added up. One server fences it before it has its sums, when
    another already holds them: that takes the fence all the same, or nobody would ever vote."""
    assert any(leave_during_a_sum(monkeypatch) for _ in range(5)), "the fence never came in time"


def leave_during_a_sum(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns whether it came so: the fence may also come later, or not at all, where primaries move."""
    summed, fence, is_fenced, came = RingReducer._summed, RoundExecutor.fence, threading.Event(), threading.Event()

    def late(self: Any, work: Any, sums: Any) -> None:
        if self._hosting.name == "server-1" and len(work.commits) == 2 and is_fenced.wait(2.0):
            others = jobs.servers["server-0"].hosting.backups.backups.values()
            until = time.monotonic() + 2.0
            while time.monotonic() < until and not all(backup.held for backup in others):
                time.sleep(0.001)
            if all(backup.held for backup in others):
                came.set()
        summed(self, work, sums)

    def fences(self: Any, workers: Any, finished: Any) -> Any:
        found = fence(self, workers, finished)
        if self._slices is jobs.servers["server-1"].slices:
            is_fenced.set()
        return found

    with (
        local_job(workers=3, exchange="ring", slice_bytes=64, wait_seconds=60.0, **WAYS["by host leaders"]) as jobs,
        monkeypatch.context() as patched,
    ):
        patched.setattr(RingReducer, "_summed", late)
        patched.setattr(RoundExecutor, "fence", fences)
        acknowledged: dict[str, int] = {}

        def work(job: Any) -> None:
            push_cells(job, 3 if job.name == "worker-2" else 5, acknowledged)
            if job.name == "worker-2":
                job.close()

        for thread in start(jobs, work, set()):
            thread.join(PATIENCE)
        assert check_ledger(jobs[0], acknowledged) == [5, 5, 3, 0]
    return came.is_set()


def test_who_is_nobodys_primary_says_where_those_begin_who_enter() -> None:
    """It hears of all commits too, and may have closed a round that is open still elsewhere: whoever were put into
    that one would wait for it for ever."""
    with local_job(workers=2, exchange="ring", slice_bytes=1 << 20, **WAYS["by host leaders"]) as jobs:

        def work(job: Any) -> None:
            job.kv.register({"x": np.zeros(4, np.float32)}, Rule("Add"), reduce="sum")
            for _ in range(3):
                job.kv.push({"x": np.ones(4, np.float32)}).wait()

        jobs.run(work)
        servers = jobs.servers.values()
        assert sorted(len(server.slices) for server in servers) == [0, 1]
        for server in servers:
            answer = server._generations._prepared(Prepare(99, [], [], False, []))
            assert answer.is_primary and {s.clock for s in answer.standings} == {3} and answer.holds is None


def test_two_that_die_at_once_cost_no_step() -> None:
    with local_job(workers=4, exchange="ring", slice_bytes=64, **WAYS["by host leaders"]) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 40, acknowledged), gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 5)
        kill(jobs, 0, gone)
        kill(jobs, 1, gone)
        for thread in threads[2:]:
            thread.join(PATIENCE)
        assert check_ledger(jobs[2], acknowledged)[2:] == [40, 40]
        check_all_equal(jobs)


@pytest.mark.parametrize("sums", ["ours", "gloo"])
def test_the_last_one_goes_on_alone(sums: str) -> None:
    with local_job(workers=2, exchange="ring", sums=sums, slice_bytes=64) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 40, acknowledged), gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 5)
        kill(jobs, 1, gone)
        threads[0].join(PATIENCE)
        assert check_ledger(jobs[0], acknowledged)[0] == 40


def test_what_was_dropped_and_fails_late_takes_nothing_from_what_is_made_anew() -> None:
    """The same commit, in a round that counts nowhere and in the one that takes its place."""
    with local_job(workers=2, exchange="ring", slice_bytes=64, **WAYS["by host leaders"]) as jobs:
        flow = jobs.servers["server-0"].commits.flow
        commit = Commit("worker-0", 1, 7, StagedCommit(1, 0, 0))
        dropped, repeated = (
            RoundTask((commit,), (), commit, parse_policy("sync"), lambda work: None) for _ in range(2)
        )
        flow._under_way[key_of(commit)] = repeated
        flow.fail(dropped, RuleError("late"))
        assert flow._under_way == {key_of(commit): repeated} and dropped.failed is not None
        flow.through(repeated)
        assert not flow._under_way


def test_when_all_have_ended_the_verdict_says_so_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that all fail at the same step, say. Who was started meanwhile has nothing of what there was; and it
    waits for nobody in a job that is over."""

    def never(*_: Any) -> None:
        raise ConnectionLost("not yet")

    with pytest.raises(JobFailed, match="every process"), local_job(2, exchange="ring", most_workers=3) as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(64, np.float32)}, Rule("Add")))
        monkeypatch.setattr(hosting, "supply", never)
        membership = jobs.coordinator.membership
        late = jobs.add_worker("worker-2")
        for number in (0, 1):
            kill(jobs, number, set())
        eventually(lambda: membership.outcome is not None)
        assert membership.outcome is not None
        assert "every process that had 'x' has ended" in membership.outcome.reason
        assert "with --checkpoint DIR" in membership.outcome.reason
        late.barrier("over")


def test_what_a_rule_remembers_is_everywhere_too() -> None:
    with local_job(workers=2, exchange="ring", slice_bytes=64, **WAYS["by host leaders"]) as jobs:

        def work(job: Any) -> None:
            job.kv.register({"x": np.ones(80, np.float32)}, Rule("Adam", lr=0.1))
            for _ in range(3):
                job.kv.push({"x": np.full(80, 1.0 + job.rank, np.float32)}).wait()
            job.barrier("all")

        jobs.run(work)
        (_, first), (_, second) = copies(jobs).items()
        for number, slot in first.items():
            one = {(e.piece, e.key): t for e, t in slot.rules.state()}
            two = {(e.piece, e.key): t for e, t in second[number].rules.state()}
            assert one.keys() == two.keys() and one
            assert all(torch.equal(one[key], two[key]) for key in one)
