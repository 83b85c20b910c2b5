"""Backups: copies of slices whose primary is on another server. They apply its updates in order."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Container, Sequence
from typing import NamedTuple

import numpy as np

from syncline import faults
from syncline.core.layout import ITEM_BYTES, Segment, Slice
from syncline.core.ring import Ballot
from syncline.core.rounds import RoundMembership
from syncline.core.wire.message import Done, Message
from syncline.core.wire.traffic import Replicate, Replicated, Seed, ShareRegion
from syncline.errors import FencedError, FrameError, ProtocolError, RuleError, SynclineError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Memory, Peer, buffer_of
from syncline.server.encoded_sums import SumDecoder
from syncline.server.numbers import numbers_in
from syncline.server.pool import Pool
from syncline.server.replicate import Region, digest_of
from syncline.server.slices import HostedSlice, HowApplied
from syncline.server.state_transfer import check_entry
from syncline.server.storage import Blocks, SliceStorage
from syncline.server.tasks import RingRounds, SliceTask


class Backup:
    """One slice's copy and its queue of updates."""

    def __init__(self, slot: HostedSlice | None, primary: str) -> None:
        self.slot, self.primary = slot, primary
        self.region: Region | None = None  # shared by the primary
        self.own: Region | None = None  # for updates that are not in shared memory
        self.landed: Sequence[Buffer] | None = None  # received from a socket
        self.held: tuple[Replicate, Region | None] | None = None  # in a ring: the update that waits for votes
        # requests, or this server's own sums
        self.queue: collections.deque[Request | Callable[[], None]] = collections.deque()
        self.is_busy = False
        self.is_named = False  # by the replica sets
        self.is_out = False  # no longer a backup


def slot_of(backup: Backup, message: Replicate) -> HostedSlice:
    if backup.slot is None:
        raise ProtocolError(f"the seed of slice {message.slice} did not come")
    return backup.slot


def is_held(backup: Backup, message: Seed | Replicate) -> bool:
    if backup.held is None or not isinstance(message, Replicate) or message.ballot is None:
        return False
    return backup.held[0].ballot == message.ballot


def goes_before(held: Replicate, message: Message) -> bool:
    """Whether this is a fence that the primary has sent before the round that is held here. It does not wait for the
    round then: the primary votes for the round when the fence is answered. (A server that adds up a round itself may
    hold it before its primary has come that far.)
    """
    if not isinstance(message, Replicate) or message.ballot is not None:
        return False
    return not (message.has or message.clocks) and message.version == held.version


def is_of(message: Replicate, generation: int) -> bool:
    """In a ring: a late update from before a reconfiguration may arrive while a later round is summed."""
    return message.ballot is None or message.ballot.generation == generation


def own_region(backup: Backup, slot: HostedSlice) -> Region:
    if backup.own is None:
        backup.own = Region(np.zeros(slot.part.num_bytes, np.uint8), slot.part.dtype)
    return backup.own


class Lent(NamedTuple):
    """The memory shared by one primary, and our block for the slices that it will seed."""

    number: int
    memory: Memory
    block: int


class SharedRegions:
    """Shared memory by primary."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._lent: dict[str, Lent] = {}
        self._lock = threading.Lock()

    def share(self, request: Request, message: ShareRegion) -> None:
        """Maps the primary's memory and allocates a block for the slices to come."""
        memory = request.attachment
        if memory is None or memory.array.nbytes < message.num_bytes:
            raise ProtocolError(f"{request.peer} announces shared memory that did not arrive")
        block = self._blocks.make(message.num_bytes)
        with self._lock:
            before = self._lent.get(request.peer.name)
            self._lent[request.peer.name] = Lent(message.number, memory, block)
        if before is not None:
            self._blocks.let_go(before.block)
        request.reply(Done())

    def find(self, peer: Peer, number: int) -> Lent:
        with self._lock:
            known = self._lent.get(peer.name)
        if known is None or known.number != number:
            raise ProtocolError(f"{peer} names memory {number}, which it has not shared")
        return known

    def region(self, peer: Peer, message: Seed, part: Slice) -> Region:
        """The memory for this slice's updates."""
        assert message.lent is not None
        memory = self.find(peer, message.lent).memory
        view = memory.array[message.offset : message.offset + part.num_bytes]
        if view.nbytes != part.num_bytes or message.offset < 0:
            raise ProtocolError(f"{peer} names a place outside of the memory that it has shared")
        return Region(view, part.dtype, memory)

    def forget_but(self, there: Container[str]) -> None:
        with self._lock:
            gone = [self._lent.pop(name) for name in list(self._lent) if name not in there]
        for lent in gone:
            self._blocks.let_go(lent.block)


#: Updates up to this size are applied by the thread that reads them.
MOST_BYTES_AT_ONCE = 1 << 16


class Backups:
    """All copies of other servers' slices here."""

    def __init__(
        self,
        blocks: Blocks,
        pool: Pool,
        storage: SliceStorage,
        *,
        find: Callable[[int], tuple[Segment, Slice]],
        check_sender: Callable[[Peer, int], None],
    ) -> None:
        self._blocks, self._pool, self._storage = blocks, pool, storage
        self._find, self._check_sender = find, check_sender
        self._learn: Callable[[RoundMembership], None] | None = None
        self._ring: RingRounds | None = None
        self.backups: dict[int, Backup] = {}
        # Slices promoted here, kept until their old primaries have installed the generation. An old primary whose
        # hold has expired may go on, and its updates must arrive here.
        self._promoted: dict[int, Backup] = {}
        self.shared_regions, self.sums = SharedRegions(blocks), SumDecoder(find)
        self._num_thaws = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    # -- what comes from primaries ------------------------------------------------------------------------

    def form(self, learn: Callable[[RoundMembership], None]) -> None:
        """The job is formed. `learn` receives the round memberships that primaries send with spare workers."""
        self._learn = learn

    def enter_ring(self, ring: RingRounds) -> None:
        """Updates are held until the servers of this ring have voted."""
        self._ring = ring

    def buffers_for(self, peer: Peer, message: Seed | Replicate) -> Sequence[Buffer]:
        """Receive buffers for an update. Bytes from a server that is not the primary are discarded."""
        _, part = self._find(message.slice)
        if isinstance(message, Seed):
            for entry in message.entries:
                check_entry(entry, part)
            sizes = [part.num_bytes, *(entry.num_bytes for entry in message.entries)]
            return [buffer_of(np.empty(size, np.uint8)) for size in sizes]
        sizes = self._piece_sizes(message)
        if message.codec:
            return self.sums.room(message)
        with self._lock:
            backup = self.backups.get(message.slice)
            is_free = backup is not None and not backup.is_busy and backup.held is None
            is_free = is_free and (self._ring is None or is_of(message, self._ring.generation))
            if backup is not None and backup.slot is not None and is_free and backup.primary == peer.name:
                backup.landed = backup.slot.rules.bytes_of_pieces(own_region(backup, backup.slot).array, message.has)
                return backup.landed
        return [buffer_of(np.empty(size, np.uint8)) for size in sizes]

    def _piece_sizes(self, message: Replicate) -> list[int]:
        segment, part = self._find(message.slice)
        pieces = segment.pieces(part)
        if any(not 0 <= index < len(pieces) for index in message.has):
            raise ProtocolError(f"an update of pieces {message.has} of slice {part.id}")
        item = ITEM_BYTES[part.dtype]
        return [pieces[index].num_items * item for index in message.has]

    def handle(self, request: Request, message: Seed | Replicate) -> None:
        _, part = self._find(message.slice)
        if faults.armed is not None:
            faults.reach("seed.got" if isinstance(message, Seed) else "replicate.got")
        with self._lock:  # fencing either refuses this request or waits for it
            self._check_sender(request.peer, message.slice)
            backup = self.backups.get(message.slice) or self._promoted.get(message.slice)
            if backup is None:
                if isinstance(message, Replicate):
                    raise ProtocolError(f"there is no backup of slice {message.slice} here")
                backup = self.backups[message.slice] = Backup(None, request.peer.name)
            has_it = is_held(backup, message)
            if not has_it:
                backup.queue.append(request)
            starts = not (has_it or backup.is_busy) and self._goes_on(backup)
            backup.is_busy |= starts
        if has_it:
            request.reply(Replicated(message.version))  # repeated: the reply was lost
        elif starts:
            self._start(backup, request, message, part)

    def _start(self, backup: Backup, request: Request, message: Seed | Replicate, part: Slice) -> None:
        is_held = isinstance(message, Replicate) and message.ballot is not None and not request.payload
        if is_held or (isinstance(message, Replicate) and part.num_bytes <= MOST_BYTES_AT_ONCE):
            self._work_off(backup)
        else:
            self._pool.submit(functools.partial(self._work_off, backup))

    @staticmethod
    def _goes_on(backup: Backup) -> bool:
        """Under the lock: whether the next in the queue may be processed now."""
        if not backup.queue or backup.held is None:
            return bool(backup.queue)
        first = backup.queue[0]
        return isinstance(first, Request) and goes_before(backup.held[0], first.message)

    def _work_off(self, backup: Backup) -> None:
        while True:
            with self._lock:
                if not self._goes_on(backup):
                    backup.is_busy = False
                    self._idle.notify_all()
                    return
                request, num_thaws = backup.queue.popleft(), self._num_thaws
            if not isinstance(request, Request):
                request()
                continue
            try:
                message = request.message
                if backup.is_out:
                    raise FencedError(f"{request.peer} is not the primary of this slice any more")
                if isinstance(message, Seed):
                    self.take_seed(backup, request, message)
                    continue
                assert isinstance(message, Replicate)
                if message.ballot is None or self._ring is None:
                    self.take_update(backup, request, message)
                elif not self.hold(backup, request, message, message.ballot, self._ring):
                    with self._lock:
                        backup.queue.appendleft(request)
                        backup.is_busy = num_thaws != self._num_thaws
                        self._idle.notify_all()
                        if not backup.is_busy:
                            return
            except FrameError as error:
                request.endpoint.close(f"refused what {request.peer} sent: {error}")
            except SynclineError as error:
                request.refuse(error)
            except Exception as error:  # callers must get an error, whatever it is
                request.refuse(SynclineError(f"{type(error).__name__}: {error}"))

    def take_seed(self, backup: Backup, request: Request, message: Seed) -> None:
        values, *states = request.payload or (memoryview(b""),)
        slot = backup.slot
        if slot is not None and backup.primary == request.peer.name and message.version < slot.state.version:
            raise ProtocolError(f"a seed of version {message.version} for a backup that is at {slot.state.version}")
        if slot is None:
            self._check_sender(request.peer, message.slice)  # the slice may have been hosted again meanwhile
            slot = self._make_slot(request.peer, message)
        loaded = [
            (entry, numbers_in(np.frombuffer(buffer, np.uint8), entry.dtype).reshape(entry.shape))
            for entry, buffer in zip(message.entries, states, strict=True)
        ]
        with slot.lock, self._storage.at_work():
            slot.rules.about_to_change()
            slot.state.writing = True
            buffer_of(slot.memory)[:] = values
            slot.rules.uploaded()
            slot.rules.load_state(loaded, with_held=True)
            slot.state.take_over(message.version, message.clocks, message.fences, message.acks, message.late)
            slot.uploaded, slot.state.writing = True, False
        backup.slot, backup.primary = slot, request.peer.name
        if message.lent is not None:
            backup.region = self.shared_regions.region(request.peer, message, slot.part)
        request.reply(Replicated(message.version))

    def _make_slot(self, peer: Peer, message: Seed) -> HostedSlice:
        segment, part = self._find(message.slice)
        if message.lent is not None:
            block = self.shared_regions.find(peer, message.lent).block
            view = self._blocks.take(block, part, message.offset)
        else:
            block = self._blocks.make(part.num_bytes)
            view = self._blocks.take(block, part, 0)
            self._blocks.let_go(block)  # only the slice keeps the block now
        return HostedSlice(segment, part, view, self._storage)

    def take_update(self, backup: Backup, request: Request, message: Replicate) -> None:
        slot = slot_of(backup, message)
        if message.round_membership is not None and self._learn is not None:
            self._learn(message.round_membership)
        with slot.lock:
            if not self._is_in(slot, message):
                self._apply(slot, message, self._next(backup, slot, request, message))
            digest = digest_of(slot) if message.wants_digest else b""
            version = slot.state.version
        request.reply(Replicated(version, digest))

    def _next(self, backup: Backup, slot: HostedSlice, request: Request, message: Replicate) -> Region | None:
        """The memory with the gradient of the next update, if any. Updates out of order are refused."""
        if slot.state.version != message.version:
            at, said = slot.state.version, message.version
            raise ProtocolError(f"an update of version {said} for a backup that is at {at}")
        return self._gradient(backup, slot, request, message) if message.has else None

    @staticmethod
    def _is_in(slot: HostedSlice, message: Replicate) -> bool:
        """Whether the update was applied before, and only its reply was lost."""
        clocks = slot.state.clocks
        if message.gather and not message.clocks:  # a flush
            return slot.state.version == message.version + 1 and not slot.rules.num_gathered
        return bool(message.clocks) and all(clocks.get((n, i), 0) >= clock for n, i, clock in message.clocks)

    def _apply(self, slot: HostedSlice, message: Replicate, region: Region | None) -> None:
        clocks = [((name, incarnation), clock) for name, incarnation, clock in message.clocks]
        with self._storage.at_work():
            gradients = slot.rules.as_pieces(region.flat, message.has) if region is not None else []
            try:
                how = HowApplied(dict(message.overrides), message.scale, message.counts, message.gather)
                slot.apply_update(gradients, how, clocks, message.acks, message.late, message.fences)
            except Exception as error:
                raise RuleError(f"the backup could not apply it: {type(error).__name__}: {error}") from None

    def _gradient(self, backup: Backup, slot: HostedSlice, request: Request, message: Replicate) -> Region:
        if message.codec:
            own = own_region(backup, slot)
            self.sums.decode(message, request.payload, own.array)
            return own
        if not request.payload:
            if backup.region is None:
                raise ProtocolError(f"an update of slice {message.slice} without its bytes")
            return backup.region
        own = own_region(backup, slot)
        if request.payload is not backup.landed:
            views = slot.rules.bytes_of_pieces(own.array, message.has)
            for view, given in zip(views, request.payload, strict=True):
                view[:] = given
        return own

    # -- in a ring: held until all have voted --------------------------------------------------------------

    def queue_up(self, number: int, action: Callable[[], None]) -> None:
        """Queues this server's own sum for the slice."""
        with self._lock:
            backup = self.backups.get(number)
            if backup is None:
                return  # replica sets have changed
            starts = not (backup.is_busy or backup.held)
            backup.queue.append(action)
            backup.is_busy |= starts
        if starts:
            small = self._find(number)[1].num_bytes <= MOST_BYTES_AT_ONCE
            self._work_off(backup) if small else self._pool.submit(functools.partial(self._work_off, backup))

    def hold(self, backup: Backup, request: Request, message: Replicate, ballot: Ballot, voting: RingRounds) -> bool:
        """Returns whether the update is held; False defers it until the reconfiguration is over."""
        slot = slot_of(backup, message)
        with slot.lock:
            is_in = self._is_in(slot, message)
            region = None if is_in else self._next(backup, slot, request, message)
        if not is_in:

            def take() -> None:
                backup.held = (message, region)

            found = voting.holds(ballot, take)
            if found == "over":
                raise FencedError(f"slice {message.slice}: replica sets have changed since that round")
            if found == "later":
                return False
        if faults.armed is not None:
            faults.reach("replicate.held")
        request.reply(Replicated(message.version))
        return True

    def held_for(self, ballot: Ballot) -> list[int]:
        """The slices here that hold an update of this round."""
        return [n for n, b in list(self.backups.items()) if b.held is not None and b.held[0].ballot == ballot]

    def numbers(self) -> set[int]:
        """The slices that have copies here."""
        return {number for number, backup in list(self.backups.items()) if backup.slot is not None}

    def sizes(self, numbers: Collection[int]) -> list[int]:
        return [self._find(number)[1].num_bytes for number in numbers]

    def apply_held(self, number: int, work: SliceTask) -> None:
        """Applies the held update: all servers have voted."""
        backup = self.backups[number]
        assert backup.held is not None and backup.slot is not None
        with backup.slot.lock:
            with contextlib.suppress(RuleError):  # the primary raises and reports it too
                self._apply(backup.slot, *backup.held)
            for answer in work.answers():  # the worker of this process reads it here
                answer.applied(backup.slot, locked=True)
        self._let_go(backup)
        work.slice_done()

    def _let_go(self, backup: Backup) -> None:
        with self._lock:
            backup.held = None
            starts = bool(backup.queue) and not backup.is_busy
            backup.is_busy |= starts
            self._idle.notify_all()
        if starts:
            self._pool.submit(functools.partial(self._work_off, backup))

    def go_on(self) -> None:
        """Processes the updates that were deferred by a reconfiguration."""
        with self._lock:
            self._num_thaws += 1
            waiting = [backup for backup in self.backups.values() if backup.held is None]
        for backup in waiting:
            self._let_go(backup)

    def drop_held(self) -> None:
        """Replica sets have changed: drops unapplied updates, which will be replayed."""
        refused: list[Request] = []
        with self._lock:
            for backup in self.backups.values():
                backup.held = None
                requests = [request for request in backup.queue if isinstance(request, Request)]
                refused += [request for request in requests if isinstance(request.message, Replicate)]
                backup.queue = collections.deque(r for r in requests if not isinstance(r.message, Replicate))
        for request in refused:
            request.refuse(FencedError("replica sets have changed since that round"))

    def reset(self) -> None:
        """Starts a new generation of votes. Updates still being received go into memory that is no longer read."""
        with self._lock:
            for backup in self.backups.values():
                backup.own = backup.landed = None

    # -- replica sets --------------------------------------------------------------------------------------------

    def wait_idle(self, goes_on: Callable[[], bool]) -> None:
        """Waits until all received updates are applied."""
        with self._idle:
            while goes_on() and any(b.is_busy for b in [*self.backups.values(), *self._promoted.values()]):
                self._idle.wait(0.05)

    def promote(self, number: int) -> HostedSlice | None:
        """Makes this copy the primary, if it is complete."""
        with self._lock:
            backup = self.backups.pop(number, None)
            if backup is None or backup.slot is None:
                return None
            self._promoted[number] = backup
            return backup.slot

    def was_of(self, number: int, primary: str) -> bool:
        """Whether the slice was promoted here while `primary` may not know it yet."""
        backup = self._promoted.get(number)
        return backup is not None and backup.primary == primary

    def are_all_told(self) -> None:
        """All servers have installed the generation: no more updates come from former primaries."""
        with self._lock:
            gone, self._promoted = self._promoted, {}
            for backup in gone.values():
                backup.is_out = True

    def take_out(self, number: int) -> HostedSlice | None:
        """Removes a backup. Returns the slice if it is complete."""
        with self._lock:
            self._promoted.pop(number, None)
            backup = self.backups.pop(number, None)
            if backup is not None:
                backup.is_out = True
        return backup.slot if backup is not None else None

    def put_in(self, slot: HostedSlice, primary: str) -> None:
        """Adds a slice as a backup of `primary`."""
        with self._lock:
            backup = self.backups[slot.part.id] = Backup(slot, primary)
            backup.is_named = True

    def slot_of(self, number: int) -> HostedSlice | None:
        backup = self.backups.get(number)
        return backup.slot if backup is not None else None

    def slots(self) -> Collection[HostedSlice]:
        return [backup.slot for backup in list(self.backups.values()) if backup.slot is not None]
