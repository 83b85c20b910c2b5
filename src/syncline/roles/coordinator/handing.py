"""Samples handed out by a coordinator: who asks is answered, given back, done, and back again from the dead."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from syncline import faults
from syncline.core.control import Beat
from syncline.core.handing import (
    AskLease,
    AskUses,
    Confirm,
    EndShard,
    GaveBack,
    GivenLease,
    LeaveEpoch,
    Opened,
    OpenEpoch,
    Recall,
    Use,
    Uses,
)
from syncline.core.leasing import SHARD_POSITIONS, Leasing
from syncline.core.ledger import Epoch
from syncline.core.message import Done, Message
from syncline.core.policy import policy_of
from syncline.core.slices import Identity
from syncline.core.spans import Span
from syncline.errors import ConnectionLost, StoreError, SynclineError
from syncline.net.rpc import Call, Request
from syncline.stats import Wait

if TYPE_CHECKING:
    from syncline.roles.coordinator.coordinator import Coordinator

#: Between two saves of what was used; until one is made, servers keep it.
KEEP_SECONDS = 1.0
#: What was dealt to a worker that does not come to the epoch is given to whoever has waited for so long.
RECLAIM_SECONDS = 5.0
_NOTHING = Span(0, 0)


class Handing:
    """All loaders of a job. Everything here is under the coordinator's lock."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._leasing: Leasing | None = None  # once the policy is known
        self._asking: dict[str, tuple[Request, AskLease, float]] = {}
        self._used: list[Use] = []  # known here, not kept yet
        self._late: list[Use] = []  # likewise, of commits that were late
        self._kept_at = 0.0
        self._measured: dict[str, tuple[int, float]] = {}  # samples and seconds of work, as last said
        self.num_samples = 0  # that workers were handed, all together

    @property
    def leasing(self) -> Leasing:
        if self._leasing is None:
            state = self._c.membership.state
            self._leasing = Leasing(state.leases, in_rounds=policy_of(state.config).in_rounds)
        return self._leasing

    # -- what workers say ---------------------------------------------------------------------------------

    def open(self, request: Request, message: OpenEpoch) -> None:
        with self._c.lock:
            owner, workers = _owner(request), max(1, len(self._taking_part()))
            is_new = self.leasing.epoch(message.loader, message.epoch) is None
            is_left = self.leasing.open(owner, message.loader, message.epoch, message.data, workers)
            epoch = self.leasing.epoch(message.loader, message.epoch)
            if is_new and epoch is not None:
                self._c.try_keep()  # else one that comes back knows nothing of it, and takes it for finished
            size, done = (epoch.num_samples, epoch.num_done) if epoch else (message.data.num_samples, 0)
            is_shared = self.leasing.is_shared(message.loader)
        request.reply(Opened(is_left, size, done, is_shared))

    def ask(self, request: Request, message: AskLease) -> None:
        """Answered now; or, from one that has nothing to do, when there is something."""
        with self._c.lock:
            self.leasing.measured(request.peer.name, message.samples, message.seconds)
            self._asking[request.peer.name] = (request, message, time.monotonic())
        self.answer()
        if self._c.watching is None:
            self.look(time.monotonic())  # inside one process nobody else does
        elif message.waits:
            self._ask_uses()

    def _ask_uses(self) -> None:
        """Somebody waits for the end of an epoch: what was used meanwhile is asked for, not waited for."""
        with self._c.lock:
            seat = self._c.membership.state.seats.get(0)
            endpoint = self._c.endpoints.get(seat.primary) if seat is not None and self._asking else None
        if endpoint is None:
            return
        with contextlib.suppress(ConnectionLost):
            call = endpoint.call(AskUses())
            call.when_done(functools.partial(self._were_used, call))

    def _were_used(self, call: Call) -> None:
        with contextlib.suppress(SynclineError):
            answer = call.wait(0)
            if isinstance(answer, Uses) and (answer.uses or answer.late):
                with self._c.lock:
                    self._use(answer.uses, answer.late)
                self.answer()

    def leave(self, request: Request, message: LeaveEpoch) -> None:
        with self._c.lock:
            owner = _owner(request)
            self._asking.pop(owner[0], None)
            epoch = self.leasing.epoch(message.loader, message.epoch)
            for use in message.passed_over if epoch is not None else ():
                assert epoch is not None
                epoch.pass_over(*use)
            self.leasing.leave(owner, message.loader, message.epoch, message.leases, message.newest)
        request.reply(Done())
        self.answer()

    def end_shard(self, request: Request, message: EndShard) -> None:
        with self._c.lock:
            epoch = self.leasing.epoch(message.loader, message.epoch)
            if epoch is not None:
                epoch.shorten(message.position, (message.position // SHARD_POSITIONS + 1) * SHARD_POSITIONS)
                self._c.keep()
        request.reply(Done())
        self.answer()

    def _gave_back(self, owner: Identity, recall: Recall, call: Call) -> None:
        """In the thread that brings the answer."""
        try:
            answer = call.wait(0)
        except SynclineError:
            with self._c.lock:
                self.leasing.not_heard(owner, recall.loader, recall.epoch)
            return  # it comes back and is asked again, or is evicted
        if isinstance(answer, GaveBack):
            with self._c.lock:
                self.leasing.gave_back(owner, recall.loader, recall.epoch, answer.leases)
            self.answer()

    # -- what servers say ---------------------------------------------------------------------------------

    def beat(self, name: str, beat: Beat) -> None:
        """Under the lock: a server says what was used, a worker how fast it is."""
        if beat.uses or beat.late:
            self._use(beat.uses, beat.late)
        if beat.samples:
            samples, seconds = self._measured.get(name, (0, 0.0))
            self._measured[name] = (beat.samples, beat.work_seconds)
            self.num_samples += max(0, beat.samples - samples)
            self.leasing.measured(name, beat.samples - samples, beat.work_seconds - seconds)

    def _use(self, uses: Iterable[Use], late: Iterable[Use] = ()) -> None:
        self._used += (fresh := list(uses))
        self.leasing.used(fresh)
        self._late += (back := list(late))
        self.leasing.late(back)

    def look(self, now: float) -> None:
        """Now and then: keeps what was used and confirms it, cuts parts anew, sees to those who wait in vain."""
        if self._leasing is None:
            return
        with self._c.lock:
            taking_part = self._taking_part()
            recalls = [
                (owner, name, number)
                for name, epochs in self.leasing.state.epochs.items()
                for number in epochs
                for owner in self.leasing.recut(name, number, taking_part)
            ]
            for request, message, since in self._asking.values():
                if message.waits and now - since > RECLAIM_SECONDS:
                    self._reclaim(request, message)
            for owner, name, number in recalls:
                self._recall(owner, Recall(name, number))
            somebody_waits = any(message.waits for _, message, _ in self._asking.values())
        self.answer()
        if somebody_waits:
            self._ask_uses()
        if (self._used or self._late) and now - self._kept_at > KEEP_SECONDS:
            self._confirm(now)

    def _reclaim(self, request: Request, message: AskLease) -> None:
        count = self.leasing.reclaim(message.loader, message.epoch)
        if count:
            where = f"epoch {message.epoch + 1} of {message.loader!r}"
            self._c.event(f"{count} samples of {where} go to others: the workers they were meant for do not read it")

    def _confirm(self, now: float) -> None:
        with self._c.lock:
            used, self._used, self._kept_at = self._used, [], now
            late, self._late = self._late, []
            self._tell_finished()
            try:
                self._c.keep()
            except StoreError as error:
                self._used, self._late = used + self._used, late + self._late
                self._c.say_trouble(error)
                return
            seat = self._c.membership.state.seats.get(0)
            names = (seat.primary, seat.backup) if seat is not None else ()
            endpoints = [self._c.endpoints[name] for name in names if name in self._c.endpoints]
        for endpoint in endpoints:
            endpoint.mention(Confirm(sorted(set(used)), sorted(set(late))))

    def _tell_finished(self) -> None:
        for name, number, epoch in self.leasing.forget_finished():
            self._tell(f"epoch {number + 1} of {name!r}", epoch)

    def _tell(self, which: str, epoch: Epoch) -> None:
        for suspect in epoch.aside:
            where = f"positions {suspect.span.start} to {suspect.span.stop - 1}"
            workers = ", ".join(suspect.workers)
            self._c.event(f"{which}: the samples at {where} were set aside: {workers} died at them")
        if epoch.num_passed_over:
            self._c.event(f"{which}: {epoch.num_passed_over} samples were read and used in no step")

    def end(self) -> None:
        """Under the lock: the job is over. What was set aside and passed over in its last epochs, finished or not."""
        if self._leasing is not None:
            self._tell_finished()
            for name, epochs in self.leasing.state.epochs.items():
                for number, epoch in epochs.items():
                    self._tell(f"epoch {number + 1} of {name!r}", epoch)

    # -- answering ----------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Whoever asks is answered as far as there is something to say; leases are kept before they are told."""
        with self._c.lock:
            answers = []
            for name, (request, message, since) in list(self._asking.items()):
                given = self._decide(request, message) if name in self._asking else None
                # Whom it has asked to give back may have done so at once, and this one be answered by that.
                if given is not None and self._asking.get(name, (None,))[0] is request:
                    answers.append((name, request, message, since, given))
                    del self._asking[name]
            if any(given.lease for *_, given in answers) and not self._keep_leases(answers):
                return
        for _, request, _, _, given in answers:
            request.reply(given)
        if any(given.lease for *_, given in answers) and self._asking:
            self.answer()  # others who wait may have to rest from the stretch that it is for

    def _decide(self, request: Request, message: AskLease) -> GivenLease | None:
        owner, taking_part = _owner(request), self._taking_part()
        answer = self.leasing.ask(
            owner, message.loader, message.epoch, taking_part, message.held,
            is_idle=not message.left, newest=message.newest, given=message.given, stretch=message.stretch,
        )  # fmt: skip
        for other in answer.recall:
            self._recall(other, Recall(message.loader, message.epoch))
        if answer.lease is not None:
            return GivenLease(answer.lease.number, answer.lease.span, step=answer.lease.step)
        if answer.is_finished or not (message.waits or answer.is_coming):
            return GivenLease(0, _NOTHING, answer.is_finished, is_shared=self.leasing.is_shared(message.loader))
        if message.waits and answer.rest_from:
            return GivenLease(0, _NOTHING, rest_from=answer.rest_from)
        return None

    def _keep_leases(self, answers: list[tuple[str, Request, AskLease, float, GivenLease]]) -> bool:
        try:
            self._c.keep()
            faults.reach("lease.kept")
            return True
        except StoreError as error:
            self._c.say_trouble(error)
        for name, request, message, since, given in answers:
            self._asking.setdefault(name, (request, message, since))
            epoch = self.leasing.epoch(message.loader, message.epoch)
            if epoch is not None and given.lease in epoch.leases:
                epoch.leases[given.lease].is_told = False  # it is given when it could be kept
        return False

    def _recall(self, owner: Identity, recall: Recall) -> None:
        """Under the lock."""
        endpoint = self._c.endpoints.get(owner[0])
        try:
            if endpoint is None:
                raise ConnectionLost(f"{owner[0]} is not connected")
            call = endpoint.call(recall)
        except ConnectionLost:
            self.leasing.not_heard(owner, recall.loader, recall.epoch)
            return
        call.when_done(functools.partial(self._gave_back, owner, recall, call))

    def _taking_part(self) -> list[Identity]:
        state = self._c.membership.state
        return [(name, state.entered[name]) for name in self._c.membership.workers() if name in state.entered]

    # -- the dead -----------------------------------------------------------------------------------------

    def uses_are_lost(self) -> None:
        """Slice 0 came back from a worker's copy: what was used and not told yet went with its server.

        The workers that live say what they have used; their updates may be revoked, and the samples count as read. Of
        those who died nobody knows: what they had not told is read again.
        """
        with self._c.lock:
            if self._leasing is None:
                return
            endpoints = [
                self._c.endpoints[name] for name in self._c.membership.workers() if name in self._c.endpoints
            ]
            self._c.event("samples that were used just before count as read; of workers that died too, maybe twice")
        for endpoint in endpoints:
            with contextlib.suppress(ConnectionLost):
                call = endpoint.call(AskUses())
                call.when_done(functools.partial(self._were_used, call))

    def gone(self) -> dict[Identity, bool]:
        """Under the lock: who has leases and is a member no more, and fenced everywhere; whether it died."""
        if self._leasing is None and not self._c.membership.state.leases.epochs:
            return {}
        state = self._c.membership.state
        found = {}
        for epochs in state.leases.epochs.values():
            for lease in (lease for epoch in epochs.values() for lease in epoch.leases.values()):
                name, incarnation = lease.owner
                member = state.members.get(name)
                is_fencing = state.fencing.get(name, (0, ""))[0] >= incarnation
                if (member is None or member.incarnation != incarnation) and not is_fencing:
                    found[lease.owner] = name not in state.left
        return found

    def forget(self, name: str) -> None:
        """Under the lock: what comes under this name next has another count."""
        self._measured.pop(name, None)

    def out(self, gone: dict[Identity, bool], answers: Iterable[Message]) -> None:
        """What of the dead counts is known, by the word of slice 0's server: the rest is to do again."""
        with self._c.lock:
            for answer in answers:
                if isinstance(answer, Uses):
                    self._use(answer.uses, answer.late)
            for owner, failed in gone.items():
                self._asking.pop(owner[0], None)
                self.leasing.out(owner, failed=failed)
            self._c.keep()
        self.answer()

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: who waits for whom to finish an epoch."""
        found = []
        for name, (_, message, since) in self._asking.items():
            epoch = self.leasing.epoch(message.loader, message.epoch)
            owners = sorted({lease.worker for lease in epoch.leases.values()} - {name}) if epoch is not None else []
            if owners and message.waits:
                what = f"the end of epoch {message.epoch + 1}"
                found.append(Wait(name, 0, owners, now - since, what))
        return found


def _owner(request: Request) -> Identity:
    return (request.peer.name, request.peer.incarnation)
