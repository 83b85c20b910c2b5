"""A worker's leases: what it reads next in an epoch, what of it is read, held and committed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from syncline.client.times import StepClock
from syncline.core.handing import AskLease, EndShard, GivenLease, LeaveEpoch, Opened, OpenEpoch, Use
from syncline.core.leasing import Loader
from syncline.core.message import Message
from syncline.core.places import Places, merged, without
from syncline.core.spans import Span
from syncline.errors import SynclineError

#: An answer that did not come: the coordinator is away, and asked again so soon.
_AGAIN_SECONDS, _ANSWER_SECONDS = 0.25, 5.0


class Asks(Protocol):
    """The way to the coordinator."""

    def ask(self, message: Message) -> Message:
        """Waits for the answer, as long as it takes."""

    def try_ask(self, message: Message) -> Asked:
        """One attempt, not waited for."""


class Pauses(Protocol):
    """The worker, as rounds know it."""

    @property
    def stretch(self) -> int:
        """Which its next commit is in."""

    def pause(self, upto: int = 0) -> None:
        """No round of this stretch waits for it any more, nor of those up to another; before a wait for others."""

    def catch_up(self) -> None:
        """Others went on without it: after that wait."""


class Asked(Protocol):
    """A question under way."""

    def arrives(self, seconds: float) -> bool:
        """Whether the answer is here, or comes so soon."""

    def wait(self, timeout_seconds: float) -> Message:
        """The answer, or what keeps it from coming."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one batch is to hold: places of a lease, which stand for positions of its span."""

    lease: int
    span: Span
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass
class _Own:
    """A lease of this worker: what of it is cut into batches, and where it ends."""

    number: int
    span: Span
    begin: int  # the next place to be read
    end: int
    step: int  # samples of a batch


class Uses:
    """What this worker has read and not committed yet; every commit takes it along. For all loaders of a job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[Use] = []
        self._committed: dict[int, list[Places]] = {}
        self.samples = 0  # read so far

    def read(self, piece: Piece) -> None:
        """The script has got this batch."""
        with self._lock:
            self._read.append((piece.lease, piece.begin, piece.end))
            self.samples += len(piece)

    def take(self) -> list[Use]:
        """All of it, for the commit that is made now."""
        with self._lock:
            taken, self._read = self._read, []
            for lease, begin, end in taken:
                self._committed[lease] = merged([*self._committed.get(lease, ()), (begin, end)])
        return taken

    def was_late(self, uses: Iterable[Use]) -> None:
        """A commit that took these along counts for nothing: they are not used, and others' from now on."""
        with self._lock:
            for lease, begin, end in uses:
                self._committed[lease] = without(self._committed.get(lease, ()), (begin, end))

    def committed(self) -> list[Use]:
        """What commits have taken along, of leases that are not through."""
        with self._lock:
            return [(lease, begin, end) for lease, places in self._committed.items() for begin, end in places]

    def forget(self, leases: set[int]) -> None:
        """The epoch of these leases is over."""
        with self._lock:
            for lease in leases - {use[0] for use in self._read}:
                self._committed.pop(lease, None)

    @property
    def is_any_held(self) -> bool:
        """Whether anything waits for a commit."""
        return bool(self._read)

    def held(self, leases: set[int]) -> list[Use]:
        """What of these leases waits for a commit, from the first place to the last."""
        with self._lock:
            places: dict[int, tuple[int, int]] = {}
            for lease, begin, end in self._read:
                if lease in leases:
                    first, last = places.get(lease, (begin, end))
                    places[lease] = (min(first, begin), max(last, end))
        return [(lease, begin, end) for lease, (begin, end) in places.items()]

    def drop(self, leases: set[int]) -> list[Use]:
        """What of these leases was read for no commit: it is in none from now on."""
        with self._lock:
            dropped = [(lease, begin, end) for lease, begin, end in self._read if lease in leases]
            self._read = [use for use in self._read if use[0] not in leases]
        return dropped


class Reading:
    """This worker's loop over one epoch of a loader: batches to read, until the epoch is finished."""

    def __init__(
        self,
        asks: Asks,
        uses: Uses,
        loader: str,
        epoch: int,
        data: Loader,
        *,
        times: StepClock,
        worker: Pauses,
    ) -> None:
        """`times`: how long this worker has worked so far."""
        self.loader, self.epoch = loader, epoch
        self._asks, self._uses, self._data = asks, uses, data
        self._times, self._worker = times, worker
        self._lock = threading.Lock()
        self._own: collections.deque[_Own] = collections.deque()
        self._given: dict[int, int] = {}  # leases that were given back from this place on, until it is known there
        self._said: list[tuple[int, int]] = []  # what of that the last question has told
        self._numbers: set[int] = set()  # of all leases of this loop
        self._size = 0  # of the last lease
        self._newest = 0  # of them
        self._asked: Asked | None = None
        self._not_before = 0.0  # there was no answer, or nothing in it
        self._told = times.measured  # samples and seconds of work, as last said
        answer = asks.ask(OpenEpoch(loader, epoch, data))
        assert isinstance(answer, Opened)
        self.num_samples, self.num_done, self._is_finished = answer.num_samples, answer.num_done, not answer.is_left
        times.resume()  # what was between two loops, an evaluation for instance, is no part of a step
        self.is_shared = answer.is_shared  #: whether all workers come to this loader's epochs, by what is known

    def next(self, *, may_wait: bool = True) -> Piece | None:
        """The next batch to read; None when the epoch is finished, or when there is none without a wait."""
        while True:
            self._ask_ahead()
            piece = self._cut()
            if piece is not None or self._is_finished or not may_wait:
                return piece
            self._times.lap("compute")
            answer = self._wait()
            self._times.lap("wait")
            self._take(answer)

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def _cut(self) -> Piece | None:
        with self._lock:
            while self._own and self._own[0].begin >= self._own[0].end:
                self._own.popleft()
            if not self._own:
                return None
            own = self._own[0]
            end = min(own.begin + own.step, own.end)
            piece = Piece(own.number, own.span, own.begin, end)
            own.begin = end
            return piece

    @property
    def num_left(self) -> int:
        """Samples that are leased and not cut into batches yet."""
        with self._lock:
            return sum(own.end - own.begin for own in self._own)

    # -- asking -------------------------------------------------------------------------------------------

    def _question(self, *, waits: bool) -> AskLease:
        samples, seconds = self._times.measured
        before, self._told = self._told, (samples, seconds)
        with self._lock:
            self._said = list(self._given.items())
        return AskLease(
            self.loader, self.epoch, self._uses.held(self._numbers), self.num_left,
            samples - before[0], seconds - before[1], waits, self._newest, self._said, self._worker.stretch,
        )  # fmt: skip

    def _ask_ahead(self) -> None:
        """While a whole lease is still to be read, so that a coordinator that is away stops nobody."""
        now = time.monotonic()
        try:
            if self._asked is not None and self._asked.arrives(0):
                asked, self._asked = self._asked, None
                self._take(asked.wait(0))
            if self._is_finished or self._asked is not None or now < self._not_before:
                return
            if self.num_left <= self._size:
                self._asked = self._asks.try_ask(self._question(waits=False))
        except SynclineError:
            self._not_before = now + _AGAIN_SECONDS

    def _wait(self) -> Message:
        """Nothing is left here. When others have all the rest, no round is to wait for this worker meanwhile."""
        asked, self._asked = self._asked, None
        if asked is not None:
            with contextlib.suppress(SynclineError):
                answer = asked.wait(_ANSWER_SECONDS)
                if isinstance(answer, GivenLease) and (answer.lease or answer.is_finished):
                    return answer
        answer = self._asks.ask(self._question(waits=False))
        if isinstance(answer, GivenLease) and (answer.lease or answer.is_finished):
            return answer
        upto = 0
        while True:
            self._worker.pause(upto)
            answer = self._asks.ask(self._question(waits=True))
            if not (isinstance(answer, GivenLease) and answer.rest_from):
                break
            upto = answer.rest_from
        if not self._uses.is_any_held:  # else more is added to what was computed already, with what was known then
            self._worker.catch_up()
        return answer

    def _take(self, answer: Message) -> None:
        self._asked = None
        assert isinstance(answer, GivenLease)
        with self._lock:
            for lease, _ in self._said:
                self._given.pop(lease, None)
            self._said = []
        if answer.is_finished:
            self._is_finished, self.is_shared = True, answer.is_shared
        elif answer.lease:
            with self._lock:
                self._numbers.add(answer.lease)
                self._newest = answer.lease
                self._size = len(answer.span)
                step = answer.step or self._data.batch
                self._own.append(_Own(answer.lease, answer.span, 0, self._size, step))
        else:
            self._not_before = time.monotonic() + _AGAIN_SECONDS

    def end_shard(self, piece: Piece, num_read: int) -> Piece | None:
        """Of this batch only so much was there: the shard ends with it. What of the batch there is, if anything."""
        end = piece.begin + num_read
        with self._lock:
            for own in self._own:
                if own.number == piece.lease:
                    own.begin = own.end = end
        self._asks.ask(EndShard(self.loader, self.epoch, piece.span.start + end))
        return dataclasses.replace(piece, end=end) if num_read else None

    # -- giving back --------------------------------------------------------------------------------------

    def give_back(self) -> list[tuple[int, int]]:
        """What is not cut into batches yet is others'; in the thread that hears the coordinator."""
        return self._give_back(keeps_begun=self._data.num_shards > 0)

    def _give_back(self, *, keeps_begun: bool) -> list[tuple[int, int]]:
        """`keeps_begun`: not of what is begun; whoever goes on with a shard must read it from its first sample."""
        with self._lock:
            given = [own for own in self._own if own.begin < own.end and not (keeps_begun and own.begin)]
            for own in given:
                own.end = self._given[own.number] = own.begin
            return list(self._given.items())

    def leave(self, unread: list[Piece], *, passes_over: bool) -> None:
        """The loop is left: what was not given to the script goes back, what it made no step with is passed over."""
        given = dict(self._give_back(keeps_begun=False))
        for piece in unread:
            given[piece.lease] = min(piece.begin, given.get(piece.lease, piece.begin))
        dropped = self._uses.drop(self._numbers) if passes_over else []
        if given or dropped or not self._is_finished:
            self._asks.ask(LeaveEpoch(self.loader, self.epoch, list(given.items()), dropped, self._newest))
        self._is_finished = True
        self._uses.forget(self._numbers)
