"""Replication, as the primary of a slice sees it: every update goes to the backups before it counts here."""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from syncline import faults
from syncline.core.codecs.pieces import Encoded
from syncline.core.members import Member
from syncline.core.ring import Ballot
from syncline.core.rounds import Commit
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import Replicate, Replicated, Seed
from syncline.errors import ConfigError, ConnectionLost, FencedError, RuleError, SynclineError
from syncline.net.rpc import Call, Endpoint
from syncline.net.transport import Buffer, Memory, buffer_of
from syncline.server.encoded_sums import encode_sum
from syncline.server.rules import tensor_of
from syncline.server.tasks import FenceTask, SliceTask, StagedCommit, late_of, uses_of
from syncline.store.tensors import new_digest

if TYPE_CHECKING:
    from syncline.server.slices import HostedSlice

Bytes = npt.NDArray[np.uint8]
#: Every so many versions of a slice, primary and backup compare what they have.
DIGEST_EVERY = 256
#: Until a backup whose connection broke is dialed again; the pause grows up to the second.
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 0.05, 1.0
#: A backup that refuses an update is seeded again; one that refuses that too waits for the coordinator's word.
_MOST_SEEDS = 3


class ReliableMessage(NamedTuple):
    """A message with what follows it."""

    message: Message
    buffers: Sequence[Buffer] = ()

    def send(self, endpoint: Endpoint) -> Call:
        return endpoint.call(self.message, buffers=self.buffers, payload_bytes=sum(map(len, self.buffers)))


class Region:
    """Slice-shaped memory for the update in flight; where it is lent, a backup's process maps it too."""

    def __init__(self, array: Bytes, dtype: str, memory: Memory | None = None) -> None:
        self.array, self.flat = array, tensor_of(array, dtype)
        self._memory = memory  # kept as long as a slice uses it


class Parcel:
    """An update for one backup, until that has acknowledged it."""

    def __init__(self, replica: Replica, slot: HostedSlice, update: Update, letter: ReliableMessage) -> None:
        self.replica, self.slot, self.update, self.letter = replica, slot, update, letter
        self.seed: ReliableMessage | None = None  # goes before it
        self.num_seeds = 0
        self.is_acknowledged = self.is_refused = False
        self.digest = b""

    def send(self) -> None:
        self.replica.send(self)


class Update:
    """One update on its way to the backups, and then into the slice."""

    def __init__(
        self,
        work: SliceTask,
        commits: Sequence[Commit[StagedCommit]],
        region: Region,
        has: list[int],
        scale: float,
    ) -> None:
        self.scale = scale  # what its gradient counts, there and here
        self.work, self.commits, self.has = work, commits, has
        self.region = region
        self.parcels: list[Parcel] = []
        self.since = time.monotonic()
        self.is_told = False  # in a ring: its round knows that all hold it
        self.encoded: tuple[str, Encoded] | None = None  # in a ring: by which codec, for those who are sent it

    @property
    def is_acknowledged(self) -> bool:
        return all(parcel.is_acknowledged for parcel in self.parcels)

    def gradients(self, slot: HostedSlice) -> list[torch.Tensor | None]:
        return slot.rules.as_pieces(self.region.flat, self.has)

    def compare(self, slot: HostedSlice) -> None:
        """Applied here too: all must have come to the same bytes."""
        told = [parcel for parcel in self.parcels if parcel.digest]
        mine = digest_of(slot) if told else b""
        for parcel in told:
            if parcel.digest != mine:
                parcel.replica.differs(slot)


def region_of(slot: HostedSlice) -> Region:
    """Where its next update lies for all."""
    return slot.replicas[0].region if slot.replicas else slot.own_region()


def update_of(
    slot: HostedSlice,
    work: SliceTask,
    commits: Sequence[Commit[StagedCommit]],
    gradients: Sequence[torch.Tensor | None],
    scale: float,
) -> Update:
    """Under the slice's lock: the next update, as its backups will get it; from a process group, they have it
    themselves."""
    summed = work.sums.region(slot) if work.sums is not None else None
    if work.is_summed:
        has = [index for index, gradient in enumerate(gradients) if gradient is not None]
        return Update(work, commits, summed or slot.own_region(), has, scale)
    region = region_of(slot)
    made = Update(work, commits, region, slot.rules.lay_down(gradients, region.flat), scale)
    if not (slot.is_spread and work.waits_for_votes):
        _encode(slot, made)
        made.parcels = [replica.parcel(slot, made) for replica in slot.replicas if not replica.is_seeding]
    return made


def _encode(slot: HostedSlice, update: Update) -> None:
    coder, is_sent = slot.sum_coder, any(replica.lent is None for replica in slot.replicas)
    if coder is not None and is_sent and update.has and update.work.waits_for_votes:
        try:
            encoded = encode_sum(coder, slot.segment, slot.part, update.has, update.region.array)
        except ConfigError as error:  # a codec of the user's own; other servers wait for this sum
            slot.sum_coder = None
            slot.replicas[0].partner.log(f"{error}; sums of slice {slot.part.id} are sent as they are from now on")
            return
        update.encoded = (coder.codec.name, encoded)


def message_of(slot: HostedSlice, update: Update, ballot: Ballot | None, *, wants_digest: bool = False) -> Replicate:
    """Under the slice's lock: an update, as it is sent to a backup."""
    asks = wants_digest and not update.work.waits_for_votes
    return replicate_message(slot, update.work, update.commits, update.has, update.scale, ballot, wants_digest=asks)


def replicate_message(
    slot: HostedSlice,
    work: SliceTask,
    commits: Sequence[Commit[StagedCommit]],
    has: list[int],
    scale: float,
    ballot: Ballot | None,
    *,
    wants_digest: bool = False,
) -> Replicate:
    """Under the slice's lock: the next update of this slice, with gradients for the pieces `has`."""
    is_first = slot.part.id == 0
    return Replicate(
        slot.part.id,
        slot.state.version,
        [(c.worker, c.item.incarnation, c.clock) for c in commits],
        list(work.fences),
        has,
        list(work.overrides_for(slot.part.segment).items()),
        scale,
        wants_digest,
        uses_of(commits) if is_first else [],
        late_of(commits) if is_first else [],
        work.roll,
        ballot,
    )


def digest_of(slot: HostedSlice) -> bytes:
    return new_digest(buffer_of(slot.memory)).digest()


def seed_of(slot: HostedSlice, lent: tuple[int, int] | None) -> ReliableMessage:
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
    return ReliableMessage(message, buffers)


class Replica:
    """A slice's copy on another server, as its primary keeps it up to date.

    `outbox`: while the copy is being seeded, updates are applied here alone and wait there to follow the seed.
    """

    def __init__(self, partner: Partner, region: Region, lent: tuple[int, int] | None = None) -> None:
        self.partner, self.region, self.lent = partner, region, lent
        self.outbox: collections.deque[ReliableMessage] | None = None
        self.needs_seed = False
        self.is_named = False  # by the replica sets: the coordinator counts on it
        self.is_new = False  # in a ring: named, and not supplied yet

    @property
    def is_seeding(self) -> bool:
        return self.outbox is not None

    def parcel(self, slot: HostedSlice, update: Update) -> Parcel:
        """Under the slice's lock: an update, as this backup will get it."""
        wants_digest = (slot.state.version + 1) % DIGEST_EVERY == 0 and self.partner.is_of_our_kind
        message = message_of(slot, update, update.work.ballot, wants_digest=wants_digest and bool(update.has))
        views: Sequence[Buffer] = slot.rules.bytes_of_pieces(update.region.array, update.has)
        if self.lent and self.region is not update.region:
            for mine, view in zip(slot.rules.bytes_of_pieces(self.region.array, update.has), views, strict=True):
                mine[:] = view
        if update.encoded is not None and not self.lent:
            codec, encoded = update.encoded
            message = msgspec.structs.replace(message, codec=codec, sizes=encoded.sizes)
            views = [buffer_of(array) for array in encoded.buffers]
        made = Parcel(self, slot, update, ReliableMessage(message, () if self.lent else views))
        if self.needs_seed:
            self.needs_seed, made.seed = False, seed_of(slot, self.lent)
        return made

    def gather(self, slot: HostedSlice, update: Update) -> None:
        """Under the slice's lock, while the copy is being seeded: this is applied here, and follows the seed. The
        next update overwrites the region before this one has left."""
        assert self.outbox is not None
        views = slot.rules.bytes_of_pieces(update.region.array, update.has)
        message = message_of(slot, update, None)
        self.outbox.append(ReliableMessage(message, [memoryview(bytes(view)) for view in views]))

    def send(self, parcel: Parcel) -> None:
        """Sends an update; whatever goes wrong, it stays in flight until it is acknowledged, or the slice alone."""
        endpoint = self.partner.current()
        if endpoint is None:
            self.partner.repeat_later(parcel)
            return
        try:
            if parcel.seed is not None:
                parcel.seed.send(endpoint)
            call = parcel.letter.send(endpoint)
        except ConnectionLost:
            self.partner.repeat_later(parcel)
            return
        if faults.armed is not None:
            faults.reach("replicate.sent")
        call.when_done(functools.partial(self.answered, parcel, call))

    def answered(self, parcel: Parcel, call: Call) -> None:
        """In the thread that brings it."""
        slot = parcel.slot
        try:
            answer = call.wait(0)
            assert isinstance(answer, Replicated)
            parcel.digest = answer.digest
        except ConnectionLost:
            self.partner.repeat_later(parcel)
            return
        except FencedError as error:
            # Another primary is on its way in, or an Install is: the coordinator's word will come.
            if not parcel.is_refused and parcel.update.work.ballot is None:
                self.partner.log(f"slice {slot.part.id}: {self.partner.name} refuses updates from here: {error}")
            parcel.is_refused = True
            self.partner.repeat_later(parcel)
            return
        except RuleError:
            self.needs_seed = True  # it raised there, and will here
        except SynclineError as error:
            self._seed_and_repeat(parcel, error)
            return
        if faults.armed is not None:
            faults.reach("replicate.acknowledged")
        parcel.is_acknowledged = True
        if not slot.is_sending and parcel.update.is_acknowledged:
            self.partner.drain(slot)

    def _seed_and_repeat(self, parcel: Parcel, error: SynclineError) -> None:
        """The backup is not where it should be: all of the slice goes over once more, then the update again."""
        if parcel.is_acknowledged:
            return  # it was given up meanwhile
        slot = parcel.slot
        parcel.num_seeds += 1
        waits = parcel.num_seeds > _MOST_SEEDS
        what = "the slice waits for the coordinator's word" if waits else "it is seeded again"
        self.partner.log(
            f"slice {slot.part.id}: its backup on {self.partner.name} refused an update: {error}; {what}"
        )
        if waits:
            return
        with slot.lock:
            if slot.in_flight is not parcel.update or parcel.is_acknowledged:
                return
            parcel.seed = seed_of(slot, self.lent)
        self.partner.submit(parcel.send)

    def differs(self, slot: HostedSlice) -> None:
        """Under the slice's lock."""
        self.partner.log(
            f"slice {slot.part.id}: the backup on {self.partner.name} differs from the primary at version "
            f"{slot.state.version}; it is seeded again"
        )
        self.renew(slot)

    def renew(self, slot: HostedSlice, finished: Callable[[SliceTask], None] = lambda work: None) -> None:
        """Under the slice's lock, to be drained after it: all of the slice goes over once more."""
        self.needs_seed = True
        slot.queue.append(FenceTask((), (slot,), finished))


class Sendable(Protocol):
    """What goes to another server, again and again until it is acknowledged there."""

    @property
    def is_acknowledged(self) -> bool: ...

    def send(self) -> None: ...


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
        self._waiting: list[Sendable] = []
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

    def repeat_later(self, item: Sendable) -> None:
        """The connection broke: this goes out again when there is one."""
        with self._lock:
            self._waiting.append(item)
            if self._repeating or self._closed.is_set():
                return
            self._repeating = True
        threading.Thread(target=self._repeat, name=f"redial {self.name}", daemon=True).start()

    def _repeat(self) -> None:
        pause = _AGAIN_SECONDS
        while not self._closed.wait(pause):
            with self._lock:
                self._waiting = [item for item in self._waiting if not item.is_acknowledged]
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
            for item in waiting:
                item.send()

    def close(self) -> None:
        self._closed.set()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
