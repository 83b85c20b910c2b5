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
from syncline.core.layout import Segment, Slice
from syncline.core.ring import Ballot
from syncline.core.rounds import RoundMembership
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import Replicate, Replicated, Seed, ShareRegion
from syncline.errors import FencedError, FrameError, ProtocolError, RuleError, SynclineError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Memory, Peer, buffer_of
from syncline.server.encoded_sums import SumDecoder
from syncline.server.pool import Pool
from syncline.server.replicate import Region, digest_of
from syncline.server.rules import tensor_of
from syncline.server.slices import HostedSlice
from syncline.server.state_transfer import check_entry
from syncline.server.storage import Blocks, SliceStorage
from syncline.server.tasks import RingRounds, SliceTask


class Backup:
    """One slice's copy: what waits to be taken in, one after the other."""

    def __init__(self, slot: HostedSlice | None, primary: str) -> None:
        self.slot, self.primary = slot, primary
        self.region: Region | None = None  # lent by the primary
        self.own: Region | None = None  # where what is not lent is put
        self.landed: Sequence[Buffer] | None = None  # what a socket has put there
        self.held: tuple[Replicate, Region | None] | None = None  # in a ring: until all have voted for it
        self.queue: collections.deque[Request | Callable[[], None]] = collections.deque()  # or this server's own sums
        self.is_busy = False
        self.is_named = False  # by the replica sets
        self.is_out = False  # it is no backup any more


def slot_of(backup: Backup, message: Replicate) -> HostedSlice:
    if backup.slot is None:
        raise ProtocolError(f"the seed of slice {message.slice} did not come")
    return backup.slot


def is_held(backup: Backup, message: Seed | Replicate) -> bool:
    if backup.held is None or not isinstance(message, Replicate) or message.ballot is None:
        return False
    return backup.held[0].ballot == message.ballot


def is_of(message: Replicate, generation: int) -> bool:
    """In a ring: what is late, from before a change, may come while the sum of a round after it is made."""
    return message.ballot is None or message.ballot.generation == generation


def own_region(backup: Backup, slot: HostedSlice) -> Region:
    if backup.own is None:
        backup.own = Region(np.zeros(slot.part.num_bytes, np.uint8), slot.part.dtype)
    return backup.own


class Lent(NamedTuple):
    """One primary's memory, by its number, and the block of ours for the slices that it will seed."""

    number: int
    memory: Memory
    block: int


class SharedRegions:
    """By primary."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._lent: dict[str, Lent] = {}
        self._lock = threading.Lock()

    def lend(self, request: Request, message: ShareRegion) -> None:
        """The primary's memory, and as much of ours for the slices that are to come."""
        memory = request.attachment
        if memory is None or memory.array.nbytes < message.num_bytes:
            raise ProtocolError(f"{request.peer} lends memory that did not come")
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
            raise ProtocolError(f"{peer} names memory {number}, which it has not lent")
        return known

    def region(self, peer: Peer, message: Seed, part: Slice) -> Region:
        """Where this slice's updates will lie."""
        assert message.lent is not None
        memory = self.find(peer, message.lent).memory
        view = memory.array[message.offset : message.offset + part.num_bytes]
        if view.nbytes != part.num_bytes or message.offset < 0:
            raise ProtocolError(f"{peer} names a place outside of what it has lent")
        return Region(view, part.dtype, memory)

    def forget_but(self, there: Container[str]) -> None:
        with self._lock:
            gone = [self._lent.pop(name) for name in list(self._lent) if name not in there]
        for lent in gone:
            self._blocks.let_go(lent.block)


#: An update of at most this many bytes is taken in by the thread that reads it.
INLINE_BYTES = 1 << 16


class Backups:
    """All copies of other servers' slices here."""

    def __init__(
        self,
        blocks: Blocks,
        pool: Pool,
        home: SliceStorage,
        *,
        find: Callable[[int], tuple[Segment, Slice]],
        check_sender: Callable[[Peer, int], None],
    ) -> None:
        self._blocks, self._pool, self._home = blocks, pool, home
        self._find, self._check_sender = find, check_sender
        self._learn: Callable[[RoundMembership], None] | None = None
        self._ring: RingRounds | None = None
        self.backups: dict[int, Backup] = {}
        # Slices that are this server's own now, until their old primaries have certainly heard of it: one whose hold
        # has ended by itself goes on, and what it takes in has to be here.
        self._promoted: dict[int, Backup] = {}
        self.lenders, self.sums = SharedRegions(blocks), SumDecoder(find)
        self._num_thaws = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    # -- what comes from primaries ------------------------------------------------------------------------

    def form(self, learn: Callable[[RoundMembership], None]) -> None:
        """The job is complete. `learn` hears what primaries say of rounds with spare workers."""
        self._learn = learn

    def enter_ring(self, ring: RingRounds) -> None:
        """Updates are held until the servers of this ring have voted."""
        self._ring = ring

    def landing(self, peer: Peer, message: Seed | Replicate) -> Sequence[Buffer]:
        """Bytes from whoever is not the primary are taken in all the same, and go nowhere."""
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
        item = tensor_of(np.empty(64, np.uint8), part.dtype).element_size()
        return [pieces[index].num_items * item for index in message.has]

    def handle(self, request: Request, message: Seed | Replicate) -> None:
        _, part = self._find(message.slice)
        if faults.armed is not None:
            faults.reach("seed.got" if isinstance(message, Seed) else "replicate.got")
        with self._lock:  # who is fenced meanwhile has been refused here, or is waited for
            self._check_sender(request.peer, message.slice)
            backup = self.backups.get(message.slice) or self._promoted.get(message.slice)
            if backup is None:
                if isinstance(message, Replicate):
                    raise ProtocolError(f"there is no backup of slice {message.slice} here")
                backup = self.backups[message.slice] = Backup(None, request.peer.name)
            has_it = is_held(backup, message)
            starts = not (has_it or backup.is_busy or backup.held)
            if not has_it:
                backup.queue.append(request)
            backup.is_busy |= starts
        if has_it:
            request.reply(Replicated(message.version))  # said again: the answer was lost
        elif starts:
            self._start(backup, request, message, part)

    def _start(self, backup: Backup, request: Request, message: Seed | Replicate, part: Slice) -> None:
        is_held = isinstance(message, Replicate) and message.ballot is not None and not request.payload
        if is_held or (isinstance(message, Replicate) and part.num_bytes <= INLINE_BYTES):
            self._work_off(backup)
        else:
            self._pool.submit(functools.partial(self._work_off, backup))

    def _work_off(self, backup: Backup) -> None:
        while True:
            with self._lock:
                if not backup.queue or backup.held is not None:
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
            except Exception as error:  # whoever waits must hear of it, whatever it is
                request.refuse(SynclineError(f"{type(error).__name__}: {error}"))

    def take_seed(self, backup: Backup, request: Request, message: Seed) -> None:
        values, *states = request.payload or (memoryview(b""),)
        slot = backup.slot
        if slot is not None and backup.primary == request.peer.name and message.version < slot.state.version:
            raise ProtocolError(f"a seed of version {message.version} for a backup that is at {slot.state.version}")
        if slot is None:
            self._check_sender(request.peer, message.slice)  # it may have waited while the slice was hosted again
            slot = self._make_slot(request.peer, message)
        loaded = [
            (entry, tensor_of(np.frombuffer(buffer, np.uint8), entry.dtype).reshape(entry.shape))
            for entry, buffer in zip(message.entries, states, strict=True)
        ]
        with slot.lock, self._home.at_work():
            slot.rules.about_to_change()
            slot.state.writing = True
            buffer_of(slot.memory)[:] = values
            slot.rules.uploaded()
            slot.rules.load_state(loaded)
            slot.state.take_over(message.version, message.clocks, message.fences, message.uses, message.late)
            slot.uploaded, slot.state.writing = True, False
        backup.slot, backup.primary = slot, request.peer.name
        if message.lent is not None:
            backup.region = self.lenders.region(request.peer, message, slot.part)
        request.reply(Replicated(message.version))

    def _make_slot(self, peer: Peer, message: Seed) -> HostedSlice:
        segment, part = self._find(message.slice)
        if message.lent is not None:
            block = self.lenders.find(peer, message.lent).block
            view = self._blocks.take(block, part, message.offset)
        else:
            block = self._blocks.make(part.num_bytes)
            view = self._blocks.take(block, part, 0)
            self._blocks.let_go(block)  # the slice alone keeps it
        return HostedSlice(segment, part, view, self._home)

    def take_update(self, backup: Backup, request: Request, message: Replicate) -> None:
        slot = slot_of(backup, message)
        if message.roll is not None and self._learn is not None:
            self._learn(message.roll)
        with slot.lock:
            if not self._is_in(slot, message):
                self._apply(slot, message, self._next(backup, slot, request, message))
            digest = digest_of(slot) if message.wants_digest else b""
            version = slot.state.version
        request.reply(Replicated(version, digest))

    def _next(self, backup: Backup, slot: HostedSlice, request: Request, message: Replicate) -> Region | None:
        """Where the gradient of the next update lies, if it has one; any other update is refused."""
        if slot.state.version != message.version:
            at, said = slot.state.version, message.version
            raise ProtocolError(f"an update of version {said} for a backup that is at {at}")
        return self._gradient(backup, slot, request, message) if message.has else None

    @staticmethod
    def _is_in(slot: HostedSlice, message: Replicate) -> bool:
        """Whether this update came before: its answer was lost."""
        clocks = slot.state.clocks
        return bool(message.clocks) and all(clocks.get((n, i), 0) >= clock for n, i, clock in message.clocks)

    def _apply(self, slot: HostedSlice, message: Replicate, region: Region | None) -> None:
        clocks = [((name, incarnation), clock) for name, incarnation, clock in message.clocks]
        with self._home.at_work():
            gradients = slot.rules.as_pieces(region.flat, message.has) if region is not None else []
            try:
                slot.apply_update(
                    gradients, dict(message.overrides), message.scale, clocks, message.uses, message.late,
                    message.fences,
                )  # fmt: skip
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
        """This server's own sum for this slice is made, behind whatever has come for it."""
        with self._lock:
            backup = self.backups.get(number)
            if backup is None:
                return  # replica sets have changed
            starts = not (backup.is_busy or backup.held)
            backup.queue.append(action)
            backup.is_busy |= starts
        if starts:
            small = self._find(number)[1].num_bytes <= INLINE_BYTES
            self._work_off(backup) if small else self._pool.submit(functools.partial(self._work_off, backup))

    def hold(self, backup: Backup, request: Request, message: Replicate, ballot: Ballot, voting: RingRounds) -> bool:
        """Whether it is taken in; else it waits until a change is over."""
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
        """The slices of which there are copies here."""
        return {number for number, backup in list(self.backups.items()) if backup.slot is not None}

    def sizes(self, numbers: Collection[int]) -> list[int]:
        return [self._find(number)[1].num_bytes for number in numbers]

    def apply_held(self, number: int, work: SliceTask) -> None:
        """All have voted for what this slice holds."""
        backup = self.backups[number]
        assert backup.held is not None and backup.slot is not None
        with backup.slot.lock:
            with contextlib.suppress(RuleError):  # it raises at its primary too, who says so
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
        """What waited for a change is looked at again."""
        with self._lock:
            self._num_thaws += 1
            waiting = [backup for backup in self.backups.values() if backup.held is None]
        for backup in waiting:
            self._let_go(backup)

    def drop_held(self) -> None:
        """Seats have changed: whatever is not applied is made again."""
        refused: list[Request] = []
        with self._lock:
            for backup in self.backups.values():
                backup.held = None
                requests = [request for request in backup.queue if isinstance(request, Request)]
                refused += [request for request in requests if isinstance(request.message, Replicate)]
                backup.queue = collections.deque(r for r in requests if not isinstance(r.message, Replicate))
        for request in refused:
            request.refuse(FencedError("seats have changed since that round"))

    def begin_anew(self) -> None:
        """Votes are of another generation from now on. What is still being read belongs to those before: it goes on
        into memory that nobody looks at any more."""
        with self._lock:
            for backup in self.backups.values():
                backup.own = backup.landed = None

    # -- replica sets --------------------------------------------------------------------------------------------

    def wait_idle(self, goes_on: Callable[[], bool]) -> None:
        """Until everything that has come is taken in."""
        with self._idle:
            while goes_on() and any(b.is_busy for b in [*self.backups.values(), *self._promoted.values()]):
                self._idle.wait(0.05)

    def promote(self, number: int) -> HostedSlice | None:
        """This copy is the slice itself from now on, if there is a whole one."""
        with self._lock:
            backup = self.backups.pop(number, None)
            if backup is None or backup.slot is None:
                return None
            self._promoted[number] = backup
            return backup.slot

    def was_of(self, number: int, primary: str) -> bool:
        """Whether it was promoted here, and this server may still be its primary for all that it knows."""
        backup = self._promoted.get(number)
        return backup is not None and backup.primary == primary

    def are_all_told(self) -> None:
        """Every server has the generation: no update comes any more from who was a primary before."""
        with self._lock:
            gone, self._promoted = self._promoted, {}
            for backup in gone.values():
                backup.is_out = True

    def take_out(self, number: int) -> HostedSlice | None:
        """This copy is no backup any more; the slice, if there is a whole one."""
        with self._lock:
            self._promoted.pop(number, None)
            backup = self.backups.pop(number, None)
            if backup is not None:
                backup.is_out = True
        return backup.slot if backup is not None else None

    def put_in(self, slot: HostedSlice, primary: str) -> None:
        """A slice whose primary is elsewhere from now on."""
        with self._lock:
            backup = self.backups[slot.part.id] = Backup(slot, primary)
            backup.is_named = True

    def slot_of(self, number: int) -> HostedSlice | None:
        backup = self.backups.get(number)
        return backup.slot if backup is not None else None

    def slots(self) -> Collection[HostedSlice]:
        return [backup.slot for backup in list(self.backups.values()) if backup.slot is not None]
