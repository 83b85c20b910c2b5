"""Replication at the primary: every update goes to the backups before it counts."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from syncline import faults
from syncline.core.codecs.pieces import Encoded
from syncline.core.ring import Ballot
from syncline.core.rounds import Commit
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import Replicate, Replicated, Seed
from syncline.errors import ConfigError, FencedError, RuleError, SynclineError
from syncline.net.reliable_send import OutgoingMessage, Partner, ReliableSend
from syncline.net.rpc import Call, Endpoint
from syncline.net.transport import Buffer, Memory, buffer_of
from syncline.reduce.kernels import Numbers
from syncline.server.encoded_sums import encode_sum
from syncline.server.numbers import bytes_of, numbers_in
from syncline.server.tasks import FenceTask, SliceTask, StagedCommit, acks_of, late_of
from syncline.store.tensors import new_digest

if TYPE_CHECKING:
    from syncline.server.slices import HostedSlice

Bytes = npt.NDArray[np.uint8]
#: Every this many versions, primary and backup compare digests.
DIGEST_EVERY = 256
#: A backup that refuses an update is seeded again; one that refuses that too waits for the coordinator's word.
_MOST_SEEDS = 3


class Region:
    """Slice-shaped memory for the update in flight. If it is shared, a backup's process maps it too."""

    def __init__(self, array: Bytes, dtype: str, memory: Memory | None = None) -> None:
        self.array, self.flat = array, numbers_in(array, dtype)
        self._memory = memory  # kept as long as a slice uses it


class UpdateSend(ReliableSend):
    """An update on its way to one backup, which has to be at the version before it: it is seeded again if not."""

    def __init__(self, replica: Replica, slot: HostedSlice, update: Update, outgoing: OutgoingMessage) -> None:
        super().__init__(replica.partner, outgoing.message, outgoing.buffers)
        self.replica, self.update, self._slot = replica, update, slot
        self.seed: OutgoingMessage | None = None  # goes before it
        self.digest = b""  # of the backup's bytes, where it was asked for
        self._num_seeds, self._is_refused = 0, False

    def transmit(self, endpoint: Endpoint, outgoing: OutgoingMessage) -> Call:
        if self.seed is not None:
            self.seed.send(endpoint)
        call = outgoing.send(endpoint)
        if faults.armed is not None:
            faults.reach("replicate.sent")
        return call

    def answered(self, answer: Message) -> None:
        assert isinstance(answer, Replicated)
        self.digest = answer.digest
        if faults.armed is not None:
            faults.reach("replicate.acknowledged")

    def refused(self, error: SynclineError) -> bool:
        if isinstance(error, RuleError):
            self.replica.needs_seed = True  # it raised there, and will here
            return True
        if isinstance(error, FencedError):
            # Another primary is on its way in, or an Install is: the coordinator's word will come.
            if not self._is_refused and self.update.work.ballot is None:
                name, number = self.partner.name, self._slot.part.id
                self.partner.log(f"slice {number}: {name} refuses updates from here: {error}")
            self._is_refused = True
            self.partner.repeat_later(self)
        else:
            self._seed_and_repeat(error)
        return False

    def acknowledged(self) -> None:
        if not self._slot.is_sending and self.update.is_acknowledged:
            self.partner.submit(self._slot.drain)

    def _seed_and_repeat(self, error: SynclineError) -> None:
        """The backup is not where it should be: all of the slice goes over once more, then the update again."""
        if self.is_acknowledged:
            return  # it was given up meanwhile
        slot = self._slot
        self._num_seeds += 1
        waits = self._num_seeds > _MOST_SEEDS
        what = "the slice waits for the coordinator's word" if waits else "it is seeded again"
        self.partner.log(
            f"slice {slot.part.id}: its backup on {self.partner.name} refused an update: {error}; {what}"
        )
        if waits:
            return
        with slot.lock:
            if slot.in_flight is not self.update or self.is_acknowledged:
                return
            self.seed = seed_of(slot, self.replica.lent)
        self.partner.submit(self.send)


class Update:
    """One update, first sent to the backups, then applied here."""

    def __init__(
        self,
        work: SliceTask,
        commits: Sequence[Commit[StagedCommit]],
        region: Region,
        has: list[int],
        scale: float,
    ) -> None:
        self.scale = scale  # the factor on its gradient, there and here
        self.work, self.commits, self.has = work, commits, has
        self.region = region
        self.sends: list[UpdateSend] = []  # one to each backup
        self.since = time.monotonic()
        self.is_told = False  # in a ring: its round knows that all servers hold it
        self.encoded: tuple[str, Encoded] | None = None  # in a ring: codec and data for the servers that receive it

    @property
    def is_acknowledged(self) -> bool:
        return all(send.is_acknowledged for send in self.sends)

    def gradients(self, slot: HostedSlice) -> list[Numbers | None]:
        return slot.rules.as_pieces(self.region.flat, self.has)

    def compare(self, slot: HostedSlice) -> None:
        """Applied here too: all must have come to the same bytes."""
        told = [send for send in self.sends if send.digest]
        mine = digest_of(slot) if told else b""
        for send in told:
            if send.digest != mine:
                send.replica.differs(slot)


def region_of(slot: HostedSlice) -> Region:
    """The memory for the slice's next update."""
    return slot.replicas[0].region if slot.replicas else slot.own_region()


def update_of(
    slot: HostedSlice,
    work: SliceTask,
    commits: Sequence[Commit[StagedCommit]],
    gradients: Sequence[Numbers | None],
    scale: float,
) -> Update:
    """Under the slice's lock: the next update for the backups. With a process group, they have its sum already."""
    summed = work.sums.region(slot) if work.sums is not None else None
    if work.is_summed:
        has = [index for index, gradient in enumerate(gradients) if gradient is not None]
        return Update(work, commits, summed or slot.own_region(), has, scale)
    region = region_of(slot)
    made = Update(work, commits, region, slot.rules.lay_down(gradients, region.flat), scale)
    if not (slot.is_spread and work.waits_for_votes):
        _encode(slot, made)
        made.sends = [replica.prepare(slot, made) for replica in slot.replicas if not replica.is_seeding]
    return made


def _encode(slot: HostedSlice, update: Update) -> None:
    coder, is_sent = slot.sum_coder, any(replica.lent is None for replica in slot.replicas)
    if coder is not None and is_sent and update.has and update.work.waits_for_votes:
        try:
            encoded = encode_sum(coder, slot.segment, slot.part, update.has, update.region.array)
        except ConfigError as error:  # a user's codec failed; other servers wait for this sum
            slot.sum_coder = None
            slot.replicas[0].partner.log(f"{error}; sums of slice {slot.part.id} are sent as they are from now on")
            return
        update.encoded = (coder.codec.name, encoded)


def message_of(slot: HostedSlice, update: Update, ballot: Ballot | None, *, wants_digest: bool = False) -> Replicate:
    """Under the slice's lock: the message with an update for a backup."""
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
        list(slot.overrides_of(work).items()),
        scale,
        wants_digest,
        acks_of(commits) if is_first else [],
        late_of(commits) if is_first else [],
        work.round_membership,
        ballot,
        counts=work.counts,
        gather=work.gather,
    )


def digest_of(slot: HostedSlice) -> bytes:
    return new_digest(buffer_of(slot.memory)).digest()


def seed_of(slot: HostedSlice, lent: tuple[int, int] | None) -> OutgoingMessage:
    """Under the slice's lock: a copy of all there is of it."""
    entries, buffers = [], [buffer_of(slot.memory.copy())]
    with slot.storage.at_work():
        for entry, tensor in slot.rules.state(with_held=True):
            entries.append(entry)
            buffers.append(buffer_of(bytes_of(tensor).copy()))
    state, (number, offset) = slot.state, lent or (None, 0)
    clocks, fences, acks = state.clock_entries(), state.fence_entries(), state.ack_entries()
    late = state.late_entries()
    message = Seed(slot.part.id, state.version, clocks, fences, entries, number, offset, acks, late)
    return OutgoingMessage(message, buffers)


class Replica:
    """A slice's copy on another server, kept up to date by the primary.

    `after_seed`: while the copy is being seeded, updates are applied here alone, and follow the seed over the same
    connection. They are not repeated: if that breaks, the copy is given up.
    """

    def __init__(self, partner: Partner, region: Region, lent: tuple[int, int] | None = None) -> None:
        self.partner, self.region, self.lent = partner, region, lent
        self.after_seed: collections.deque[OutgoingMessage] | None = None
        self.needs_seed = False
        self.is_named = False  # in the replica sets: the coordinator relies on it
        self.is_new = False  # in a ring: named, and not supplied yet

    @property
    def is_seeding(self) -> bool:
        return self.after_seed is not None

    def prepare(self, slot: HostedSlice, update: Update) -> UpdateSend:
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
        made = UpdateSend(self, slot, update, OutgoingMessage(message, () if self.lent else views))
        if self.needs_seed:
            self.needs_seed, made.seed = False, seed_of(slot, self.lent)
        return made

    def gather(self, slot: HostedSlice, update: Update) -> None:
        """Under the slice's lock, while the copy is being seeded: this is applied here, and follows the seed. The
        next update overwrites the region before this one has left."""
        assert self.after_seed is not None
        views = slot.rules.bytes_of_pieces(update.region.array, update.has)
        message = message_of(slot, update, None)
        self.after_seed.append(OutgoingMessage(message, [memoryview(bytes(view)) for view in views]))

    def differs(self, slot: HostedSlice) -> None:
        """Under the slice's lock: the digests differ. Seeds the backup again."""
        self.partner.log(
            f"slice {slot.part.id}: the backup on {self.partner.name} differs from the primary at version "
            f"{slot.state.version}; it is seeded again"
        )
        self.renew(slot)

    def renew(self, slot: HostedSlice, finished: Callable[[SliceTask], None] = lambda work: None) -> None:
        """Under the slice's lock: sends the whole slice again. Drain afterwards."""
        self.needs_seed = True
        slot.put(FenceTask((), (slot,), finished))
