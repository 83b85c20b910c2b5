"""Workers without a network: jobs that lease their samples from a small coordinator in this process."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tests.patience import PATIENCE

from syncline.core.leasing.leases import SHARD_POSITIONS, LeaseState, Leasing
from syncline.core.leasing.order import Order
from syncline.core.leasing.ranges import Span
from syncline.core.wire.leases import AskLease, EndShard, GivenLease, LeaveEpoch, Opened, OpenEpoch, Recall
from syncline.core.wire.message import Done, Message
from syncline.errors import ConnectionLost, SynclineError, WaitTimeout
from syncline.worker.checkpoint.boundary import Boundary
from syncline.worker.data.leases import LeaseAcks
from syncline.worker.data.samples import WorkerSamples
from syncline.worker.waits import StepClock

SECONDS = PATIENCE


def order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """The samples of an epoch, in its order."""
    return Order(num_samples, seed, epoch).at(np.arange(num_samples)).tolist()


class LeaseQueue:
    """A coordinator of leases. Workers wait at it as they do at a real one; in rounds, steps wait for each other."""

    def __init__(self, num_workers: int = 1, *, in_rounds: bool = True) -> None:
        self.leasing = Leasing(LeaseState(), in_rounds=in_rounds)
        self.in_rounds = in_rounds
        self.change = threading.Condition(threading.RLock())
        self.is_away = self.loses_answers = False
        self.is_gone = False  # for longer than anybody waits
        self.heard: list[Message] = []
        self.jobs = [FakeJob(self, rank, num_workers) for rank in range(num_workers)]
        self._stepping: set[FakeJob] = set(self.jobs)
        self._arrived: set[FakeJob] = set()
        self.num_rounds = self.num_lost = 0

    def __iter__(self) -> Iterator[FakeJob]:
        return iter(self.jobs)

    def __getitem__(self, rank: int) -> FakeJob:
        return self.jobs[rank]

    def run(self, work: Callable[[FakeJob], Any]) -> list[Any]:
        """Each worker in a thread of its own; what each returns."""
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def one(job: FakeJob) -> None:
            try:
                results[job.rank] = work(job)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(job,), daemon=True) for job in self.jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), self.leasing.state
        return [results[job.rank] for job in self.jobs]

    # -- as the coordinator -------------------------------------------------------------------------------

    def answer(self, job: FakeJob, message: Message, *, once: bool = False) -> Message:
        until = time.monotonic() + SECONDS
        with self.change:
            if self.is_gone:
                raise WaitTimeout("no coordinator")
            if self.is_away and once:
                raise ConnectionLost("away")
            self.change.wait_for(lambda: not self.is_away, SECONDS)
            self.heard.append(message)
            while (answer := self._decide(job, message)) is None:
                assert self.change.wait(max(0.0, until - time.monotonic())), f"{message}: {self.leasing.state}"
            self.change.notify_all()
            return answer

    def _decide(self, job: FakeJob, message: Message) -> Message | None:
        leasing = self.leasing
        if isinstance(message, OpenEpoch):
            seed = message.seed
            if seed is not None:
                seed = leasing.seed(message.loader, seed, counts=message.insists or job is self.jobs[0])
                if seed is None:
                    return Opened(False, is_early=True)
            is_left = leasing.open(job.owner, message.loader, message.epoch, message.data, len(self.jobs))
            return Opened(is_left, leasing.is_shared(message.loader), seed)
        if isinstance(message, LeaveEpoch):
            epoch = leasing.epoch(message.loader, message.epoch)
            for use in message.passed_over:
                assert epoch is not None
                epoch.pass_over(*use)
            leasing.leave(job.owner, message.loader, message.epoch, message.leases, message.newest)
            return Done()
        if isinstance(message, EndShard):
            epoch = leasing.epoch(message.loader, message.epoch)
            assert epoch is not None
            epoch.shorten(message.position, (message.position // SHARD_POSITIONS + 1) * SHARD_POSITIONS)
            return Done()
        assert isinstance(message, AskLease)
        return self._lease(job, message)

    def _lease(self, job: FakeJob, message: AskLease) -> GivenLease | None:
        answer = self.leasing.ask(
            job.owner, message.loader, message.epoch, [one.owner for one in self.jobs], message.held,
            is_idle=not message.left, newest=message.newest, given=message.given,
        )  # fmt: skip
        for other in answer.recall:
            self.recall(other, message.loader, message.epoch)
        if answer.recall:
            return self._lease(job, message)
        if answer.lease is not None:
            return GivenLease(
                answer.lease.number,
                answer.lease.span,
                step=answer.lease.step,
                origin=answer.lease.origin,
                wide=answer.lease.wide,
            )
        if answer.is_finished or not (message.waits or answer.is_coming):
            return GivenLease(0, Span(0, 0), answer.is_finished, is_shared=self.leasing.is_shared(message.loader))
        return None

    def recall(self, owner: tuple[str, int], loader: str, epoch: int) -> None:
        with self.change:
            job = next(one for one in self.jobs if one.owner == owner)
            given = job.samples.give_back(Recall(loader, epoch))
            self.leasing.gave_back(owner, loader, epoch, given.leases)
            self.change.notify_all()

    # -- as the servers -----------------------------------------------------------------------------------

    def commit(self, job: FakeJob) -> None:
        with self.change:
            self.leasing.used(job.samples.lease_acks.take())
            self.change.notify_all()
            if not self.in_rounds:
                return
            self._stepping.add(job)
            self._arrived.add(job)
            number = self.num_rounds
            self._close_round()
            assert self.change.wait_for(lambda: self.num_rounds > number, SECONDS)

    def rest(self, job: FakeJob) -> None:
        with self.change:
            self._stepping.discard(job)
            self._close_round()

    def _close_round(self) -> None:
        if self._arrived and self._arrived >= self._stepping:
            self._arrived.clear()
            self.num_rounds += 1
            self.change.notify_all()

    def leased_to(self, worker: str) -> int:
        """Samples that it has leased and not used."""
        epochs = [epoch for epochs in self.leasing.state.epochs.values() for epoch in epochs.values()]
        return sum(lease.num_left for e in epochs for lease in e.leases.values() if lease.worker == worker)

    @property
    def passed_over(self) -> int:
        return sum(e.num_passed_over for epochs in self.leasing.state.epochs.values() for e in epochs.values())

    @property
    def left(self) -> int:
        """Samples that are to do, or leased."""
        epochs = [epoch for epochs in self.leasing.state.epochs.values() for epoch in epochs.values()]
        return sum(e.num_todo + sum(lease.num_left for lease in e.leases.values()) for e in epochs)


class Answered:
    """A question that is not waited for; here it is answered when somebody looks."""

    def __init__(self, lease_queue: LeaseQueue, job: FakeJob, message: Message) -> None:
        self._answer: Message | None = None
        self._error: SynclineError | None = None
        self._thread = threading.Thread(target=self._ask, args=(lease_queue, job, message), daemon=True)
        self._thread.start()
        self._thread.join(0.01)  # most are answered at once

    def _ask(self, lease_queue: LeaseQueue, job: FakeJob, message: Message) -> None:
        try:
            self._answer = lease_queue.answer(job, message, once=True)
            if lease_queue.loses_answers:
                lease_queue.num_lost += 1
                raise ConnectionLost("away")
        except SynclineError as error:
            self._error = error

    def arrives(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def wait(self, timeout_seconds: float) -> Message:
        if not self.arrives(timeout_seconds):
            raise WaitTimeout("no answer")
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer


@dataclasses.dataclass
class FakeScript:
    """What a script has read and committed, for a `Boundary`: `Boundary(script, script)`."""

    clock: int = 0
    num_loops: int = 0
    is_any_held: bool = False


class FakeJob:
    """A worker's job, with real leases; it writes down when it rests."""

    def __init__(self, lease_queue: LeaseQueue, rank: int, world_size: int) -> None:
        self.lease_queue, self.rank, self.world_size = lease_queue, rank, world_size
        self.owner = (f"worker-{rank}", rank + 1)
        self.own_step = self.num_rests = self.num_pauses = self.num_caught_up = 0
        self.noticed: list[str] = []
        self.times = StepClock()
        boundary = Boundary(script := FakeScript(), script)
        self.samples = WorkerSamples(self, LeaseAcks(), self.times, self, boundary)

    @property
    def in_rounds(self) -> bool:
        return self.lease_queue.in_rounds

    def ask(self, message: Message) -> Message:
        return self.lease_queue.answer(self, message)

    def try_ask(self, message: Message) -> Answered:
        if self.lease_queue.is_away:
            raise ConnectionLost("away")
        return Answered(self.lease_queue, self, message)

    def step(self) -> None:
        """A commit of all that was read."""
        self.own_step += 1
        self.times.lap("compute")
        self.times.made_step(self.samples.lease_acks.samples)
        self.lease_queue.commit(self)

    def rest(self, *, leaves: bool = True) -> None:
        self.num_rests += 1
        self.lease_queue.rest(self)

    def script_went_on(self) -> None:
        """There is no script."""

    def notice(self, text: str, *, is_own: bool = False) -> None:
        self.noticed.append(text)

    def pause(self) -> None:
        self.num_pauses += 1
        self.lease_queue.rest(self)

    should_stop = False

    def catch_up(self, *, enters: bool) -> None:
        self.num_caught_up += 1


def alone() -> FakeJob:
    """The only worker of a job."""
    return LeaseQueue()[0]
