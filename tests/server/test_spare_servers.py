"""`sync:spare=N` with several servers: a late step is late on all of them, any other counts on all or on none."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.server.test_spare import Numbers

from syncline import Rule
from syncline.core.rounds import RoundMembership
from syncline.core.wire.leases import AskLeaseAcks
from syncline.core.wire.traffic import AskClip, Committed, GiveClip
from syncline.errors import ProtocolError, SynclineError
from syncline.testing import local_job
from syncline.torch import DataLoader
from syncline.worker.job import Job

from .conftest import WAIT, House, Worker

MakeHouse = Callable[..., House]


def a_house(make_house: MakeHouse, servers: int = 2, workers: int = 3, **settings: Any) -> House:
    house = make_house(servers, workers, policy="sync:spare=1", **settings)
    house.register({"x": np.zeros(96, np.float32)}, "SGD", "sum")
    assert house.replica_sets[0].primary == "server-0" and house.primaries() == [
        f"server-{k}" for k in range(servers)
    ]
    return house


def grads(value: float) -> dict[str, Any]:
    return {"x": np.full(96, value, np.float32)}


def stage_all(worker: Worker, clock: int, value: float, **rest: Any) -> None:
    for server in worker.house.primaries():
        worker.stage(server, clock, grads(value), **rest).wait(WAIT)


def decide(worker: Worker, clock: int, value: float, **rest: Any) -> Any:
    """Staged everywhere, and committed where it is decided."""
    stage_all(worker, clock, value, **rest)
    return worker.commit_staged("server-0", clock)


def decided(*calls: Any) -> list[RoundMembership]:
    round_memberships = []
    for call in calls:
        answer = call.wait(WAIT)
        assert isinstance(answer, Committed) and answer.round_membership is not None
        round_memberships.append(answer.round_membership)
    return round_memberships


def redo(worker: Worker, clock: int, value: float) -> Any:
    """After a server was lost: all of it again, with the one that is left."""
    return worker.commit("server-1", clock, grads(value))


# -- at servers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2], ids=["inline", "pool"])
def test_the_others_are_told_who_is_in_a_round_and_who_was_late(make_house: MakeHouse, threads: int) -> None:
    house = a_house(make_house, threads=threads)
    one, two, three = house.workers.values()
    with pytest.raises(ProtocolError, match="whose round is not known"):
        stage_all(one, 1, 1.0)
        one.commit_staged("server-1", 1).wait(WAIT)
    round_memberships = decided(decide(one, 1, 1.0), decide(two, 1, 2.0))
    late = decide(three, 1, 4.0).wait(WAIT)
    assert late.late and round_memberships[0] == round_memberships[1]
    answer = three.commit_staged("server-1", 1, late.round_membership).wait(WAIT)
    assert answer.late, "before those who are in the round, and at once"
    first = one.stage("server-1", 1, grads(1.0)).wait(WAIT) and one.commit_staged("server-1", 1, round_memberships[0])
    assert not first.is_done
    two.commit_staged("server-1", 1, round_memberships[1]).wait(WAIT)
    assert not first.wait(WAIT).late
    assert (house.value("x") == -3.0).all()
    for server in house.primaries():
        for part in house.parts(server):
            clocks = house.slot(server, part.id).state.clocks
            assert [clocks[w.name, w.incarnation] for w in (one, two, three)] == [1, 1, 1]
    assert [server.stats().num_late for server in house.servers.values()] == [1, 0], "counted once"


def test_a_worker_that_dies_before_it_has_told_the_others_counts_there_too(make_house: MakeHouse) -> None:
    house = a_house(make_house)
    one, two, three = house.workers.values()
    round_memberships = decided(decide(one, 1, 1.0), decide(two, 1, 2.0))
    waits = one.commit_staged("server-1", 1, round_memberships[0])
    house.fence(two.name)
    waits.wait(WAIT)
    assert (house.value("x") == -3.0).all()
    assert decide(three, 1, 4.0).wait(WAIT).late


def test_nobody_of_a_round_may_be_left_to_tell_of_it(make_house: MakeHouse) -> None:
    """Both who were in it are dead: the others hear of it with the change."""
    house = a_house(make_house, workers=4)
    one, two, three, four = house.workers.values()
    calls = [decide(worker, 1, value) for worker, value in ((one, 1.0), (two, 2.0), (three, 4.0))]
    decided(*calls)
    for worker in (one, two, three):
        house.fence(worker.name)
    assert (house.value("x") == -7.0).all()
    assert decide(four, 1, 8.0).wait(WAIT).late


def test_one_that_was_late_and_dies_is_late_on_the_others_too(make_house: MakeHouse) -> None:
    house = a_house(make_house)
    one, two, three = house.workers.values()
    round_memberships = decided(decide(one, 1, 1.0), decide(two, 1, 2.0))
    assert decide(three, 1, 4.0).wait(WAIT).late
    house.fence(three.name)
    for worker, round_membership in zip((one, two), round_memberships, strict=True):
        call = worker.commit_staged("server-1", 1, round_membership)
    call.wait(WAIT)
    assert (house.value("x") == -3.0).all()
    states = [house.slot("server-1", part.id).state for part in house.parts("server-1")]
    assert all(state.clocks[three.name, three.incarnation] == 1 for state in states), "its clock is level"


def test_what_was_decided_by_nobody_counts_nowhere_when_its_worker_dies(make_house: MakeHouse) -> None:
    house = a_house(make_house)
    one, two, three = house.workers.values()
    decide(three, 1, 4.0)
    house.fence(three.name)
    (round_membership,) = decided(decide(one, 1, 1.0))
    one.commit_staged("server-1", 1, round_membership).wait(WAIT)
    assert decide(two, 1, 2.0).wait(WAIT).late, "of two, one is enough"
    assert (house.value("x") == -1.0).all()


def test_the_norm_is_taken_over_the_same_steps_on_all_servers(make_house: MakeHouse) -> None:
    house = a_house(make_house)
    one, two, three = house.workers.values()
    calls = [decide(w, 1, v, clip_norm=1e9) for w, v in ((one, 1.0), (two, 2.0))]
    asked = [call.wait(WAIT) for call in calls]
    assert all(isinstance(answer, AskClip) and answer.round_membership is not None for answer in asked)
    late = decide(three, 1, 4.0, clip_norm=1e9).wait(WAIT)
    assert late.late and three.commit_staged("server-1", 1, late.round_membership).wait(WAIT).late
    others = [w.commit_staged("server-1", 1, a.round_membership) for w, a in zip((one, two), asked, strict=True)]
    shares = [call.wait(WAIT) for call in others]
    total = asked[0].squared_norm + shares[0].squared_norm
    assert total == pytest.approx(9.0 * 96)
    for server in house.primaries():
        assert isinstance(one.ask(server, GiveClip(1, total, [])).wait(WAIT), Committed)
    assert (house.value("x") == -3.0).all()


# -- when the one that decides is lost -------------------------------------------------------------------------


def lose_the_one_that_decides(house: House) -> None:
    house.kill("server-0")
    house.promote()


def test_who_is_in_a_round_outlives_the_server_that_closed_it(make_house: MakeHouse) -> None:
    """Its backups have the round, the other server's own slices do not. Whoever comes first, it is the same round."""
    house = a_house(make_house, replicas=2)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    one, two, three = house.workers.values()
    decided(decide(one, 1, 1.0), decide(two, 1, 2.0))
    assert decide(three, 1, 4.0, acks=[(7, 0, 4)]).wait(WAIT).late
    lose_the_one_that_decides(house)
    late = redo(three, 1, 4.0).wait(WAIT)
    assert late.late
    calls = [redo(two, 1, 2.0), redo(one, 1, 1.0)]
    assert not any(call.wait(WAIT).late for call in calls)
    assert (house.value("x") == -3.0).all()
    told = house.tell("server-1", AskLeaseAcks()).wait(WAIT)
    assert told.late == [(7, 0, 4)], "the backup of slice 0 knows what was late"
    calls = [redo(worker, 2, 1.0) for worker in (three, one)]
    assert not any(call.wait(WAIT).late for call in calls)
    assert (house.value("x") == -5.0).all()


def test_what_nobody_has_heard_of_is_decided_anew(make_house: MakeHouse) -> None:
    house = a_house(make_house, replicas=2)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    one, two, three = house.workers.values()
    decide(one, 1, 1.0)
    lose_the_one_that_decides(house)
    calls = [redo(three, 1, 4.0), redo(two, 1, 2.0)]
    assert not any(call.wait(WAIT).late for call in calls)
    assert redo(one, 1, 1.0).wait(WAIT).late
    assert (house.value("x") == -6.0).all()


def test_slice_0_moves_to_a_server_that_has_not_heard_of_anything(make_house: MakeHouse) -> None:
    """A move by plan: what is late, and who was in the last round, goes along."""
    house = a_house(make_house)
    one, two, three = house.workers.values()
    decided(decide(one, 1, 1.0), decide(two, 1, 2.0))
    assert decide(three, 1, 4.0, acks=[(7, 0, 4)]).wait(WAIT).late
    house.seed("server-0", "server-1")
    replica_sets = [replica_set for replica_set in house.replica_sets.values() if replica_set.primary == "server-0"]
    house.carry_out(
        replica_sets=[type(replica_set)(replica_set.slice, "server-1") for replica_set in replica_sets], moves=True
    )
    assert redo(three, 1, 4.0).wait(WAIT).late
    calls = [redo(one, 1, 1.0), redo(two, 1, 2.0)]
    assert not any(call.wait(WAIT).late for call in calls)
    assert (house.value("x") == -3.0).all()
    assert house.tell("server-1", AskLeaseAcks()).wait(WAIT).late == [(7, 0, 4)]


# -- whole jobs ------------------------------------------------------------------------------------------------

WORKERS, STEPS, BLOCKS = 4, 24, 12


def one_hot(job: Job, step: int) -> np.ndarray[Any, Any]:
    """Its own cell, once in every slice."""
    cells = np.zeros((BLOCKS, WORKERS, 64), np.float32)
    cells[:, job.rank, step] = 1.0
    return cells


@pytest.mark.parametrize(
    ("servers", "replicas", "transport", "lost"),
    [
        (2, 1, "auto", ""),
        (3, 1, "tcp", ""),
        (2, 2, "auto", ""),
        (3, 2, "auto", "server-0"),
        (3, 2, "tcp", "server-1"),
        (2, 2, "tcp", "server-0"),
        (2, 1, "auto", "worker-3"),
        (3, 2, "tcp", "worker-3"),
    ],
)
def test_every_step_is_on_all_slices_or_was_late(servers: int, replicas: int, transport: str, lost: str) -> None:
    """A cell for each step of each worker, in every slice: it is 1 where the step counted, 0 where it was late."""
    given = {"servers": servers, "replicas": replicas, "transport": transport, "slice_bytes": 1024}
    with local_job(workers=WORKERS, policy="sync:spare=1", wait_seconds=PATIENCE, **given) as local:

        def work(job: Job) -> Any:
            chance = random.Random(job.rank)
            job.kv.register({"x": np.zeros((BLOCKS, WORKERS, 64), np.float32)}, Rule("Add"), reduce="sum")
            job.barrier("begin")
            try:
                for step in range(STEPS):
                    time.sleep(0.01 * chance.random() if chance.random() < 0.3 else 0.0)
                    job.kv.push_pull({"x": one_hot(job, step)}).wait()
                    if lost and job.rank == 0 and step == STEPS // 2:
                        local.kill(lost)
            except SynclineError:
                if lost == f"worker-{job.rank}":
                    return None
                raise
            job.barrier("end")
            return job.kv.pull()["x"], job.exchange.num_late

        results = local.run(work, PATIENCE)
    found = {rank: result for rank, result in enumerate(results) if result is not None}
    assert len(found) == WORKERS - lost.startswith("worker")
    cells = found[0][0]
    assert (cells == cells[0]).all(), "a step is on some slices and not on others"
    assert set(np.unique(cells)) <= {0.0, 1.0}
    for rank, (pulled, num_late) in found.items():
        assert (pulled == cells).all() and cells[0, rank].sum() == STEPS - num_late, rank


@pytest.mark.parametrize("spare", [1, 3])
def test_rounds_come_in_one_order_to_all_servers(spare: int) -> None:
    """By a rule with memory two slices differ when two rounds came to them in different orders."""
    with local_job(workers=WORKERS, servers=3, policy=f"sync:spare={spare}", slice_bytes=1024) as local:

        def work(job: Job) -> Any:
            chance = random.Random(job.rank)
            rule = Rule("SGD", lr=0.5, momentum=0.5)
            job.kv.register({"x": np.zeros((BLOCKS, 256), np.float64)}, rule, reduce="mean")
            job.barrier("begin")
            for _ in range(STEPS):
                time.sleep(0.005 * chance.random() if chance.random() < 0.3 else 0.0)
                job.kv.push({"x": np.full((BLOCKS, 256), float(chance.randrange(-50, 50)))}).wait()
            job.barrier("end")
            return job.kv.pull()["x"]

        values = local.run(work, PATIENCE)[0]
    assert (values == values[0, 0]).all(), np.unique(values)


def test_a_server_that_comes_follows_the_one_that_decides() -> None:
    """A job that began with one server: slices move to the other while rounds go on without the slow one."""
    with local_job(workers=3, policy="sync:spare=1", slice_bytes=1024) as local:

        def work(job: Job) -> Any:
            job.kv.register({"x": np.zeros((BLOCKS, WORKERS, 64), np.float32)}, Rule("Add"), reduce="sum")
            job.barrier("begin")
            if job.rank == 0:
                threading.Thread(target=lambda: local.add_server("server-1"), daemon=True).start()
            step, left = 0, 20
            while left:
                time.sleep(0.004 if job.rank == 2 else 0.001)
                job.kv.push({"x": one_hot(job, step % 64)}).wait()
                step, left = step + 1, left - (len(job.exchange.routes.names) == 2)
            job.barrier("end")
            return job.kv.pull()["x"], job.exchange.num_late, step

        results = local.run(work, PATIENCE)
    cells = results[0][0]
    assert (cells == cells[0]).all(), "a step is on some slices and not on others"
    for rank, (_, num_late, steps) in enumerate(results):
        assert cells[0, rank].sum() == steps - num_late


@pytest.mark.parametrize(("servers", "replicas"), [(2, 1), (3, 2)])
def test_every_sample_counts_once_on_every_server(servers: int, replicas: int) -> None:
    """Two epochs; a cell for each sample counts the steps that it was in. What a late step had read, others read."""
    size, seconds = 300, (0.002, 0.0, 0.006)
    given = {"servers": servers, "replicas": replicas, "slice_bytes": 1024}
    with local_job(workers=3, policy="sync:spare=1", **given) as local:

        def work(job: Job) -> Any:
            job.kv.register({"seen": np.zeros((6, size), np.float32)}, Rule("Add"), reduce="sum")
            loader = DataLoader(Numbers(size), 4, shuffle=True, job=job)
            for _ in range(2):
                for batch in loader:
                    time.sleep(seconds[job.rank])
                    cells = np.zeros((6, size), np.float32)
                    cells[:, batch.numpy()] = 1.0
                    job.kv.push({"seen": cells}).wait()
            job.barrier("end")
            return job.kv.pull()["seen"]

        results = local.run(work, PATIENCE)
        stats = local[0].stats()
    assert all((seen == 2.0).all() for seen in results)
    assert stats.num_late > 0
