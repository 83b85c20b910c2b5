"""The lease service: hands out samples to workers, counts what they have used, and reassigns what the dead left."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable

from syncline import faults
from syncline.coordinator.job import JobContext, identity_of
from syncline.core.leasing.leases import SHARD_POSITIONS, Leasing
from syncline.core.leasing.ledger import Epoch
from syncline.core.leasing.queue import LeaseQueue
from syncline.core.members import Member
from syncline.core.slice_state import Identity
from syncline.core.units import counted
from syncline.core.wire.control import Heartbeat
from syncline.core.wire.leases import (
    AskLease,
    AskLeaseAcks,
    Confirm,
    EndShard,
    GaveBack,
    GivenLeaseAcks,
    LeaveEpoch,
    Opened,
    OpenEpoch,
    Recall,
)
from syncline.core.wire.message import Done, Message
from syncline.errors import ConfigError, ConnectionLost, StoreError, SynclineError
from syncline.net.rpc import Call, Request
from syncline.stats import Wait

#: How often used leases are kept and confirmed. Until then the servers remember them.
KEEP_SECONDS = 1.0
#: A worker that has waited this long gets what was dealt to workers that do not read the epoch.
RECLAIM_SECONDS = 5.0


class LeaseService:
    """The leases of all loaders of a job, under the job's lock.

    `core/leasing` decides; this class keeps a decision and sends it.
    """

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self.queue: LeaseQueue[Request] = LeaseQueue(job.membership)
        self._later: list[tuple[Request, Message]] = []  # sent once the state is kept
        self._asked_workers: set[Identity] = set()  # they were asked what they have used, and have not answered yet
        self._kept_at = 0.0
        self._measured: dict[str, tuple[int, float]] = {}  # samples and seconds of work, by the last heartbeat
        self.num_epochs = 0  # finished, of the loader that is furthest
        self.num_samples = 0  # handed out, to all workers

    @property
    def leasing(self) -> Leasing:
        return self.queue.leasing

    def asking(self) -> list[str]:
        """Under the lock: workers that wait for samples."""
        return sorted(self.queue.asking)

    @property
    def num_unsaved_uses(self) -> int:
        """Under the lock: spans of samples that are used and not in the journal yet."""
        return self.queue.num_unsaved_uses

    # -- requests of workers ------------------------------------------------------------------------------

    def _is_current(self, request: Request) -> bool:
        """Under the lock: whether the request came over the worker's current connection.

        A worker repeats over a new connection what it still wants.
        """
        return self._job.endpoints.get(request.peer.name) is request.endpoint

    def open_epoch(self, request: Request, message: OpenEpoch) -> None:
        """A worker starts to read an epoch. Replies whether anything of it is left."""
        with self._job.lock:
            if not self._is_current(request):
                return
            if self.queue.is_over(message.loader):
                request.reply(Opened(False))
                return
            seed = None if message.seed is None else self.queue.seed(request.peer.name, message)
            if seed is None and message.seed is not None:
                request.reply(Opened(False, is_early=True))
                return
            owner, workers = identity_of(request), max(1, len(self.queue.participants()))
            try:
                is_left = self.leasing.open(owner, message.loader, message.epoch, message.data, workers)
            except ConfigError as error:
                self._refuse_loader(request, error)
                return
            is_shared = self.leasing.is_shared(message.loader)
            # Kept first: the next coordinator would take an epoch that it does not know for a finished one.
            self._later.append((request, Opened(is_left, is_shared, seed)))
        self.answer_requests()

    def _refuse_loader(self, request: Request, error: ConfigError) -> None:
        """Refuses a loader whose data differ from those of the other workers.

        The job fails, since a restarted worker would have the same data. A worker that came later is refused alone.
        Inside one process the script gets the error and may correct it.
        """
        request.refuse(error)  # before it is told that the job is over
        member = self._job.membership.state.members.get(request.peer.name)
        if self._job.watches and member is not None and member.since <= 1:
            self._job.membership.fail(request.peer.name, str(error))
            self._job.conclude()

    def ask_lease(self, request: Request, message: AskLease) -> None:
        """Replies with a lease; a worker with nothing left to do waits until there is one."""
        with self._job.lock:
            begins_common = not message.newest and self.leasing.is_common(message.loader, message.epoch)
        if begins_common:  # its start depends on what was used so far
            self._fetch_acks(lambda: self._queue_request(request, message))
        else:
            self._queue_request(request, message)

    def _queue_request(self, request: Request, message: AskLease) -> None:
        with self._job.lock:
            if not self._is_current(request):
                return
            self.queue.ask(identity_of(request), message, request, time.monotonic())
        self.answer_requests()
        if not self._job.watches:
            self.tick(time.monotonic())  # inside one process there is no watch thread
        elif message.waits:
            self._fetch_acks()

    def _fetch_acks(self, then: Callable[[], None] | None = None) -> None:
        """Asks the server of slice 0 which leases were used, without waiting.

        `then` is called after the answer, and also when there is none.
        """
        with self._job.lock:
            replica_set, is_wanted = (
                self._job.membership.state.replica_sets.get(0),
                then is not None or self.queue.asking,
            )
            endpoint = self._job.endpoints.get(replica_set.primary) if replica_set is not None and is_wanted else None
        try:
            if endpoint is None:
                raise ConnectionLost("slice 0 has no server now")
            call = endpoint.call(AskLeaseAcks())
        except ConnectionLost:
            if then is not None:
                then()
            return
        call.when_done(functools.partial(self._add_acks, call, then))

    def _add_acks(self, call: Call, then: Callable[[], None] | None) -> None:
        """In the thread of the answer."""
        with contextlib.suppress(SynclineError):
            answer = call.wait(0)
            if isinstance(answer, GivenLeaseAcks) and (answer.acks or answer.late):
                with self._job.lock:
                    self.queue.use(answer.acks, answer.late)
                self.answer_requests()
        if then is not None:
            then()

    def leave_epoch(self, request: Request, message: LeaveEpoch) -> None:
        """A worker reads no more of this epoch."""
        with self._job.lock:
            if not self._is_current(request):
                return
            self.queue.leave(identity_of(request), message)
            self._later.append((request, Done()))
        self.answer_requests()

    def end_shard(self, request: Request, message: EndShard) -> None:
        """A worker has found the end of a shard whose length was not known."""
        with self._job.lock:
            epoch = self.leasing.epoch(message.loader, message.epoch)
            if epoch is not None:
                epoch.shorten(message.position, (message.position // SHARD_POSITIONS + 1) * SHARD_POSITIONS)
            self._later.append((request, Done()))
        self.answer_requests()

    def _was_recalled(self, owner: Identity, recall: Recall, call: Call) -> None:
        """In the thread of the answer. A lost answer is asked for again, unless the worker is evicted."""
        answer: Message | None = None
        with contextlib.suppress(SynclineError):
            answer = call.wait(0)
        with self._job.lock:
            if isinstance(answer, GaveBack):
                self.leasing.gave_back(owner, recall.loader, recall.epoch, answer.leases, answer.newest)
            else:
                self.leasing.not_recalled(owner, recall.loader, recall.epoch)
        if answer is not None:
            self.answer_requests()

    # -- counting what was used ---------------------------------------------------------------------------

    def note_heartbeat(self, name: str, heartbeat: Heartbeat) -> None:
        """Under the lock: the server of slice 0 tells which leases were used, a worker how fast it is."""
        replica_set, member = (
            self._job.membership.state.replica_sets.get(0),
            self._job.membership.state.members.get(name),
        )
        if (heartbeat.acks or heartbeat.late) and replica_set is not None and replica_set.primary == name:
            self.queue.use(heartbeat.acks, heartbeat.late)
        if heartbeat.is_quarantined and member is not None and self.queue.is_open:
            owner = (name, member.incarnation)
            for loader, epoch in self.leasing.quarantine(owner):
                self._recall(owner, Recall(loader, epoch))
        if heartbeat.samples:
            samples, seconds = self._measured.get(name, (0, 0.0))
            self._measured[name] = (heartbeat.samples, heartbeat.work_seconds)
            self.num_samples += max(0, heartbeat.samples - samples)
            self.leasing.measured(name, heartbeat.samples - samples, heartbeat.work_seconds - seconds)

    def tick(self, now: float) -> None:
        """Runs periodically: keeps and confirms what was used, balances leases, and reassigns what is not read."""
        self._ask_workers()
        if not self.queue.is_open:
            return
        with self._job.lock:
            for message, count in self.queue.reclaim(now, RECLAIM_SECONDS):
                where = f"epoch {message.epoch + 1} of {message.loader!r}"
                self._job.event(
                    f"{count} samples of {where} go to others: the workers they were meant for do not read it"
                )
            for owner, recall in self.queue.recut():
                self._recall(owner, recall)
            somebody_waits, has_news = self.queue.somebody_waits, self.queue.has_news
        self.answer_requests()
        if somebody_waits:
            self._fetch_acks()
        if has_news and now - self._kept_at > KEEP_SECONDS:
            self._confirm(now)

    def _confirm(self, now: float) -> None:
        """Keeps what was used, then tells the servers of slice 0 that they may forget it."""
        with self._job.lock:
            self._kept_at = now
            used, late, finished = self.queue.take_news()
            self._report_finished(finished)
            try:
                self._job.keep()
            except StoreError as error:
                self.queue.put_back_news(used, late)
                self._job.report_disk_error(error)
                return
            replica_set = self._job.membership.state.replica_sets.get(0)
            names = replica_set.names if replica_set is not None else ()
            endpoints = [self._job.endpoints[name] for name in names if name in self._job.endpoints]
        for endpoint in endpoints:
            endpoint.mention(Confirm(sorted(set(used)), sorted(set(late))))

    def _report_finished(self, finished: Iterable[tuple[str, int, Epoch]]) -> None:
        for name, number, epoch in finished:
            self.num_epochs = max(self.num_epochs, number + 1)
            self._report_skipped(name, number, epoch)

    def _report_skipped(self, name: str, number: int, epoch: Epoch) -> None:
        known = self.leasing.state.loaders.get(name)
        is_steps = known is not None and known.is_steps
        which, unit = ("job.steps", "steps") if is_steps else (f"epoch {number + 1} of {name!r}", "samples")
        for suspect_batch in epoch.quarantined:
            where = f"positions {suspect_batch.span.start} to {suspect_batch.span.stop - 1}"
            workers = ", ".join(suspect_batch.workers)
            told = "" if is_steps else "; syncline.data.samples_at says which they are"
            self._job.event(f"{which}: the {unit} at {where} were quarantined: {workers} died at them{told}")
        if epoch.num_passed_over:
            number_told = counted(epoch.num_passed_over, "step") if is_steps else f"{epoch.num_passed_over} samples"
            what = "pushed nothing" if is_steps else "were read and used in no step"
            self._job.event(f"{which}: {number_told} {what}")

    def report_at_end(self) -> None:
        """Under the lock, at the end of the job: reports skipped samples of the last epochs, finished or not."""
        if self.queue.is_open:
            self._report_finished(self.leasing.forget_finished())
            for name, epochs in self.leasing.state.epochs.items():
                for number, epoch in epochs.items():
                    self._report_skipped(name, number, epoch)

    # -- answering ----------------------------------------------------------------------------------------

    def answer_requests(self) -> None:
        """Replies to all requests that can be answered now. Leases are kept before they are told."""
        with self._job.lock:
            answers, recalls = self.queue.answers()
            later, self._later = self._later, []
            if (later or any(given.lease for _, given in answers)) and not self._keep_leases():
                self.queue.not_kept(answers)
                answers, later, self._later = [], [], later
        for asked, given in answers:
            asked.request.reply(given)
        for request, answer in later:
            request.reply(answer)
        with self._job.lock:
            for owner, recall in recalls:  # after the answers: a worker cannot return a lease that it has not got yet
                self._recall(owner, recall)

    def _keep_leases(self) -> bool:
        try:
            self._job.keep()
            faults.reach("lease.kept")
        except StoreError as error:
            self._job.report_disk_error(error)
            return False
        return True

    def _recall(self, owner: Identity, recall: Recall) -> None:
        """Under the lock."""
        endpoint = self._job.endpoints.get(owner[0])
        try:
            if endpoint is None:
                raise ConnectionLost(f"{owner[0]} is not there")
            call = endpoint.call(recall)
        except ConnectionLost:
            self.leasing.not_recalled(owner, recall.loader, recall.epoch)
            return  # it reconnects and is asked again, or is evicted
        call.when_done(functools.partial(self._was_recalled, owner, recall, call))

    # -- workers that are gone ----------------------------------------------------------------------------

    def acks_are_lost(self) -> None:
        """Under the lock; the caller keeps the state. Slice 0 came back from a worker's copy, and the acks that only
        its server had are lost.

        The workers that are alive say what they have used: it counts as read, even if their updates were revoked.
        What dead workers had used and not told is read again.
        """
        if self._job.membership.state.leases.epochs:
            spans = self.queue.acks_are_lost()
            if not spans:
                return  # nothing was being read
            self._job.event(
                f"the record of these samples was lost with slice 0: {spans}. Samples that a live worker has used "
                "count as read; those of a dead worker are read again"
            )

    @property
    def awaits_acks(self) -> bool:
        """Under the lock: after lost acks, some workers have not yet said what they have used."""
        return bool(self.queue.unheard())

    def _ask_workers(self) -> None:
        """Asks the workers that have not yet said what they have used, and asks again after a lost answer."""
        with self._job.lock:
            fresh = [owner for owner in self.queue.unheard() if owner not in self._asked_workers]
            endpoints = {owner: self._job.endpoints[owner[0]] for owner in fresh if owner[0] in self._job.endpoints}
            self._asked_workers.update(endpoints)
        for owner, endpoint in endpoints.items():
            try:
                call = endpoint.call(AskLeaseAcks())
            except ConnectionLost:
                self._asked_workers.discard(owner)
            else:
                call.when_done(functools.partial(self._has_told, owner, call))

    def _has_told(self, owner: Identity, call: Call) -> None:
        """In the thread of the answer."""
        answer: Message | None = None
        with contextlib.suppress(SynclineError):
            answer = call.wait(0)
        with self._job.lock:
            self._asked_workers.discard(owner)
            if isinstance(answer, GivenLeaseAcks):
                self.queue.heard(owner, answer.acks, answer.late, is_all=not answer.open)
        self.answer_requests()

    def departed_owners(self) -> dict[Identity, bool]:
        """Under the lock: owners of leases that are no longer members and are fenced everywhere; True: it died."""
        return self.queue.gone()

    def member_is_out(self, member: Member) -> None:
        """Under the lock: the next member of this name counts from zero."""
        self._measured.pop(member.name, None)
        self.queue.asking.pop(member.name, None)

    def reassign_departed(self, gone: dict[Identity, bool], answers: Iterable[Message]) -> bool:
        """Counts what these workers have used, by the `answers` of slice 0's server, and hands the rest to others.

        Returns False if one of them has a commit that still waits for its round: call this again later.
        """
        waiting: set[Identity] = set()
        with self._job.lock:
            for answer in answers:
                if isinstance(answer, GivenLeaseAcks):
                    self.queue.use(answer.acks, answer.late)
                    waiting.update(answer.open)
            self.queue.out(gone, waiting)
            self._job.keep()
        self.answer_requests()
        return waiting.isdisjoint(gone)

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: which workers wait for others to finish an epoch."""
        found = []
        for name, (_, message, since, _) in self.queue.asking.items():
            epoch = self.leasing.epoch(message.loader, message.epoch)
            owners = (
                sorted({lease.worker for lease in epoch.leases.values()} - {name, ""}) if epoch is not None else []
            )
            if owners and message.waits:
                what = f"the end of epoch {message.epoch + 1}"
                found.append(Wait(name, 0, owners, now - since, what))
        return found
