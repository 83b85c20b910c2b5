"""`ReplicatedSteps`: an optimizer on every worker, and what a worker that has missed rounds goes on from."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.data import ArraySource, batches
from syncline.testing import LocalJob, local_job
from syncline.worker.current import current_in_thread
from syncline.worker.job import Job
from syncline.worker.replicated_steps import ReplicatedSteps

Arrays = dict[str, np.ndarray[Any, Any]]


class Momentum:
    """Gradient descent with momentum on one number; how it moved so far depends on every mean gradient."""

    def __init__(self, job: Job) -> None:
        self.own: Arrays = {"a": np.zeros(1), "speed": np.zeros(1), "count": np.zeros((), np.int32)}
        self.steps = ReplicatedSteps(job, {"a": np.zeros(1)}, self.own, self.apply)
        self.latest()
        self.num_behind = 0

    def latest(self) -> bool:
        newest = self.steps.newest()
        if newest is not None:
            self.own = _copied(newest)
        return newest is not None

    def step(self, gradient: float, weight: float | None = None) -> None:
        mean, replica = self.steps.step({"a": np.full(1, gradient)}, lambda: self.own, weight)
        if replica is not None:
            self.own = _copied(replica)
            self.num_behind += 1
        self.own = self.apply(self.own, mean)

    @staticmethod
    def apply(own: Mapping[str, Any], mean: Mapping[str, Any]) -> Arrays:
        speed = 0.9 * own["speed"] + mean["a"]
        return {"speed": speed, "a": own["a"] - 0.1 * speed, "count": own["count"] + np.int32(1)}

    @property
    def at(self) -> tuple[float, float, int]:
        return float(self.own["a"][0]), float(self.own["speed"][0]), int(self.own["count"])


def _copied(arrays: Mapping[str, Any]) -> Arrays:
    return {name: np.array(array) for name, array in arrays.items()}


def alone(means: Iterator[float] | list[float]) -> tuple[float, float, int]:
    a = speed = 0.0
    count = 0
    for mean in means:
        speed = 0.9 * speed + mean
        a -= 0.1 * speed
        count += 1
    return pytest.approx(a), pytest.approx(speed), count  # type: ignore[return-value]


@pytest.mark.parametrize("settings", [{"servers": 2}, {"exchange": "ring"}])
def test_replicas_stay_equal_to_one_process(settings: dict[str, Any]) -> None:
    """Weights of 3 and 7: the numbers of rounds are integers that are averaged by weights too."""

    def train(job: Job) -> tuple[Any, int]:
        one = Momentum(job)
        for step in range(40):
            one.step(float(step + job.rank), weight=(3, 7)[job.rank])
        return one.at, one.num_behind

    with local_job(workers=2, **settings) as jobs:
        assert jobs.run(train) == [(alone([step + 0.7 for step in range(40)]), 0)] * 2


def test_a_worker_without_samples_at_the_end_of_an_epoch_takes_the_replica_of_the_others() -> None:
    """Nine batches among two workers: one of them has none in the last round, and in the next epoch it goes on with
    the same replica as the other one. Which of them it is differs from run to run."""
    source = ArraySource(np.arange(9.0))

    def train(job: Job) -> tuple[Any, int]:
        one = Momentum(job)
        for _ in range(3):
            for (x,) in batches(source, 1):
                one.step(float(x[0]))
        job.barrier("end")
        one.step(0.0)  # takes what was missed in the last epoch
        return one.at, one.num_behind

    for _ in range(3):
        with local_job(workers=2) as jobs:
            (one, behind), (two, also) = jobs.run(train)
        assert one == two and one[2] == 16
        assert behind + also == 3


def test_a_worker_can_ask_for_the_newest_replica_after_an_epoch() -> None:
    """So that the gradients of the next epoch are those of the newest parameters: the same as in one process."""
    source = ArraySource(np.arange(9.0))

    def train(job: Job) -> tuple[Any, int, int, list[list[float]]]:
        one, num_asked, read = Momentum(job), 0, []
        for _ in range(3):
            read.append([])
            for (x,) in batches(source, 1):
                read[-1].append(float(x[0]))
                one.step(read[-1][-1] + one.own["a"][0])
            num_asked += one.latest()
        return one.at, one.num_behind, num_asked, read

    with local_job(workers=2) as jobs:
        (one, behind, asked, xs), (two, also, other, ys) = jobs.run(train)
    at = speed = 0.0
    for first, second in zip(xs, ys, strict=True):
        for pair in itertools.zip_longest(first, second):
            speed = 0.9 * speed + np.mean([x for x in pair if x is not None]) + at
            at -= 0.1 * speed
    assert one == two == (pytest.approx(at), pytest.approx(speed), 15)
    assert behind + also == 0 and asked + other == 3


def rounds(ones: list[Momentum], count: int) -> None:
    """Every one of these workers makes so many steps."""
    threads = [threading.Thread(target=lambda one=one: [one.step(1.0) for _ in range(count)]) for one in ones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def back(jobs: LocalJob, name: str) -> Momentum:
    job = jobs.add_worker(name)
    with current_in_thread(job):
        job.resume_at()
        return Momentum(job)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_restarted_worker_takes_the_replica_of_the_others(rank: int) -> None:
    """Also where the first one is killed, which was the provider."""
    with local_job(workers=2) as jobs:
        both = jobs.run(Momentum)
        rounds(both, 5)
        jobs.kill(f"worker-{rank}")
        other = both[1 - rank]
        rounds([other], 3)
        both[rank] = back(jobs, f"worker-{rank}")
        rounds(both, 4)
        assert both[rank].at == other.at == alone([1.0] * 12)
        assert both[rank].num_behind >= 1


def test_all_workers_can_be_lost_between_two_rounds() -> None:
    """The servers have the replica of the last round but one, and its mean."""
    with local_job(workers=2) as jobs:
        both = jobs.run(Momentum)
        rounds(both, 5)
        for rank in range(2):
            jobs.kill(f"worker-{rank}")
            both[rank] = back(jobs, f"worker-{rank}")
        assert both[0].at == both[1].at == alone([1.0] * 5)
        rounds(both, 2)
        assert both[0].at == both[1].at == alone([1.0] * 7)
