"""A worker's leases: what to read next in an epoch, and what is read, held and committed.

A `Portion` holds the leases of one epoch and splits them into batches. `EpochLeases` requests more from the
coordinator. `LeaseAcks` records what the script has read, until a commit acknowledges it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable, Sequence
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
    """The samples of one batch: places in a lease, which map to positions of its span."""

    lease: int
    span: Span
    begin: int
    end: int
    at: int = 0  # samples of the epoch before this batch; in rounds the same for all workers

    def __len__(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass
class _Own:
    """A lease of this worker, partly split into batches."""

    number: int
    span: Span
    begin: int  # the next place to read
    end: int
    step: int  # samples per batch; 0: the portion's
    origin: int  # samples of the epoch before its first batch
    wide: int  # samples of the epoch per batch


class Portion:
    """The leases of one loop. The thread that reads from the coordinator may give leases back at any time."""

    def __init__(self, batch: int) -> None:
        self.batch = batch  #: samples per batch, for leases that do not say it
        self.step = 0  #: samples per batch of the current lease
        self._lock = threading.Lock()
        self._own: collections.deque[_Own] = collections.deque()
        self._given: dict[int, int] = {}  # leases that end early -> where
        self._size = 0  # of the last lease
        self.numbers: set[int] = set()  # of all leases of this loop
        self.newest = 0  # of them

    def take(self, given: GivenLease) -> None:
        """The next lease."""
        with self._lock:
            if given.lease in self.numbers:
                return  # known already
            self.numbers.add(given.lease)
            self.newest = given.lease
            self._size = len(given.span)
            self._own.append(
                _Own(given.lease, given.span, given.begin, self._size, given.step, given.origin, given.wide)
            )

    def cut(self) -> BatchRange | None:
        """The next batch; None if there are no leases left."""
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
        """Leased samples that are not in batches yet."""
        with self._lock:
            return sum(own.end - own.begin for own in self._own)

    @property
    def is_low(self) -> bool:
        """Whether to request more: less than one whole lease is left."""
        return self.num_left <= self._size

    def end_shard(self, piece: BatchRange, num_read: int) -> BatchRange | None:
        """The shard ended within this batch after `num_read` samples. Returns the shortened batch, if any."""
        end = piece.begin + num_read
        with self._lock:
            for own in self._own:
                if own.number == piece.lease:
                    own.begin = own.end = end
        return dataclasses.replace(piece, end=end) if num_read else None

    def give_back(self, *, keeps_begun: bool) -> list[tuple[int, int]]:
        """Gives back everything that is not in batches yet; `keeps_begun`: except started leases.

        Includes earlier returns, since a coordinator may have died before it journaled them.
        """
        with self._lock:
            for own in self._own:
                if own.begin < own.end and not (keeps_begun and own.begin):
                    self._given[own.number] = own.end = own.begin
            return list(self._given.items())

    @property
    def given(self) -> list[tuple[int, int]]:
        """Everything given back so far: leases and the place from which on."""
        with self._lock:
            return list(self._given.items())

    def leave(self, unread: Iterable[BatchRange]) -> dict[int, int]:
        """The loop was left with these unread batches: all leases that end early, and where."""
        given = dict(self.give_back(keeps_begun=False))
        for piece in unread:
            given[piece.lease] = min(piece.begin, given.get(piece.lease, piece.begin))
        return given


#: Pause before asking again without an answer, and how long to wait for one.
_AGAIN_SECONDS, _ANSWER_SECONDS = 0.25, 5.0
#: How long to wait for the chief's seed of a loader, and the first pause between two requests.
CHIEF_SECONDS, _FIRST_PAUSE_SECONDS = 5.0, 0.01


class AsksCoordinator(Protocol):
    """The way to the coordinator."""

    def ask(self, message: Message) -> Message:
        """Waits for the answer without a timeout."""

    def try_ask(self, message: Message) -> PendingAnswer:
        """One attempt; returns immediately."""


class Pauses(Protocol):
    """The worker's participation in rounds."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def in_rounds(self) -> bool: ...

    def pause(self) -> None:
        """Before waiting for other workers: no round of this loop waits for this one."""

    def rest(self) -> None:
        """Takes part in no more rounds of the loop it has left."""

    def catch_up(self, *, enters: bool) -> None:
        """After such a wait: other workers went on meanwhile. `enters`: this one goes on too."""

    @property
    def should_stop(self) -> bool:
        """Whether training is over by one of the job's rules."""


def part_of(data: Loader, worker: Pauses) -> int:
    """Samples of this worker's batch if its lease does not say it, as with shards."""
    if not data.is_global:
        return data.batch
    rank, num_workers = worker.rank, worker.world_size
    return max(1, equal_parts(data.batch, num_workers)[min(rank, num_workers - 1)])


class PendingAnswer(Protocol):
    """A request in flight."""

    def arrives(self, seconds: float) -> bool:
        """Whether the answer is here, or arrives in this time."""

    def wait(self, timeout_seconds: float) -> Message:
        """Returns the answer, or raises."""


class LeaseAcks:
    """What this worker has read but not committed, for all loaders of a job. Each commit acknowledges it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[LeaseAck] = []
        self._stepped: list[LeaseAck] = []  # in local steps; part of the next commit
        self._void: list[LeaseAck] = []  # in refused pushes
        self._open: set[LeaseAck] = set()  # in unanswered commits
        self._awaited: set[LeaseAck] | None = None  # of these, what was open at the first question about acks
        self._committed: dict[int, list[Places]] = {}
        self._late: dict[int, list[Places]] = {}
        self.samples = 0  # read so far
        self.num_loops = 0  # that this worker is in
        self._has_read = False  # in one of these loops
        self._over: set[int] = set()  # leases of the last finished epoch

    def read(self, piece: BatchRange) -> None:
        """The script has received this batch."""
        with self._lock:
            self._read.append((piece.lease, piece.begin, piece.end))
            self.samples += len(piece)
            self._has_read = True

    def stepped(self) -> None:
        """What was read is in a step."""
        if not self._read:
            return
        with self._lock:
            self._stepped += self._read
            self._read = []

    def take(self, *, is_void: bool = False) -> list[LeaseAck]:
        """Everything for the commit being made. `is_void`: the commit does not count; the samples are skipped."""
        if not self.is_any_held:  # only the script's thread, which is here, reads more
            return []
        with self._lock:
            taken, self._read, self._stepped = self._stepped + self._read, [], []
            if is_void:
                self._void += taken
                return []
            self._open.update(taken)
        return taken

    def answered(self, acks: Sequence[LeaseAck], *, is_late: bool) -> None:
        """The commit with these ranges is answered. `is_late`: it did not count; the ranges are reassigned."""
        if not acks:
            return
        known = self._late if is_late else self._committed
        with self._lock:
            for lease, begin, end in acks:
                known[lease] = merged([*known.get(lease, ()), (begin, end)])
                self._open.discard((lease, begin, end))

    def are_told(self) -> bool:
        """Whether `committed` and `late` are final with respect to commits open at the first call; if not, ask
        again. An open commit may exist only on a slice that was lost.
        """
        with self._lock:
            self._awaited = self._open & (self._open if self._awaited is None else self._awaited)
            is_all = not self._awaited
            self._awaited = None if is_all else self._awaited
            return is_all

    def committed(self) -> list[LeaseAck]:
        """Ranges in answered commits, of leases that are not finished. Servers report open ones."""
        with self._lock:
            return [(lease, begin, end) for lease, places in self._committed.items() for begin, end in places]

    def late(self) -> list[LeaseAck]:
        """Ranges in late commits, of leases that are not finished."""
        with self._lock:
            return [(lease, begin, end) for lease, places in self._late.items() for begin, end in places]

    def forget(self, leases: set[int]) -> None:
        """The epoch of these leases is over; those of the epoch before are dropped.

        These are kept: if coordinator and servers die now, they do not know of the epoch's end.
        """
        with self._lock:
            leases, self._over = self._over, set(leases)
            for lease in leases - {use[0] for use in [*self._read, *self._stepped]}:
                self._committed.pop(lease, None)
                self._late.pop(lease, None)

    def leave_loop(self) -> None:
        """This worker has left a loop."""
        self.num_loops -= 1
        self._has_read = self._has_read and self.num_loops > 0

    @property
    def has_position(self) -> bool:
        """Whether a commit made now belongs to leased samples: the current batch, also for a second optimizer, or
        samples held for this step.
        """
        return self._has_read or self.is_any_held

    @property
    def is_any_held(self) -> bool:
        """Whether anything waits for a commit."""
        return bool(self._read or self._stepped)

    def held(self, leases: set[int], *, with_stepped: bool = True) -> list[LeaseAck]:
        """Ranges of these leases that wait for a commit, or will be skipped at the end of the loop. `with_stepped`:
        also those in local steps.
        """
        with self._lock:
            places: dict[int, list[Places]] = {}
            for lease, begin, end in [*self._read, *(self._stepped if with_stepped else ()), *self._void]:
                if lease in leases:
                    places[lease] = merged([*places.get(lease, ()), (begin, end)])
        return [(lease, begin, end) for lease, each in places.items() for begin, end in each]

    def drop_void(self, leases: set[int]) -> list[LeaseAck]:
        """Ranges of these leases in refused pushes."""
        with self._lock:
            dropped = [use for use in self._void if use[0] in leases]
            self._void = [use for use in self._void if use[0] not in leases]
        return dropped

    def drop(self, leases: set[int]) -> list[LeaseAck]:
        """Removes and returns ranges of these leases that were read without a step."""
        with self._lock:
            dropped = [use for use in self._read if use[0] in leases]
            self._read = [use for use in self._read if use[0] not in leases]
        return dropped


class EpochLeases:
    """One worker's loop over an epoch of a loader: yields batches until the epoch is finished."""

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
        """`times`: the working time so far. `seed`: this worker's seed of the loader's order."""
        self.loader, self.epoch = loader, epoch
        self._asks, self._acks, self._data = asks, acks, data
        self._times, self._worker = times, worker
        self._portion = Portion(part_of(data, worker))
        self._asked: PendingAnswer | None = None  # a lease requested ahead
        self._ahead = threading.Lock()  # taken by the script or by a recall
        self._not_before = 0.0  # the last request had no answer, or an empty one
        self._told = times.measured  # samples and seconds last reported
        self._untold: list[LeaveEpoch] = []  # messages about the loop's end that the coordinator must still get
        self._is_common = False  # the whole epoch is leased to all workers in common
        answer = Opened(False) if self._is_over else _opened(asks, OpenEpoch(loader, epoch, data, seed))
        self.seed = seed if answer.seed is None else answer.seed  #: of the loader's order, in all workers
        self._is_finished = not answer.is_left
        times.resume()  # time between two loops, such as an evaluation, is not part of a step
        acks.num_loops += 1
        self.is_shared = answer.is_shared  #: whether all workers read this loader's epochs, as far as known

    @property
    def _is_over(self) -> bool:
        return self._worker.should_stop and not self.loader.startswith(VALIDATES)

    def next(self, *, may_wait: bool = True) -> BatchRange | None:
        """The next batch. None if the epoch or training is over, or if getting one would take a wait."""
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
        """The script begins its loop: earlier time, such as an evaluation, is not part of a step."""
        self._times.resume()

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def num_left(self) -> int:
        """Leased samples that are not in batches yet."""
        return self._portion.num_left

    @property
    def step(self) -> int:
        """Samples of this worker's current batch; 0 before the first."""
        return self._portion.step

    # -- asking -------------------------------------------------------------------------------------------

    def _question(self, *, waits: bool) -> AskLease:
        samples, seconds = self._times.measured
        before, self._told = self._told, (samples, seconds)
        portion = self._portion
        # Without rounds this worker pushes its local steps before it waits, and the epoch lasts until they count: if
        # it died after the end, their samples would be lost. In rounds all workers push together, at the end.
        held = self._acks.held(portion.numbers, with_stepped=self._worker.in_rounds)
        return AskLease(
            self.loader, self.epoch, held, portion.num_left,
            samples - before[0], seconds - before[1], waits, portion.newest, portion.given,
        )  # fmt: skip

    def _ask_ahead(self) -> None:
        """Requests the next lease while one is left, so that training survives the coordinator's absence."""
        now = time.monotonic()
        try:
            self._take_ahead()
            if self._is_finished or self._asked is not None or now < self._not_before:
                return
            if self._is_common and self._portion.num_left:
                return  # there is no more
            if self._portion.is_low:
                self._asked = self._asks.try_ask(self._question(waits=False))
        except SynclineError:
            self._not_before = now + _AGAIN_SECONDS

    def _take_ahead(self) -> None:
        """Takes the lease requested ahead, if it has arrived."""
        with self._ahead:
            asked = self._asked
            if asked is not None and asked.arrives(0):
                self._asked = None
                self._take(asked.wait(0))

    def _wait(self) -> Message:
        """No leases left: waits for one. If others hold the rest, no round waits for this worker meanwhile."""
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
        if not self._acks.is_any_held:  # else more is added to a gradient computed from earlier parameters
            self._worker.catch_up(enters=isinstance(answer, GivenLease) and bool(answer.lease))
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
        """The shard ended within this batch after `num_read` samples. Returns the shortened batch, if any."""
        found = self._portion.end_shard(piece, num_read)
        self._asks.ask(EndShard(self.loader, self.epoch, piece.span.start + piece.begin + num_read))
        return found

    # -- giving back --------------------------------------------------------------------------------------

    def give_back(self) -> GaveBack:
        """Gives back what is not in batches yet; runs in the thread that reads from the coordinator.

        A started shard is kept: the next worker would have to read it from its first sample. A lease requested ahead
        is given back too, because the script may be in a long step.
        """
        with contextlib.suppress(SynclineError):
            self._take_ahead()
        newest = self._portion.newest  # first: a lease that arrives now is not given back
        return GaveBack(self._portion.give_back(keeps_begun=self._data.num_shards > 0), newest)

    def leave(self, unread: list[BatchRange], *, passes_over: bool) -> int:
        """Leaves the loop: unread samples go back, samples without a step are skipped. Returns the number of
        skipped samples. `tell_left` tells the coordinator.
        """
        given, numbers = self._portion.leave(unread), self._portion.numbers
        dropped = self._acks.drop(numbers) if passes_over else []
        passed_over = dropped + self._acks.drop_void(numbers)
        self._is_finished, was_finished = True, self._is_finished
        if given or passed_over or not was_finished:
            newest = self._portion.newest
            self._untold.append(LeaveEpoch(self.loader, self.epoch, list(given.items()), passed_over, newest))
        if was_finished:  # otherwise a server with their acks may still be lost
            self._acks.forget(numbers)
        return sum(end - begin for _, begin, end in dropped)

    def tell_left(self) -> None:
        """Tells the coordinator that the loop is left, again if no answer came: other workers wait for the unread
        samples.
        """
        while self._untold:
            self._asks.ask(self._untold[0])
            del self._untold[0]


def _opened(asks: AsksCoordinator, question: OpenEpoch) -> Opened:
    """Opens the epoch, once the job has a seed for the loader: the chief's, or after a timeout this worker's."""
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
