"""Whose hyperparameters count in a round: one worker's, the same one on every server, whoever has died meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core.wire.control import LetGo
from syncline.core.wire.traffic import AskClip
from syncline.testing import local_job
from syncline.worker.job import Job

from .conftest import WAIT, House
from .test_spare_servers import decide, decided, stage_all

MakeHouse = Callable[..., House]


def with_lr(lr: float) -> list[Any]:
    return [(0, 0, {"lr": lr})]


def a_house(make_house: MakeHouse, workers: int, policy: str) -> House:
    house = make_house(2, workers, policy=policy)
    house.register({"x": np.zeros(96, np.float32)}, "SGD", "sum", lr=1.0)
    return house


def test_a_chief_that_dies_between_two_servers_leads_its_round_on_both(make_house: MakeHouse) -> None:
    house = a_house(make_house, 2, "sync")
    one, two = house.workers.values()
    stage_all(one, 1, 1.0, overrides=with_lr(0.5))
    stage_all(two, 1, 1.0, overrides=with_lr(4.0))
    for call in [worker.commit_staged("server-0", 1) for worker in (one, two)]:
        call.wait(WAIT)
    last = two.commit_staged("server-1", 1)
    house.fence("worker-0")
    last.wait(WAIT)
    assert np.unique(house.value("x")).tolist() == [-1.0]


def test_who_came_back_leads_nobody_that_was_there_before(make_house: MakeHouse) -> None:
    """Also when the chief of that time is gone before the round comes to the second server."""
    house = a_house(make_house, 4, "sync:spare=1")
    house.fence("worker-1")
    house.enter("worker-1")
    for worker in house.workers.values():
        worker.phase = 0
    rates = {"worker-1": 0.5, "worker-2": 2.0, "worker-3": 4.0}
    calls = [decide(house.workers[name], 1, 1.0, overrides=with_lr(lr)) for name, lr in rates.items()]
    round_memberships = decided(*calls)
    house.fence("worker-0")
    told = [
        house.workers[name].commit_staged("server-1", 1, round_membership)
        for name, round_membership in zip(rates, round_memberships, strict=True)
    ]
    for call in told:
        call.wait(WAIT)
    assert np.unique(house.value("x")).tolist() == [-6.0]


def test_a_round_whose_workers_all_died_before_its_norm_was_known_is_given_up_everywhere(
    make_house: MakeHouse,
) -> None:
    """Else it would be an orphan for ever, and no slice would move any more."""
    house = a_house(make_house, 2, "sync:spare=1")
    one, _ = house.workers.values()
    assert isinstance(decide(one, 1, 1.0, clip_norm=1.0).wait(WAIT), AskClip)
    house.fence("worker-0")
    deadline = time.monotonic() + WAIT
    while True:
        change = house.change()
        house.prepare(change)
        for server in change.servers:
            house._coordinators[server].mention(LetGo(change.generation))
        if not change.num_orphans:
            break
        assert time.monotonic() < deadline, "an orphan stays"
        time.sleep(0.05)
    assert any("was committed and not clipped" in line for line in house.lines), house.lines


def test_parameters_that_come_late_to_a_server_without_any_go_on_in_the_same_rounds() -> None:
    """Behind a barrier: the phase began there before anybody had committed there."""

    def work(job: Job) -> Any:
        job.kv.register({"x": np.zeros(8, np.float32)}, Rule("Add"), reduce="sum")
        job.barrier("begin")
        ones = np.ones(8, np.float32)
        for _ in range(5):
            job.kv.push({"x": ones}).wait()
        job.kv.register({"y": np.zeros(8, np.float32)}, Rule("Add"), reduce="sum")
        for _ in range(5):
            job.kv.push({"x": ones, "y": ones}).wait()
        job.barrier("end")
        return {name: values.copy() for name, values in job.kv.pull().items()}

    with local_job(workers=3, servers=2, wait_seconds=PATIENCE) as jobs:
        for values in jobs.run(work, PATIENCE):
            assert values["x"].tolist() == [30.0] * 8 and values["y"].tolist() == [15.0] * 8
