"""`sync:spare=N` at a server, at a coordinator, in whole jobs: who is late counts for nothing, and loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from tests.coordinator.played import jobs, until
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core.leasing.loader import Loader
from syncline.core.wire.control import Heartbeat
from syncline.core.wire.leases import AskLease, AskLeaseAcks, Confirm, GivenLease, GivenLeaseAcks, Opened, OpenEpoch
from syncline.core.wire.traffic import Committed
from syncline.testing import local_job
from syncline.torch import DataLoader
from syncline.worker.job import Job

from .conftest import WAIT, House

MakeHouse = Callable[..., House]
__all__ = ["jobs"]


def ones() -> dict[str, Any]:
    return {"x": np.ones(48, np.float32)}


def a_house(make_house: MakeHouse, **settings: Any) -> House:
    house = make_house(1, 3, policy="sync:spare=1", **settings)
    house.register({"x": np.zeros(48, np.float32)}, "SGD", "mean")
    return house


# -- at a server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2], ids=["inline", "pool"])
def test_who_is_late_hears_so_and_nothing_of_it_is_applied(make_house: MakeHouse, threads: int) -> None:
    house = a_house(make_house, threads=threads)
    one, two, three = house.workers.values()
    calls = [one.commit("server-0", 1, ones(), acks=[(1, 0, 4)]), two.commit("server-0", 1, ones(), acks=[(2, 0, 4)])]
    answers = [call.wait(WAIT) for call in calls]
    assert [answer.late for answer in answers] == [False, False]
    late = three.commit("server-0", 1, ones(), acks=[(3, 0, 4)]).wait(WAIT)
    assert isinstance(late, Committed) and late.late and late.versions == [1, 1, 1], "with the newest versions"
    assert (house.value("x") == -1.0).all(), "the mean of the two, once"
    for number in (0, 1, 2):
        assert house.slot("server-0", number).state.clocks[three.name, three.incarnation] == 1, "its clock is level"
    again = three.commit("server-0", 1, ones(), acks=[(3, 0, 4)]).wait(WAIT)
    assert again.late and (house.value("x") == -1.0).all(), "a lost answer changes nothing"
    calls = [worker.commit("server-0", 2, ones()) for worker in (three, one)]
    assert not any(call.wait(WAIT).late for call in calls)
    assert (house.value("x") == -2.0).all()
    assert house.servers["server-0"].stats().num_late == 1


def test_what_was_late_is_told_and_confirmed_beside_what_was_used(make_house: MakeHouse) -> None:
    house = a_house(make_house)
    one, two, three = house.workers.values()
    for worker, lease in ((one, 1), (two, 2)):
        worker.commit("server-0", 1, ones(), acks=[(lease, 0, 4)])
    three.commit("server-0", 1, ones(), acks=[(3, 0, 4), (4, 8, 9)]).wait(WAIT)
    told = house.tell("server-0", AskLeaseAcks()).wait(WAIT)
    assert isinstance(told, GivenLeaseAcks)
    assert sorted(told.acks) == [(1, 0, 4), (2, 0, 4)] and sorted(told.late) == [(3, 0, 4), (4, 8, 9)]
    beat = house.servers["server-0"].beat()
    assert sorted(beat.late) == sorted(told.late)
    house.tell("server-0", Confirm([(1, 0, 4)], [(3, 0, 4)])).wait(WAIT)
    told = house.tell("server-0", AskLeaseAcks()).wait(WAIT)
    assert (told.acks, told.late) == ([(2, 0, 4)], [(4, 8, 9)])


def test_a_dead_one_that_was_late_leaves_nothing_behind(make_house: MakeHouse) -> None:
    """It is fenced after it was late: its clock is settled, the next rounds go on with those who are there."""
    house = a_house(make_house)
    one, two, three = house.workers.values()
    for worker in (one, two, three):
        worker.commit("server-0", 1, ones())
    until(lambda: house.servers["server-0"].stats().num_late == 1, "late")
    house.fence(three.name)
    calls = [worker.commit("server-0", 2, ones()) for worker in (one, two)]
    assert [call.wait(WAIT).late for call in calls] == [False, True], "of two, one is enough"
    assert (house.value("x") == -2.0).all()


# -- at a coordinator ----------------------------------------------------------------------------------------


def test_late_places_are_handed_out_again_and_confirmed_once_kept(jobs: Any) -> None:
    job = jobs(workers=2, servers=1, policy="sync:spare=1").begin()
    job.register()
    server, workers = job["server-0"], [job["worker-0"], job["worker-1"]]
    for worker in workers:
        assert isinstance(worker.ask(OpenEpoch("a", 0, Loader(16, 4))), Opened)
    leases = [worker.ask(AskLease("a", 0, [])) for worker in workers]
    assert all(isinstance(lease, GivenLease) and lease.lease for lease in leases)
    epoch = job.coordinator.leases.leasing.epoch("a", 0)
    late = (leases[1].lease, 0, 4)
    for _ in range(3):  # every beat says it, until it is confirmed
        server.ask(Heartbeat(acks=[(leases[0].lease, 0, 8)], late=[late]))
    assert epoch.num_done == 8 and epoch.num_todo == 4
    until(lambda: any(late in confirm.late for confirm in server.all(Confirm)), "confirmed")
    assert job.disk.last.leases.epochs["a"][0].num_todo == 4, "and kept before"


# -- whole jobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_steps_of_a_slow_worker_are_not_waited_for(transport: str) -> None:
    """Rounds go on while it sleeps; its step counts for nothing; what it gets is what the others have made."""
    asleep, go_on = threading.Event(), threading.Event()
    with local_job(workers=3, policy="sync:spare=1", transport=transport) as local:

        def work(job: Job) -> tuple[float, int]:
            job.kv.register({"x": np.zeros(4, np.float32)}, Rule("SGD", lr=1.0))
            job.barrier("begin")
            found = 0.0
            if job.rank == 2:
                asleep.set()
                go_on.wait(PATIENCE)
                pulled = job.kv.push_pull({"x": np.full(4, 100.0, np.float32)}).wait()
                assert pulled is not None
                found = float(pulled["x"][0])
            else:
                asleep.wait(PATIENCE)
                for _ in range(5):
                    job.kv.push_pull({"x": np.ones(4, np.float32)}).wait()
                go_on.set()
            job.barrier("end")
            return found or float(job.kv.pull()["x"][0]), job.exchange.num_late

        results = local.run(work, PATIENCE)
        stats = local[0].stats()
    assert results == [(-5.0, 0), (-5.0, 0), (-5.0, 1)] and stats.num_late == 1
    assert stats.cost_told.endswith("; 1 commits were late, and counted for nothing")


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("seconds", [(0.0, 0.0, 0.0), (0.0, 0.0, 0.01), (0.002, 0.0, 0.004)])
def test_every_sample_counts_once_however_often_somebody_is_late(seconds: tuple[float, ...]) -> None:
    """Two epochs; a cell for each sample counts the steps that it was in. What a late step had read, others read."""
    size = 300
    with local_job(workers=3, policy="sync:spare=1") as local:

        def work(job: Job) -> list[float]:
            job.kv.register({"seen": np.zeros(size, np.float32)}, Rule("Add"), reduce="sum")
            loader = DataLoader(Numbers(size), 4, shuffle=True, job=job)
            for _ in range(2):
                for batch in loader:
                    time.sleep(seconds[job.rank])
                    cells = np.zeros(size, np.float32)
                    cells[batch.numpy()] = 1.0
                    job.kv.push({"seen": cells}).wait()
            job.barrier("end")
            return [float(value) for value in job.kv.pull()["seen"]]

        results = local.run(work, PATIENCE)
        stats = local[0].stats()
    assert results == [[2.0] * size] * 3
    assert stats.num_late > 0 or seconds == (0.0, 0.0, 0.0)
