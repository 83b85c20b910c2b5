"""A worker's leases: what it reads next in an epoch, and what of it is read, held and committed.

A `Portion` holds the leases of one epoch and cuts them into batches from front to back. `EpochLeases` asks the
coordinator for more. `LeaseAcks` counts what the script has read, until a commit acknowledges it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable
from typing import Protocol

import msgspec

from syncline.core.leasing.loader import VALIDATES, Loader
from syncline.core.leasing.ranges import Places, Span, merged
from syncline.core.leasing.shares import equal_parts
from syncline.core.wire.leases import (
    AskLease,
    EndShard,
    GaveBack,
    GivenLease,
    LeaseAck,
    LeaveEpoch,
    Opened,
    OpenEpoch,
)
from syncline.core.wire.message import Message
from syncline.errors import SynclineError
from syncline.worker.waits import StepClock, ValidationCalled


@dataclasses.dataclass(frozen=True)
class BatchRange:
    """What one batch is to hold: places of a lease, which stand for positions of its span."""

    lease: int
    span: Span
    begin: int
    end: int
    at: int = 0  # how many samples of the epoch are done before it; in rounds the same for all workers of one

    def __len__(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass
class _Own:
    """A lease of this worker: what of it is cut into batches, and where it ends."""

    number: int
    span: Span
    begin: int  # the next place to be read
    end: int
    step: int  # samples of a batch; 0: as the portion says
    origin: int  # samples of the epoch that are done before its first batch
    wide: int  # and with each of its batches


class Portion:
    """Of one loop. The thread that hears the coordinator may have it give back at any time."""

    def __init__(self, batch: int) -> None:
        self.batch = batch  #: samples of a batch of a lease that does not say it
        self.step = 0  #: samples of a batch of the lease that is being cut
        self._lock = threading.Lock()
        self._own: collections.deque[_Own] = collections.deque()
        self._given: dict[int, int] = {}  # leases that end early, and where
        self._size = 0  # of the last lease
        self.numbers: set[int] = set()  # of all leases of this loop
        self.newest = 0  # of them

    def take(self, given: GivenLease) -> None:
        """The next lease."""
        with self._lock:
            if given.lease in self.numbers:
                return  # it was here already
            self.numbers.add(given.lease)
            self.newest = given.lease
            self._size = len(given.span)
            self._own.append(
                _Own(given.lease, given.span, given.begin, self._size, given.step, given.origin, given.wide)
            )

    def cut(self) -> BatchRange | None:
        """The next batch; None: nothing is left here."""
        with self._lock:
            while self._own and self._own[0].begin >= self._own[0].end:
                self._own.popleft()
            if not self._own:
                return None
            own = self._own[0]
            self.step = own.step or self.batch
            end = min(own.begin + self.step, own.end)
            at = own.origin + own.begin // self.step * own.wide
            piece = BatchRange(own.number, own.span, own.begin, end, at)
            own.begin = end
            return piece

    @property
    def num_left(self) -> int:
        """Samples that are leased and not cut into batches yet."""
        with self._lock:
            return sum(own.end - own.begin for own in self._own)

    @property
    def is_low(self) -> bool:
        """Whether it is time to ask for more: while a whole lease is still to be read."""
        return self.num_left <= self._size

    def end_shard(self, piece: BatchRange, num_read: int) -> BatchRange | None:
        """Of this batch only so much was there: the shard ends with it. What of the batch there is, if anything."""
        end = piece.begin + num_read
        with self._lock:
            for own in self._own:
                if own.number == piece.lease:
                    own.begin = own.end = end
        return dataclasses.replace(piece, end=end) if num_read else None

    def give_back(self, *, keeps_begun: bool) -> list[tuple[int, int]]:
        """What is not cut into batches yet is others'; `keeps_begun`: not of what is begun.

        With all that was given back before: a coordinator may have died before it kept that.
        """
        with self._lock:
            for own in self._own:
                if own.begin < own.end and not (keeps_begun and own.begin):
                    self._given[own.number] = own.end = own.begin
            return list(self._given.items())

    @property
    def given(self) -> list[tuple[int, int]]:
        """All that was given back so far: leases, and the places from which on."""
        with self._lock:
            return list(self._given.items())

    def leave(self, unread: Iterable[BatchRange]) -> dict[int, int]:
        """The loop is left, and these pieces were not given to the script: all leases that end early by it, where."""
        given = dict(self.give_back(keeps_begun=False))
        for piece in unread:
            given[piece.lease] = min(piece.begin, given.get(piece.lease, piece.begin))
        return given


#: An answer that did not come: the coordinator is away, and asked again so soon.
_AGAIN_SECONDS, _ANSWER_SECONDS = 0.25, 5.0
#: So long a worker that opens a loader first waits for the chief's seed; and between two questions, at first.
CHIEF_SECONDS, _FIRST_PAUSE_SECONDS = 5.0, 0.01


class AsksCoordinator(Protocol):
    """The way to the coordinator."""

    def ask(self, message: Message) -> Message:
        """Waits for the answer, as long as it takes."""

    def try_ask(self, message: Message) -> PendingAnswer:
        """One attempt, not waited for."""


class Pauses(Protocol):
    """The worker, as rounds know it."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def pause(self) -> None:
        """No round of this loop waits for it any more; before a wait for others."""

    def rest(self) -> None:
        """Nor of the loop that it has left."""

    def catch_up(self) -> None:
        """Others went on without it: after that wait."""

    @property
    def should_stop(self) -> bool:
        """Whether training is over by one of the job's rules."""


def part_of(data: Loader, worker: Pauses) -> int:
    """Samples of this worker's batch, where its lease does not say it: of shards."""
    if not data.is_global:
        return data.batch
    rank, num_workers = worker.rank, worker.world_size
    return max(1, equal_parts(data.batch, num_workers)[min(rank, num_workers - 1)])


class PendingAnswer(Protocol):
    """A question under way."""

    def arrives(self, seconds: float) -> bool:
        """Whether the answer is here, or comes so soon."""

    def wait(self, timeout_seconds: float) -> Message:
        """The answer, or what keeps it from coming."""


class LeaseAcks:
    """What this worker has read and not committed yet, for all loaders of a job; every commit acknowledges it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[LeaseAck] = []
        self._stepped: list[LeaseAck] = []  # in local steps, which the next commit brings
        self._void: list[LeaseAck] = []  # in pushes that were refused
        self._open: set[LeaseAck] = set()  # in commits that are not answered yet
        self._awaited: set[LeaseAck] | None = None  # of these, what was open when it was first asked what is used
        self._committed: dict[int, list[Places]] = {}
        self._late: dict[int, list[Places]] = {}
        self.samples = 0  # read so far
        self.num_loops = 0  # that this worker is in
        self._has_read = False  # in one of these
        self._over: set[int] = set()  # leases of the last epoch that is over

    def read(self, piece: BatchRange) -> None:
        """The script has got this batch."""
        with self._lock:
            self._read.append((piece.lease, piece.begin, piece.end))
            self.samples += len(piece)
            self._has_read = True

    def stepped(self) -> None:
        """What was read is in a step."""
        with self._lock:
            self._stepped += self._read
            self._read = []

    def take(self, *, is_void: bool = False) -> list[LeaseAck]:
        """All of it, for the commit that is made now. `is_void`: nothing of that counts; it is passed over."""
        with self._lock:
            taken, self._read, self._stepped = self._stepped + self._read, [], []
            if is_void:
                self._void += taken
                return []
            self._open.update(taken)
        return taken

    def answered(self, acks: Iterable[LeaseAck], *, is_late: bool) -> None:
        """A commit that took these along is answered; `is_late`: it counts for nothing, they are others' by now."""
        known = self._late if is_late else self._committed
        with self._lock:
            for lease, begin, end in acks:
                known[lease] = merged([*known.get(lease, ()), (begin, end)])
                self._open.discard((lease, begin, end))

    def are_told(self) -> bool:
        """Whether `committed` and `late` have all by now that was in commits when this was first asked; else it is to
        be asked again. What is open may be on a slice that was lost, and nowhere else."""
        with self._lock:
            self._awaited = self._open & (self._open if self._awaited is None else self._awaited)
            is_all = not self._awaited
            self._awaited = None if is_all else self._awaited
            return is_all

    def committed(self) -> list[LeaseAck]:
        """What was in commits that are answered, of leases that are not through. What is open servers will tell."""
        with self._lock:
            return [(lease, begin, end) for lease, places in self._committed.items() for begin, end in places]

    def late(self) -> list[LeaseAck]:
        """What was in commits that were late, of leases that are not through."""
        with self._lock:
            return [(lease, begin, end) for lease, places in self._late.items() for begin, end in places]

    def forget(self, leases: set[int]) -> None:
        """The epoch of these leases is over; the one before it will not be asked for any more.

        This one may be: a coordinator and servers that die now know nothing of its end.
        """
        with self._lock:
            leases, self._over = self._over, set(leases)
            for lease in leases - {use[0] for use in [*self._read, *self._stepped]}:
                self._committed.pop(lease, None)
                self._late.pop(lease, None)

    def leave_loop(self) -> None:
        """This worker is in one loop less."""
        self.num_loops -= 1
        self._has_read = self._has_read and self.num_loops > 0

    @property
    def has_position(self) -> bool:
        """Whether a commit that is made now belongs to what was read of leases: the batch that the script has, also
        with a second optimizer; or what it has kept for this step."""
        return self._has_read or self.is_any_held

    @property
    def is_any_held(self) -> bool:
        """Whether anything waits for a commit."""
        return bool(self._read or self._stepped)

    def held(self, leases: set[int]) -> list[LeaseAck]:
        """What of these leases waits for a commit, or for the end of the loop, to be passed over."""
        with self._lock:
            places: dict[int, list[Places]] = {}
            for lease, begin, end in [*self._read, *self._stepped, *self._void]:
                if lease in leases:
                    places[lease] = merged([*places.get(lease, ()), (begin, end)])
        return [(lease, begin, end) for lease, each in places.items() for begin, end in each]

    def drop_void(self, leases: set[int]) -> list[LeaseAck]:
        """What of these leases was in pushes that were refused."""
        with self._lock:
            dropped = [use for use in self._void if use[0] in leases]
            self._void = [use for use in self._void if use[0] not in leases]
        return dropped

    def drop(self, leases: set[int]) -> list[LeaseAck]:
        """What of these leases was read for no step: it is in none from now on."""
        with self._lock:
            dropped = [use for use in self._read if use[0] in leases]
            self._read = [use for use in self._read if use[0] not in leases]
        return dropped


class EpochLeases:
    """This worker's loop over one epoch of a loader: batches to read, until the epoch is finished."""

    def __init__(
        self,
        asks: AsksCoordinator,
        acks: LeaseAcks,
        loader: str,
        epoch: int,
        data: Loader,
        *,
        times: StepClock,
        worker: Pauses,
        seed: int | None = None,
    ) -> None:
        """`times`: how long this worker has worked so far. `seed`: of the loader's order, as this worker has it."""
        self.loader, self.epoch = loader, epoch
        self._asks, self._acks, self._data = asks, acks, data
        self._times, self._worker = times, worker
        self._portion = Portion(part_of(data, worker))
        self._asked: PendingAnswer | None = None  # a lease that was asked for ahead
        self._ahead = threading.Lock()  # whoever takes what came of it: the script, or a recall
        self._not_before = 0.0  # there was no answer, or nothing in it
        self._told = times.measured  # samples and seconds of work, as last said
        self._untold: list[LeaveEpoch] = []  # what the coordinator is still to hear of the end of this loop
        self._is_common = False  # all of the epoch was leased to all workers
        answer = Opened(False) if self._is_over else _opened(asks, OpenEpoch(loader, epoch, data, seed))
        self.seed = seed if answer.seed is None else answer.seed  #: of the loader's order, in all workers
        self._is_finished = not answer.is_left
        times.resume()  # what was between two loops, an evaluation for instance, is no part of a step
        acks.num_loops += 1
        self.is_shared = answer.is_shared  #: whether all workers come to this loader's epochs, by what is known

    @property
    def _is_over(self) -> bool:
        return self._worker.should_stop and not self.loader.startswith(VALIDATES)

    def next(self, *, may_wait: bool = True) -> BatchRange | None:
        """The next batch to read; None when the epoch or training is over, or there is none without a wait."""
        while not self._is_over:
            self._ask_ahead()
            self._portion.batch = part_of(self._data, self._worker)
            piece = self._portion.cut()
            if piece is not None or self._is_finished or not may_wait:
                return piece
            self._times.lap("compute")
            answer = self._wait()
            self._times.lap("wait")
            self._take(answer)
        return None

    def resume(self) -> None:
        """The script begins its loop: what it did before, an evaluation for instance, is no part of a step."""
        self._times.resume()

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def num_left(self) -> int:
        """Samples that are leased and not cut into batches yet."""
        return self._portion.num_left

    @property
    def step(self) -> int:
        """Samples of a batch of this worker now; 0 before the first one."""
        return self._portion.step

    # -- asking -------------------------------------------------------------------------------------------

    def _question(self, *, waits: bool) -> AskLease:
        samples, seconds = self._times.measured
        before, self._told = self._told, (samples, seconds)
        portion = self._portion
        return AskLease(
            self.loader, self.epoch, self._acks.held(portion.numbers), portion.num_left,
            samples - before[0], seconds - before[1], waits, portion.newest, portion.given,
        )  # fmt: skip

    def _ask_ahead(self) -> None:
        """While a whole lease is still to be read, so that training goes on without the coordinator."""
        now = time.monotonic()
        try:
            self._take_ahead()
            if self._is_finished or self._asked is not None or now < self._not_before:
                return
            if self._is_common and self._portion.num_left:
                return  # there is no more than this
            if self._portion.is_low:
                self._asked = self._asks.try_ask(self._question(waits=False))
        except SynclineError:
            self._not_before = now + _AGAIN_SECONDS

    def _take_ahead(self) -> None:
        """Takes the lease that was asked for ahead, if it has come."""
        with self._ahead:
            asked = self._asked
            if asked is not None and asked.arrives(0):
                self._asked = None
                self._take(asked.wait(0))

    def _wait(self) -> Message:
        """Nothing is left here. When others have all the rest, no round is to wait for this worker meanwhile."""
        with self._ahead:
            asked, self._asked = self._asked, None
        if asked is not None:
            with contextlib.suppress(SynclineError):
                answer = asked.wait(_ANSWER_SECONDS)
                if isinstance(answer, GivenLease) and (answer.lease or answer.is_finished):
                    return answer
        answer = self._asks.ask(self._question(waits=False))
        if isinstance(answer, GivenLease) and (answer.lease or answer.is_finished):
            return answer
        answer = self._wait_for_others()
        if not self._acks.is_any_held:  # else more is added to what was computed already, with what was known then
            self._worker.catch_up()
        return answer

    def _wait_for_others(self) -> Message:
        while True:
            self._worker.pause()
            try:
                return self._asks.ask(self._question(waits=True))
            except ValidationCalled as called:
                called.answer()

    def _take(self, answer: Message) -> None:
        assert isinstance(answer, GivenLease)
        if answer.is_finished:
            self._is_finished, self.is_shared = True, answer.is_shared
        elif answer.lease:
            self._is_common = answer.is_common
            self._portion.take(answer)
        else:
            self._not_before = time.monotonic() + _AGAIN_SECONDS

    def end_shard(self, piece: BatchRange, num_read: int) -> BatchRange | None:
        """Of this batch only so much was there: the shard ends with it. What of the batch there is, if anything."""
        found = self._portion.end_shard(piece, num_read)
        self._asks.ask(EndShard(self.loader, self.epoch, piece.span.start + piece.begin + num_read))
        return found

    # -- giving back --------------------------------------------------------------------------------------

    def give_back(self) -> GaveBack:
        """What is not cut into batches yet is others'; in the thread that hears the coordinator.

        Nothing of a shard that is begun: the next worker must read it from its first sample. A lease that has come
        ahead is given back too: the script may be in a long step, and takes it after that only.
        """
        with contextlib.suppress(SynclineError):
            self._take_ahead()
        newest = self._portion.newest  # before that: one that comes now is not given back
        return GaveBack(self._portion.give_back(keeps_begun=self._data.num_shards > 0), newest)

    def leave(self, unread: list[BatchRange], *, passes_over: bool) -> int:
        """The loop is left: what was not given to the script goes back, what it made no step with is passed over. How
        many samples that are. The coordinator hears of it by `tell_left`."""
        given, numbers = self._portion.leave(unread), self._portion.numbers
        dropped = self._acks.drop(numbers) if passes_over else []
        passed_over = dropped + self._acks.drop_void(numbers)
        self._is_finished, was_finished = True, self._is_finished
        if given or passed_over or not was_finished:
            newest = self._portion.newest
            self._untold.append(LeaveEpoch(self.loader, self.epoch, list(given.items()), passed_over, newest))
        if was_finished:  # else a server may still be lost, with what it knows of them
            self._acks.forget(numbers)
        return sum(end - begin for _, begin, end in dropped)

    def tell_left(self) -> None:
        """Sent again when no answer came: other workers wait for what is not read here any more."""
        while self._untold:
            self._asks.ask(self._untold[0])
            del self._untold[0]


def _opened(asks: AsksCoordinator, question: OpenEpoch) -> Opened:
    """The answer, as soon as the job has a seed for this loader: the chief's, or after some seconds this worker's."""
    pause, until = _FIRST_PAUSE_SECONDS, time.monotonic() + CHIEF_SECONDS
    while True:
        answer = asks.ask(question)
        assert isinstance(answer, Opened)
        if not answer.is_early:
            return answer
        if time.monotonic() >= until:
            question = msgspec.structs.replace(question, insists=True)
        else:
            time.sleep(pause)
            pause = min(2 * pause, _AGAIN_SECONDS)
