"""Samples handed out by a coordinator: who asks is answered, given back, done, and back again from the dead."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from syncline import faults
from syncline.core.leasing.leases import SHARD_POSITIONS, Leasing
from syncline.core.leasing.ledger import Epoch
from syncline.core.leasing.queue import LeaseQueue
from syncline.core.slice_state import Identity
from syncline.core.units import counted
from syncline.core.wire.control import Heartbeat
from syncline.core.wire.leases import (
    AskLease,
    AskLeaseAcks,
    Confirm,
    EndShard,
    GaveBack,
    LeaveEpoch,
    Opened,
    OpenEpoch,
    Recall,
    Uses,
)
from syncline.core.wire.message import Done, Message
from syncline.errors import ConfigError, ConnectionLost, StoreError, SynclineError
from syncline.net.rpc import Call, Request
from syncline.stats import Wait

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator

#: Between two saves of what was used; until one is made, servers keep it.
KEEP_SECONDS = 1.0
#: What was dealt to a worker that does not come to the epoch is given to whoever has waited for so long.
RECLAIM_SECONDS = 5.0


class Handing:
    """All loaders of a job. Everything here is under the coordinator's lock; what is decided is the core's."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._desk: LeaseQueue[Request] = LeaseQueue(coordinator.membership)
        self._later: list[tuple[Request, Message]] = []  # answers that are given when the state is kept
        self._asked_workers: set[Identity] = set()  # what they have used; the answer is not here yet
        self._kept_at = 0.0
        self._measured: dict[str, tuple[int, float]] = {}  # samples and seconds of work, as last said
        self.num_samples = 0  # that workers were handed, all together

    @property
    def leasing(self) -> Leasing:
        return self._desk.leasing

    # -- what workers say ---------------------------------------------------------------------------------

    def _is_heard(self, request: Request) -> bool:
        """Under the lock. What a worker has said over a connection that was replaced it says again over the next
        one, or does not mean any more."""
        return self._c.endpoints.get(request.peer.name) is request.endpoint

    def open(self, request: Request, message: OpenEpoch) -> None:
        with self._c.lock:
            if not self._is_heard(request):
                return
            if self._desk.is_over(message.loader):
                request.reply(Opened(False))
                return
            seed = None if message.seed is None else self._desk.seed(request.peer.name, message)
            if seed is None and message.seed is not None:
                request.reply(Opened(False, is_early=True))
                return
            owner, workers = _owner(request), max(1, len(self._desk.taking_part()))
            try:
                is_left = self.leasing.open(owner, message.loader, message.epoch, message.data, workers)
            except ConfigError as error:
                self._refuse_loader(request, error)
                return
            is_shared = self.leasing.is_shared(message.loader)
            # A coordinator that comes next must not take one that it has never heard of for a finished one.
            self._later.append((request, Opened(is_left, is_shared, seed)))
        self.answer()

    def _refuse_loader(self, request: Request, error: ConfigError) -> None:
        """Its data are not the others': a new life of it would find the same, and without it the job is another.

        Of one that came later only it is the mistake. Inside one process the script has the error, and may mend it.
        """
        request.refuse(error)  # before it hears that the job is over
        member = self._c.membership.state.members.get(request.peer.name)
        if self._c.watching is not None and member is not None and member.since <= 1:
            self._c.membership.fail(request.peer.name, str(error))
            self._c.ending.conclude()

    def ask(self, request: Request, message: AskLease) -> None:
        """Answered now; or, from one that has nothing to do, when there is something."""
        with self._c.lock:
            begins_common = not message.newest and self.leasing.is_common(message.loader, message.epoch)
        if begins_common:  # where it begins follows from what was used by now
            self._ask_uses(lambda: self._ask(request, message))
        else:
            self._ask(request, message)

    def _ask(self, request: Request, message: AskLease) -> None:
        with self._c.lock:
            if not self._is_heard(request):
                return
            self._desk.ask(_owner(request), message, request, time.monotonic())
        self.answer()
        if self._c.watching is None:
            self.look(time.monotonic())  # inside one process nobody else does
        elif message.waits:
            self._ask_uses()

    def _ask_uses(self, then: Callable[[], None] | None = None) -> None:
        """Somebody waits for the end of an epoch: what was used meanwhile is asked for, not waited for. `then` is
        called behind it, also where there is no answer."""
        with self._c.lock:
            replica_set, is_wanted = (
                self._c.membership.state.replica_sets.get(0),
                then is not None or self._desk.asking,
            )
            endpoint = self._c.endpoints.get(replica_set.primary) if replica_set is not None and is_wanted else None
        try:
            if endpoint is None:
                raise ConnectionLost("slice 0 has no server now")
            call = endpoint.call(AskLeaseAcks())
        except ConnectionLost:
            if then is not None:
                then()
            return
        call.when_done(functools.partial(self._were_used, call, then))

    def _were_used(self, call: Call, then: Callable[[], None] | None) -> None:
        with contextlib.suppress(SynclineError):
            answer = call.wait(0)
            if isinstance(answer, Uses) and (answer.uses or answer.late):
                with self._c.lock:
                    self._desk.use(answer.uses, answer.late)
                self.answer()
        if then is not None:
            then()

    def leave(self, request: Request, message: LeaveEpoch) -> None:
        with self._c.lock:
            if not self._is_heard(request):
                return
            self._desk.leave(_owner(request), message)
            self._later.append((request, Done()))
        self.answer()

    def end_shard(self, request: Request, message: EndShard) -> None:
        with self._c.lock:
            epoch = self.leasing.epoch(message.loader, message.epoch)
            if epoch is not None:
                epoch.shorten(message.position, (message.position // SHARD_POSITIONS + 1) * SHARD_POSITIONS)
            self._later.append((request, Done()))
        self.answer()

    def _gave_back(self, owner: Identity, recall: Recall, call: Call) -> None:
        """In the thread that brings the answer. When that got lost it is asked again; or its eviction brings it."""
        answer: Message | None = None
        with contextlib.suppress(SynclineError):
            answer = call.wait(0)
        with self._c.lock:
            if isinstance(answer, GaveBack):
                self.leasing.gave_back(owner, recall.loader, recall.epoch, answer.leases, answer.newest)
            else:
                self.leasing.not_recalled(owner, recall.loader, recall.epoch)
        if answer is not None:
            self.answer()

    # -- what servers say ---------------------------------------------------------------------------------

    def beat(self, name: str, beat: Heartbeat) -> None:
        """Under the lock: the server of slice 0 says what was used, a worker how fast it is."""
        replica_set, member = self._c.membership.state.replica_sets.get(0), self._c.membership.state.members.get(name)
        if (beat.uses or beat.late) and replica_set is not None and replica_set.primary == name:
            self._desk.use(beat.uses, beat.late)
        if beat.is_quarantined and member is not None and self._desk.is_open:
            owner = (name, member.incarnation)
            for loader, epoch in self.leasing.quarantine(owner):
                self._recall(owner, Recall(loader, epoch))
        if beat.samples:
            samples, seconds = self._measured.get(name, (0, 0.0))
            self._measured[name] = (beat.samples, beat.work_seconds)
            self.num_samples += max(0, beat.samples - samples)
            self.leasing.measured(name, beat.samples - samples, beat.work_seconds - seconds)

    def look(self, now: float) -> None:
        """Now and then: keeps what was used and confirms it, cuts parts again, sees to those who wait in vain."""
        self._ask_workers()
        if not self._desk.is_open:
            return
        with self._c.lock:
            for message, count in self._desk.reclaim(now, RECLAIM_SECONDS):
                where = f"epoch {message.epoch + 1} of {message.loader!r}"
                self._c.event(
                    f"{count} samples of {where} go to others: the workers they were meant for do not read it"
                )
            for owner, recall in self._desk.recut():
                self._recall(owner, recall)
            somebody_waits, has_news = self._desk.somebody_waits, self._desk.has_news
        self.answer()
        if somebody_waits:
            self._ask_uses()
        if has_news and now - self._kept_at > KEEP_SECONDS:
            self._confirm(now)

    def _confirm(self, now: float) -> None:
        with self._c.lock:
            self._kept_at = now
            used, late, finished = self._desk.take_news()
            self._tell_finished(finished)
            try:
                self._c.keep()
            except StoreError as error:
                self._desk.put_back_news(used, late)
                self._c.say_trouble(error)
                return
            replica_set = self._c.membership.state.replica_sets.get(0)
            names = replica_set.names if replica_set is not None else ()
            endpoints = [self._c.endpoints[name] for name in names if name in self._c.endpoints]
        for endpoint in endpoints:
            endpoint.mention(Confirm(sorted(set(used)), sorted(set(late))))

    def _tell_finished(self, finished: Iterable[tuple[str, int, Epoch]]) -> None:
        for name, number, epoch in finished:
            self._c.stopping.num_epochs = max(self._c.stopping.num_epochs, number + 1)
            self._tell(name, number, epoch)

    def _tell(self, name: str, number: int, epoch: Epoch) -> None:
        known = self.leasing.state.loaders.get(name)
        is_steps = known is not None and known.is_steps
        which, unit = ("job.steps", "steps") if is_steps else (f"epoch {number + 1} of {name!r}", "samples")
        for suspect_batch in epoch.aside:
            where = f"positions {suspect_batch.span.start} to {suspect_batch.span.stop - 1}"
            workers = ", ".join(suspect_batch.workers)
            told = "" if is_steps else "; syncline.data.samples_at says which they are"
            self._c.event(f"{which}: the {unit} at {where} were set aside: {workers} died at them{told}")
        if epoch.num_passed_over:
            number_told = counted(epoch.num_passed_over, "step") if is_steps else f"{epoch.num_passed_over} samples"
            what = "pushed nothing" if is_steps else "were read and used in no step"
            self._c.event(f"{which}: {number_told} {what}")

    def end(self) -> None:
        """Under the lock: the job is over. What was set aside and passed over in its last epochs, finished or not."""
        if self._desk.is_open:
            self._tell_finished(self.leasing.forget_finished())
            for name, epochs in self.leasing.state.epochs.items():
                for number, epoch in epochs.items():
                    self._tell(name, number, epoch)

    # -- answering ----------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Whoever asks is answered as far as there is something to say; leases are kept before they are told."""
        with self._c.lock:
            answers, recalls = self._desk.answers()
            later, self._later = self._later, []
            if (later or any(given.lease for _, given in answers)) and not self._keep_leases():
                self._desk.not_kept(answers)
                answers, later, self._later = [], [], later
        for asked, given in answers:
            asked.request.reply(given)
        for request, answer in later:
            request.reply(answer)
        with self._c.lock:
            for owner, recall in recalls:  # after the answers: what is on its way is not given back
                self._recall(owner, recall)

    def _keep_leases(self) -> bool:
        try:
            self._c.keep()
            faults.reach("lease.kept")
        except StoreError as error:
            self._c.say_trouble(error)
            return False
        return True

    def _recall(self, owner: Identity, recall: Recall) -> None:
        """Under the lock."""
        endpoint = self._c.endpoints.get(owner[0])
        try:
            if endpoint is None:
                raise ConnectionLost(f"{owner[0]} is not there")
            call = endpoint.call(recall)
        except ConnectionLost:
            self.leasing.not_recalled(owner, recall.loader, recall.epoch)
            return  # it comes back and is asked again, or is evicted
        call.when_done(functools.partial(self._gave_back, owner, recall, call))

    # -- the dead -----------------------------------------------------------------------------------------

    def uses_are_lost(self) -> None:
        """Under the lock, to be kept: slice 0 came back from a worker's copy, and what was used and not told yet went
        with its server.

        The workers that live say what they have used; their updates may be revoked, and the samples count as read. Of
        those who died nobody knows: what they had not told is read again.
        """
        if self._c.membership.state.leases.epochs:
            spans = self._desk.uses_are_lost()
            if not spans:
                return  # nothing was being read
            self._c.event(
                f"what was used just before was lost with slice 0: {spans}. Of workers that live it counts as read, "
                "of workers that died it is read again"
            )

    @property
    def is_in_doubt(self) -> bool:
        """Under the lock: whether workers that live are still to say so."""
        return bool(self._desk.unheard())

    def _ask_workers(self) -> None:
        """Those who have not said yet what they have used; again, when the answer got lost."""
        with self._c.lock:
            fresh = [owner for owner in self._desk.unheard() if owner not in self._asked_workers]
            endpoints = {owner: self._c.endpoints[owner[0]] for owner in fresh if owner[0] in self._c.endpoints}
            self._asked_workers.update(endpoints)
        for owner, endpoint in endpoints.items():
            try:
                call = endpoint.call(AskLeaseAcks())
            except ConnectionLost:
                self._asked_workers.discard(owner)
            else:
                call.when_done(functools.partial(self._has_said, owner, call))

    def _has_said(self, owner: Identity, call: Call) -> None:
        answer: Message | None = None
        with contextlib.suppress(SynclineError):
            answer = call.wait(0)
        with self._c.lock:
            self._asked_workers.discard(owner)
            if isinstance(answer, Uses):
                self._desk.heard(owner, answer.uses, answer.late, is_all=not answer.open)
        self.answer()

    def gone(self) -> dict[Identity, bool]:
        """Under the lock: who has leases and is a member no more, and fenced everywhere; whether it died."""
        return self._desk.gone()

    def forget(self, name: str) -> None:
        """Under the lock: what comes under this name next has another count."""
        self._measured.pop(name, None)
        self._desk.asking.pop(name, None)

    def out(self, gone: dict[Identity, bool], answers: Iterable[Message]) -> bool:
        """What of the dead counts is known, by the word of slice 0's server: the rest is to do again.

        Whether that is so of all of them; who has a commit that waits for its round is asked for again.
        """
        waiting: set[Identity] = set()
        with self._c.lock:
            for answer in answers:
                if isinstance(answer, Uses):
                    self._desk.use(answer.uses, answer.late)
                    waiting.update(answer.open)
            self._desk.out(gone, waiting)
            self._c.keep()
        self.answer()
        return waiting.isdisjoint(gone)

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: who waits for whom to finish an epoch."""
        found = []
        for name, (_, message, since, _) in self._desk.asking.items():
            epoch = self.leasing.epoch(message.loader, message.epoch)
            owners = (
                sorted({lease.worker for lease in epoch.leases.values()} - {name, ""}) if epoch is not None else []
            )
            if owners and message.waits:
                what = f"the end of epoch {message.epoch + 1}"
                found.append(Wait(name, 0, owners, now - since, what))
        return found


def _owner(request: Request) -> Identity:
    return (request.peer.name, request.peer.incarnation)
