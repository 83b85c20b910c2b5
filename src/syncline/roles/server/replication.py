"""Replication, as the primary of a slice sees it: every update goes to the backup before it counts here."""

from __future__ import annotations

import collections
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from syncline import faults
from syncline.core.members import Member
from syncline.core.message import Message
from syncline.core.traffic import Replicate, Replicated, Seed
from syncline.core.verdicts import Commit
from syncline.errors import ConnectionLost, FencedError, RuleError, SynclineError
from syncline.net.rpc import Call, Endpoint
from syncline.net.transport import Buffer, Memory, buffer_of
from syncline.roles.server.rules import tensor_of
from syncline.roles.server.work import Contribution, FenceWork, Work, late_of, uses_of

if TYPE_CHECKING:
    from syncline.roles.server.hosted import HostedSlice

Bytes = npt.NDArray[np.uint8]
#: Every so many versions of a slice, primary and backup compare what they have.
DIGEST_EVERY = 256
#: Until a backup whose connection broke is dialed again; the pause grows up to the second.
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 0.05, 1.0
#: A backup that refuses an update is seeded anew; one that refuses that too waits for the coordinator's word.
_MOST_SEEDS = 3


class Letter(NamedTuple):
    """A message with what follows it."""

    message: Message
    buffers: Sequence[Buffer] = ()

    def send(self, endpoint: Endpoint) -> Call:
        return endpoint.call(self.message, buffers=self.buffers, payload_bytes=sum(map(len, self.buffers)))


class Region:
    """Slice-shaped memory for the update in flight; where it is lent, the backup's process maps it too."""

    def __init__(self, array: Bytes, dtype: str, memory: Memory | None = None) -> None:
        self.array, self.flat = array, tensor_of(array, dtype)
        self._memory = memory  # kept as long as a slice uses it


class Update:
    """One update on its way to the backup, and then into the slice."""

    def __init__(
        self,
        work: Work,
        commits: Sequence[Commit[Contribution]],
        region: Region,
        letter: Letter,
        has: Sequence[int],
        scale: float,
    ) -> None:
        self.scale = scale  # what its gradient counts, there and here
        self.work, self.commits, self.letter = work, commits, letter
        self._region, self._has = region, has
        self.seed: Letter | None = None  # goes before it
        self.num_seeds = 0
        self.is_acknowledged = self.is_refused = False
        self.since = time.monotonic()
        self.digest = b""
        self.differs: Callable[[], None] = lambda: None

    def gradients(self, slot: HostedSlice) -> list[torch.Tensor | None]:
        return slot.rules.as_pieces(self._region.flat, self._has)

    def compare(self, slot: HostedSlice) -> None:
        """Applied here too: both must have come to the same bytes."""
        if self.digest and digest_of(slot) != self.digest:
            self.differs()


def digest_of(slot: HostedSlice) -> bytes:
    return hashlib.blake2b(buffer_of(slot.memory), digest_size=16).digest()


def seed_of(slot: HostedSlice, lent: tuple[int, int] | None) -> Letter:
    """Under the slice's lock: a copy of all there is of it."""
    entries, buffers = [], [buffer_of(slot.memory.copy())]
    with slot.home.at_work():
        for entry, tensor in slot.rules.state():
            entries.append(entry)
            buffers.append(buffer_of(tensor.clone().reshape(-1).view(torch.uint8).numpy()))
    state, (number, offset) = slot.state, lent or (None, 0)
    clocks, fences, uses = state.clock_entries(), state.fence_entries(), state.use_entries()
    late = state.late_entries()
    message = Seed(slot.part.id, state.version, clocks, fences, entries, number, offset, uses, late)
    return Letter(message, buffers)


class Replica:
    """A slice's copy on another server, as its primary keeps it up to date.

    `outbox`: while the copy is being seeded, updates are applied here alone and wait there to follow the seed.
    """

    def __init__(self, partner: Partner, region: Region, lent: tuple[int, int] | None = None) -> None:
        self.partner, self._region, self.lent = partner, region, lent
        self.outbox: collections.deque[Letter] | None = None
        self.needs_seed = False
        self.is_named = False  # by the seats: the coordinator counts on it

    @property
    def is_seeding(self) -> bool:
        return self.outbox is not None

    def update(
        self,
        slot: HostedSlice,
        work: Work,
        commits: Sequence[Commit[Contribution]],
        gradients: Sequence[torch.Tensor | None],
        scale: float,
    ) -> Update:
        """Under the slice's lock: the next update, as the backup will get it."""
        has = slot.rules.lay_down(gradients, self._region.flat)
        version = slot.state.version
        message = Replicate(
            slot.part.id,
            version,
            [(c.worker, c.item.incarnation, c.clock) for c in commits],
            list(work.fences),
            has,
            list(work.overrides_for(slot.part.segment).items()),
            scale,
            bool(has) and (version + 1) % DIGEST_EVERY == 0 and self.partner.is_of_our_kind,
            uses_of(commits) if slot.part.id == 0 else [],
            late_of(commits) if slot.part.id == 0 else [],
            work.roll,
        )
        views = slot.rules.bytes_of_pieces(self._region.array, has)
        if self.outbox is not None:
            # The next update overwrites the region before this one has left.
            self.outbox.append(Letter(message, [memoryview(bytes(view)) for view in views]))
        made = Update(work, commits, self._region, Letter(message, () if self.lent else views), has, scale)
        if self.needs_seed and self.outbox is None:
            self.needs_seed, made.seed = False, seed_of(slot, self.lent)
        made.differs = functools.partial(self._differs, slot)
        return made

    def send(self, slot: HostedSlice, update: Update) -> None:
        """Sends an update; whatever goes wrong, it stays in flight until it is acknowledged, or the slice alone."""
        endpoint = self.partner.current()
        if endpoint is None:
            self.partner.repeat_later(slot, self, update)
            return
        try:
            if update.seed is not None:
                update.seed.send(endpoint)
            call = update.letter.send(endpoint)
        except ConnectionLost:
            self.partner.repeat_later(slot, self, update)
            return
        if faults.armed is not None:
            faults.reach("replicate.sent")
        call.when_done(functools.partial(self._answered, slot, update, call))

    def _answered(self, slot: HostedSlice, update: Update, call: Call) -> None:
        """In the thread that brings it."""
        try:
            answer = call.wait(0)
            assert isinstance(answer, Replicated)
            update.digest = answer.digest
        except ConnectionLost:
            self.partner.repeat_later(slot, self, update)
            return
        except FencedError as error:
            # Another primary is on its way in, or an Install is: the coordinator's word will come.
            if not update.is_refused:
                self.partner.log(f"slice {slot.part.id}: {self.partner.name} refuses updates from here: {error}")
            update.is_refused = True
            self.partner.repeat_later(slot, self, update)
            return
        except RuleError:
            self.needs_seed = True  # it raised there, and will here
        except SynclineError as error:
            self._seed_and_repeat(slot, update, error)
            return
        if faults.armed is not None:
            faults.reach("replicate.acknowledged")
        update.is_acknowledged = True
        if not slot.is_sending:
            self.partner.drain(slot)

    def _seed_and_repeat(self, slot: HostedSlice, update: Update, error: SynclineError) -> None:
        """The backup is not where it should be: all of the slice goes over once more, then the update again."""
        update.num_seeds += 1
        waits = update.num_seeds > _MOST_SEEDS
        what = "the slice waits for the coordinator's word" if waits else "it is seeded anew"
        self.partner.log(
            f"slice {slot.part.id}: its backup on {self.partner.name} refused an update: {error}; {what}"
        )
        if waits:
            return
        with slot.lock:
            if slot.in_flight is not update or update.is_acknowledged:
                return
            update.seed = seed_of(slot, self.lent)
        self.partner.submit(functools.partial(self.send, slot, update))

    def _differs(self, slot: HostedSlice) -> None:
        """Under the slice's lock."""
        self.partner.log(
            f"slice {slot.part.id}: the backup on {self.partner.name} differs from the primary at version "
            f"{slot.state.version}; it is seeded anew"
        )
        self.renew(slot)

    def renew(self, slot: HostedSlice, finished: Callable[[Work], None] = lambda work: None) -> None:
        """Under the slice's lock, to be drained after it: all of the slice goes over once more."""
        self.needs_seed = True
        slot.queue.append(FenceWork((), (slot,), finished))


class Partner:
    """Another server that has backups of slices here: the way to it, made again when it breaks."""

    def __init__(
        self,
        member: Member,
        dial: Callable[[Member], Endpoint],
        *,
        is_of_our_kind: bool,
        drain: Callable[[HostedSlice], None],
        submit: Callable[[Callable[[], None]], None],
        log: Callable[[str], None],
    ) -> None:
        self.member, self.is_of_our_kind = member, is_of_our_kind
        self.drain, self.submit, self.log = drain, submit, log
        self._dial = dial
        self._lock = threading.Lock()
        self._dialing = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._waiting: list[tuple[HostedSlice, Replica, Update]] = []
        self._repeating = False
        self._closed = threading.Event()
        self.num_lent = 0

    @property
    def name(self) -> str:
        return self.member.name

    def current(self) -> Endpoint | None:
        endpoint = self._endpoint
        return endpoint if endpoint is not None and endpoint.is_open else None

    def connect(self) -> Endpoint:
        """The connection that there is, or a new one."""
        with self._dialing:
            endpoint = self.current()
            if endpoint is None:
                if self._closed.is_set():
                    raise ConnectionLost(f"{self.name} is out")
                endpoint = self._endpoint = self._dial(self.member)
            return endpoint

    def repeat_later(self, slot: HostedSlice, replica: Replica, update: Update) -> None:
        """The connection broke: this update goes out again when there is one."""
        with self._lock:
            self._waiting.append((slot, replica, update))
            if self._repeating or self._closed.is_set():
                return
            self._repeating = True
        threading.Thread(target=self._repeat, name=f"redial {self.name}", daemon=True).start()

    def _repeat(self) -> None:
        pause = _AGAIN_SECONDS
        while not self._closed.wait(pause):
            with self._lock:
                self._waiting = [item for item in self._waiting if not item[2].is_acknowledged]
                if not self._waiting:
                    self._repeating = False
                    return
            try:
                self.connect()
            except (SynclineError, OSError):
                pause = min(2 * pause, _MOST_AGAIN_SECONDS)
                continue
            pause = _AGAIN_SECONDS
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for slot, replica, update in waiting:
                replica.send(slot, update)

    def close(self) -> None:
        self._closed.set()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
