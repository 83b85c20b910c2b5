"""Several workers read one epoch: each sample once, in whatever way they come, go and wait for each other."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.data
from tests.leased import FakeJob, LeaseQueue, order
from tests.patience import PATIENCE

from syncline.core.wire.leases import LeaveEpoch
from syncline.torch.data import DataLoader
from syncline.worker import waits
from syncline.worker.data.leases import LeaseAcks


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


def epoch_of(
    lease_queue: LeaseQueue, num_samples: int, batch_size: int = 4, *, seconds: Any = None, **options: Any
) -> list[Any]:
    """Everybody's batches of the first epoch; a step takes `seconds` by rank."""

    def work(job: FakeJob) -> list[list[int]]:
        found = []
        for batch in DataLoader(Numbers(num_samples), batch_size, job=job, **options):
            if seconds is not None:
                time.sleep(seconds[job.rank])
            found.append(batch.tolist())
            job.step()
        return found

    return lease_queue.run(work)


def flat(world: list[list[list[int]]]) -> list[int]:
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(world)))


@pytest.mark.parametrize("in_rounds", [True, False])
@pytest.mark.parametrize("num_samples", [1, 2, 3, 20, 23, 307])
def test_every_sample_goes_to_exactly_one_worker(num_samples: int, in_rounds: bool) -> None:
    lease_queue = LeaseQueue(3, in_rounds=in_rounds)
    world = epoch_of(lease_queue, num_samples, shuffle=True, seed=5)
    assert sorted(flat(world)) == list(range(num_samples))
    assert lease_queue.left == 0 and lease_queue.passed_over == 0
    assert [job.num_rests for job in lease_queue] == [1, 1, 1]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("in_rounds", [True, False])
def test_also_when_data_processes_read_ahead(num_workers: int, in_rounds: bool) -> None:
    """What a process has read ahead may be what the others wait for: nobody waits with a batch in hand."""
    lease_queue = LeaseQueue(2, in_rounds=in_rounds)
    world = epoch_of(lease_queue, 101, num_workers=num_workers, persistent_workers=num_workers == 2)
    assert sorted(flat(world)) == list(range(101)) and lease_queue.left == 0


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "num_workers"), [(20, 4, 2), (200, 4, 3), (96, 8, 4), (7, 4, 2)]
)
def test_rounds_are_the_global_batches_of_the_order(num_samples: int, batch_size: int, num_workers: int) -> None:
    """Round k is exactly the next num_workers × batch_size positions, each worker's part in the order of ranks."""
    world = epoch_of(LeaseQueue(num_workers), num_samples, batch_size, shuffle=True, seed=9)
    rounds = [list(itertools.chain(*parts)) for parts in itertools.zip_longest(*world, fillvalue=[])]
    expected, wide = order(num_samples, 9, 0), num_workers * batch_size
    assert rounds[: num_samples // wide] == [expected[k * wide : (k + 1) * wide] for k in range(num_samples // wide)]
    assert sorted(itertools.chain(*rounds)) == list(range(num_samples))


def test_rounds_are_the_same_whoever_is_slow() -> None:
    worlds = [epoch_of(LeaseQueue(2), 64, seconds=seconds) for seconds in ([0, 0.003], [0.003, 0])]
    assert worlds[0] == worlds[1]


def test_drop_last_leaves_out_the_partial_global_batch() -> None:
    lease_queue = LeaseQueue(3)
    world = epoch_of(lease_queue, 47, drop_last=True)
    assert [len(parts) for parts in world] == [3, 3, 3] and lease_queue.left == 0
    assert sorted(flat(world)) == list(range(36))


def test_the_fast_take_more_where_nobody_steps_together() -> None:
    """One step of the slow one takes as long as seventy of the other."""
    seventy = threading.Event()

    def work(job: FakeJob) -> list[list[int]]:
        found = []
        for batch in DataLoader(Numbers(400), 4, job=job):
            if job.rank == 1:
                seventy.wait(PATIENCE)
            found.append(batch.tolist())
            job.step()
            if job.rank == 0 and len(found) == 70:
                seventy.set()
        return found

    world = LeaseQueue(2, in_rounds=False).run(work)
    assert sorted(flat(world)) == list(range(400))
    assert len(world[0]) > 2 * len(world[1])


def test_parts_of_a_global_batch_follow_the_speeds() -> None:
    """batch="auto": the speeds are known, so the first parts are already wide and narrow; rounds stay whole."""
    lease_queue = LeaseQueue(2)
    lease_queue.leasing.measured("worker-0", 300, 1.0)
    lease_queue.leasing.measured("worker-1", 100, 1.0)
    world = epoch_of(lease_queue, 160, 16, batch="auto")
    assert sorted(flat(world)) == list(range(160))
    assert [(len(one), len(two)) for one, two in zip(*world, strict=True)] == [(24, 8)] * 5


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_recall_in_the_middle_takes_what_is_not_begun_and_nothing_else(num_workers: int) -> None:
    """A data process has batches in hand: they stay with this worker, and the rest is given out once."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    for job in lease_queue:
        lease_queue.leasing.measured(job.owner[0], 10_000, 1.0)  # so that leases are long
    slow = iter(DataLoader(Numbers(400), 4, num_workers=num_workers, job=lease_queue[0]))
    mine = [next(slow).tolist(), next(slow).tolist()]
    lease_queue[0].step()
    before = lease_queue.leased_to("worker-0")
    lease_queue.recall(lease_queue[0].owner, "loader-0", 0)
    assert lease_queue.leased_to("worker-0") < before

    def work(job: FakeJob) -> list[list[int]]:
        found = []
        for batch in slow if job.rank == 0 else DataLoader(Numbers(400), 4, job=job):
            found.append(batch.tolist())
            job.step()
        return found

    assert sorted(flat([mine, *lease_queue.run(work)])) == list(range(400))


def test_a_coordinator_that_is_away_stops_nobody_who_has_leases() -> None:
    """Leases are asked for ahead: with the coordinator gone the worker reads on, and more when it is back."""
    lease_queue = LeaseQueue(in_rounds=False)
    job = lease_queue[0]
    lease_queue.leasing.measured("worker-0", 1000, 1.0)
    batches = iter(DataLoader(Numbers(2000), 10, job=job))
    read = [next(batches).tolist()]
    job.step()
    leased = lease_queue.leased_to("worker-0")
    assert leased >= 1000, "half of all, and more that was asked for ahead"
    with lease_queue.change:
        lease_queue.is_away = True
        num_heard = len(lease_queue.heard)
    while len(read) < leased // 10:
        read.append(next(batches).tolist())
        job.step()
    assert len(lease_queue.heard) == num_heard, "it has waited for no answer"
    comes_back(lease_queue)
    for batch in batches:
        read.append(batch.tolist())
        job.step()
    assert sorted(itertools.chain(*read)) == list(range(2000)) and lease_queue.left == 0


def comes_back(lease_queue: LeaseQueue) -> None:
    with lease_queue.change:
        lease_queue.is_away = False
        lease_queue.change.notify_all()


def test_a_lease_whose_word_got_lost_is_given_once_more() -> None:
    """The coordinator gave it and died, or the connection broke: the worker has never heard of it."""
    lease_queue = LeaseQueue(in_rounds=False)
    job = lease_queue[0]
    batches = iter(DataLoader(Numbers(200), 4, job=job))
    read = [next(batches).tolist()]
    lease_queue.loses_answers = True
    while not lease_queue.num_lost:
        read.append(next(batches).tolist())
    lease_queue.loses_answers = False
    for batch in batches:
        read.append(batch.tolist())
        job.step()
    assert sorted(itertools.chain(*read)) == list(range(200)) and lease_queue.left == 0


def test_a_lease_on_its_way_goes_back_with_the_loop_that_is_left() -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    batches = iter(DataLoader(Numbers(200), 4, job=lease_queue[0]))
    next(batches)
    lease_queue[0].step()
    lease_queue.loses_answers = True
    num_read = 4
    while not lease_queue.num_lost:
        num_read += len(next(batches))
        lease_queue[0].step()
    lease_queue.loses_answers = False
    del batches
    assert any(isinstance(message, LeaveEpoch) for message in lease_queue.heard)

    def work(job: FakeJob) -> list[int]:
        found: list[int] = []
        for batch in DataLoader(Numbers(200), 4, job=job) if job.rank == 1 else ():
            found += batch.tolist()
            job.step()
        return found

    assert lease_queue.run(work)[1] == list(range(num_read, 200))


def test_a_loop_that_is_left_while_the_coordinator_is_away_is_left_when_it_is_back() -> None:
    """It was away for longer than anybody waits for it. What was leased for that loop would be nobody's."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    batches = iter(DataLoader(Numbers(40), 4, job=lease_queue[0]))
    next(batches)
    lease_queue[0].step()
    lease_queue.is_gone = True
    del batches
    lease_queue.is_gone = False
    assert not any(isinstance(message, LeaveEpoch) for message in lease_queue.heard)
    lease_queue[0].samples.let_go()  # as whatever it does next

    def work(job: FakeJob) -> list[int]:
        found: list[int] = []
        for batch in DataLoader(Numbers(40), 4, job=job) if job.rank == 1 else ():
            found += batch.tolist()
            job.step()
        return found

    assert lease_queue.run(work)[1] == list(range(4, 40))


def one_sample_for_two(lease_queue: LeaseQueue, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
    """Everybody's batches; whoever has the one there is makes its step when the other one waits for it."""

    def work(job: FakeJob) -> list[list[int]]:
        found = []
        for batch in DataLoader(Numbers(1), 4, job=job):
            found.append(batch.tolist())
            deadline = time.monotonic() + PATIENCE
            while not any(other.num_pauses for other in lease_queue if other is not job):
                assert time.monotonic() < deadline, "the other one does not wait"
                time.sleep(0.005)
            meanwhile()
            job.step()
        return found

    return lease_queue.run(work)


def test_who_is_through_waits_for_the_end_and_takes_part_in_no_round_meanwhile() -> None:
    """One sample, two workers: the one without a batch pauses, and the other's round is whole without it."""
    lease_queue = LeaseQueue(2)
    world = one_sample_for_two(lease_queue)
    assert sorted(map(len, world)) == [0, 1]
    assert lease_queue.num_rounds == 1


def test_samples_that_wait_for_a_commit_hold_nobody_up() -> None:
    """Gradients of two batches are accumulated: the odd one counts with the first step of the next epoch."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    both = threading.Barrier(2)  # who gets less than two batches of an epoch makes no step in it

    def work(job: FakeJob) -> int:
        loader, count = DataLoader(Numbers(52), 4, job=job), 0
        for _ in range(2):
            for number, batch in enumerate(loader):
                count += len(batch)
                if count % 8 == 0:
                    job.step()
                if number == 1:
                    both.wait(PATIENCE)
        job.step()
        return count

    assert sum(lease_queue.run(work)) == 104
    assert lease_queue.left == 0 and lease_queue.passed_over == 0


class Ticks:
    """A clock that goes when it is told to."""

    now = 0.0
    monotonic = staticmethod(time.monotonic)

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    found = Ticks()
    monkeypatch.setattr(waits, "time", found)
    return found


def test_waits_for_others_are_no_time_of_work(ticks: Ticks) -> None:
    """Who waits for the end of an epoch is not slow by it."""
    lease_queue = LeaseQueue(2)

    def take_long() -> None:
        ticks.now = 100.0

    one_sample_for_two(lease_queue, take_long)
    waited = next(job for job in lease_queue if not job.own_step)
    waited.times.lap("compute")  # its next step
    assert (waited.times.times().wait, waited.times.work_seconds) == (100.0, 0.0)


def test_a_speed_is_of_whole_steps(ticks: Ticks) -> None:
    """Asked for in the middle of a long step, as beats do: its samples count when its seconds do."""
    clock = waits.StepClock()
    clock.resume()
    ticks.now = 2.0
    clock.lap("compute")
    clock.made_step(10)
    ticks.now = 5.0
    clock.lap("compute")
    assert clock.measured == (10, 2.0), "ten more are read, and not through"
    clock.made_step(20)
    assert clock.measured == (20, 5.0)


def test_what_is_between_two_loops_is_no_time_of_work(ticks: Ticks) -> None:
    """An evaluation after an epoch: the next step is not slow by it."""
    lease_queue = LeaseQueue(1)
    epoch_of(lease_queue, 1)
    ticks.now = 100.0
    epoch_of(lease_queue, 2)
    assert lease_queue[0].times.measured == (3, 0.0)


def test_what_was_used_is_known_until_nobody_asks_for_it() -> None:
    """With coordinator and servers the end of an epoch may be forgotten: only workers know then what they used."""
    acks = LeaseAcks()
    for lease in (1, 2, 3):
        acks.answered([(lease, 0, 4)], is_late=False)
    acks.forget({1})
    assert [lease for lease, _, _ in acks.committed()] == [1, 2, 3]
    acks.forget({2})
    assert [lease for lease, _, _ in acks.committed()] == [2, 3], "another epoch is over since"
