"""Pulls at a server: answers with parameters, read pins, and pulls that wait for a version."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np

from syncline.core.codecs.pieces import SliceCoder
from syncline.core.rounds import RoundMembership
from syncline.core.slice_state import Identity, VersionTable
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import (
    CommitStaged,
    Committed,
    GiveClip,
    Pin,
    Pull,
    Pulled,
    Stage,
    Unpin,
    Verified,
    Verify,
)
from syncline.errors import ConnectionLost, ProtocolError, Refresh, SynclineError
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, buffer_of
from syncline.server.backups import Backups
from syncline.server.pool import Pool
from syncline.server.replies import MakeBuffer, Outgoing, PartialAnswer
from syncline.server.slices import HostedSlice
from syncline.server.storage import DeviceArena
from syncline.server.tasks import StagedCommit


class Pulls:
    """Everything that reads parameters. Separate threads send bytes, so that a slow reader blocks no one else."""

    def __init__(
        self,
        slices: dict[int, HostedSlice],
        pool: Pool,
        senders: ThreadPoolExecutor,
        most_bytes: int | None = None,
        *,
        moved: Callable[[int], SynclineError | None] = lambda number: None,
        device_arenas: Callable[[Identity, int], Mapping[int, DeviceArena]] = lambda worker, slot: {},
    ) -> None:
        """`moved` explains why an existing slice is not here. `device_arenas`: of a worker and a slot, by segment."""
        self._device_arenas = device_arenas
        self._slices, self._pool, self._senders = slices, pool, senders
        self._by_id: tuple[HostedSlice, ...] = ()
        self._versions = VersionTable(threading.Lock())  # of these
        self._hosted = (0, 0)  # number and bytes of slices when last counted
        self.outgoing = Outgoing(self._hosted_bytes, most_bytes)
        self._lock = threading.Lock()
        self._waiting: list[tuple[Request, Pull]] = []
        self.state_lock: AbstractContextManager[object] = threading.RLock()  # prevents pins between two generations
        # raises Refresh if the caller's replica sets are outdated
        self._check: Callable[[Request], None] = lambda request: None
        self._pinned: dict[Endpoint, list[int]] = {}
        self._moved = moved
        # in a ring: copies of other servers' slices, read by the worker of this process
        self.backups: Backups | None = None
        # upper bound of the clocks in anything read before this call
        self._clocks: Callable[[], dict[str, int]] = dict
        self.bytes_copied = 0
        self.num_pins = 0
        self.coder: SliceCoder | None = None  # with --pull-codec: for replies to commits; pulls are exact
        self._was_reset = False  # primaries have changed, which ended every pin

    def form(
        self,
        state_lock: AbstractContextManager[object],
        *,
        check: Callable[[Request], None],
        clocks: Callable[[], dict[str, int]],
    ) -> None:
        """The job is formed. `check` raises Refresh for a request with outdated replica sets."""
        self.state_lock, self._check, self._clocks = state_lock, check, clocks

    def _slot(self, number: int) -> HostedSlice:
        slot = self._slices.get(number)
        if slot is None and self.backups is not None:
            slot = self.backups.slot_of(number)
        if slot is None:
            raise self._not_here(number)
        return slot

    def readable(self) -> list[HostedSlice]:
        """All slices that can be read here."""
        return [*list(self._slices.values()), *(self.backups.slots() if self.backups is not None else ())]

    def numbers(self) -> list[int]:
        return sorted(slot.part.id for slot in self.readable())

    def _hosted_bytes(self) -> int:
        number = len(self._slices) + (len(self.backups.backups) if self.backups is not None else 0)
        if self._hosted[0] != number:
            self._hosted = (number, sum(slot.part.num_bytes for slot in self.readable()))
        return self._hosted[1]

    def _not_here(self, number: int) -> SynclineError:
        """A Refresh if the slice has moved; a ProtocolError if it does not exist."""
        return self._moved(number) or ProtocolError(f"slice {number} is not hosted here")

    def hosts_others(self) -> None:
        """The hosted slices have changed."""
        before, self._by_id = self._by_id, tuple(self._slices[number] for number in sorted(self._slices))
        self._versions = VersionTable(threading.Lock(), [slot.state for slot in self._by_id])
        for slot in set(before).difference(self._by_id):
            slot.state.report_to(None)

    def committed(
        self, request: Request, clock: int, item: StagedCommit, round_membership: RoundMembership | None
    ) -> None:
        """Replies with versions only: the worker reads shared memory, or takes no parameters (`reads`)."""
        worker, message = request.peer.name, request.message
        reads = not isinstance(message, Stage | CommitStaged | GiveClip) or message.reads
        landed = self.land(request, item.slot, reads=reads)
        if not reads:
            versions = self._versions.newest()
        elif landed or (self._by_id and self._by_id[0].storage.is_lazy):  # all have the same one
            versions = self._mapped_versions(landed)
            for slot, version in zip(self._by_id, versions, strict=True):
                slot.state.seen[worker] = version
        else:
            versions = self._versions.read_by(worker)
        request.reply(Committed(clock, versions, [], item.clocks, item.is_late, round_membership, item.is_skipped))

    def _mapped_versions(self, landed: Mapping[int, int]) -> list[int]:
        """What a worker finds in mapped memory that may be older; `landed`: in its arenas on the GPU."""
        found = ((slot, landed.get(slot.part.id)) for slot in self._by_id)
        return [slot.mapped_version() if version is None else version for slot, version in found]

    def land(self, request: Request, number: int, *, reads: bool) -> dict[int, int]:
        """Copies parameters to the arenas that this worker has on the GPU, if it `reads`; their versions by slice.
        `number`: of the arenas' slot. What it pushed there has been read when the reply is there.
        """
        versions: dict[int, int] = {}
        arenas = self._device_arenas((request.peer.name, request.peer.incarnation), number)
        for slot in self._by_id if arenas and reads else ():
            if (arena := arenas.get(slot.part.segment)) is not None:
                versions[slot.part.id] = slot.land(arena)
        for arena in arenas.values():
            arena.answer()
        return versions

    def answer_in_parts(
        self, request: Request, clock: int, pull: list[int], make: MakeBuffer | None
    ) -> PartialAnswer:
        """Creates a reply to a commit that goes out slice by slice."""
        for number in pull:
            self._slot(number)
        submit = functools.partial(self._send, request)
        hold = functools.partial(self.outgoing.hold, request.endpoint)
        return PartialAnswer(
            request, clock, pull, make, submit=submit, copied=self._copied, hold=hold, coder=self.coder
        )

    def _copied(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_copied += num_bytes

    def _send(self, request: Request, send: Callable[[], None]) -> None:
        """Sends bytes from another thread. Errors go to the caller."""

        def attempt() -> None:
            try:
                send()
            except Exception as error:
                request.refuse(error)

        try:
            self._senders.submit(attempt)
        except RuntimeError:  # the server is closing
            request.refuse(ConnectionLost("the server is closing"))

    def verify(self, request: Request, message: Verify) -> None:
        """Reports which slices were written while the worker copied them from shared memory."""
        stale, versions, counts = [], [], []
        for number, version in zip(message.slices, message.versions, strict=True):
            slot = self._slot(number)
            state = slot.state
            if message.counted:
                counts.append(state.num_commits)  # before the look at the version: a later round makes that stale
            if not state.is_still(version):
                stale.append(number)
                versions.append(slot.shown())
            state.seen[request.peer.name] = state.version
        request.reply(Verified(stale, versions, self._clocks(), counts))

    # -- pulls by themselves ------------------------------------------------------------------------------

    def pull(self, request: Request, message: Pull) -> None:
        """Replies with parameters, now or once they are new enough."""
        if message.rows is not None:
            raise ProtocolError(f"{request.peer} pulls rows; that is not supported yet")
        for number in message.slices:
            self._slot(number)
        with self._lock:
            if not self._is_new_enough(message):
                self._waiting.append((request, message))
                return
        self._answer(request, message)

    def _is_new_enough(self, message: Pull) -> bool:
        least = message.min_version
        return least is None or all(self._slot(n).state.version >= least for n in message.slices)

    def _may_go(self, message: Pull) -> bool:
        """Whether the pull can be answered. True also if its slices have moved: the answer is then a refusal."""
        try:
            return self._is_new_enough(message)
        except SynclineError:
            return True

    def advanced(self) -> None:
        """A round is applied: answers the pulls that waited for it."""
        if not self._waiting:
            return
        with self._lock:
            ready = [item for item in self._waiting if self._may_go(item[1])]
            self._waiting = [item for item in self._waiting if item not in ready]
        for request, message in ready:
            try:
                self._answer(request, message)
            except SynclineError as error:
                request.refuse(error)

    def reset(self) -> list[Request]:
        """Under `state_lock`: primaries have changed. Ends all pins and returns the waiting pulls."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        self._pinned.clear()
        self._was_reset = True
        for slot in self._slices.values():
            with slot.lock:
                slot.state.pins = 0
        return [request for request, _ in waiting]

    def refuse(self, waiting: Iterable[Request], error: Refresh) -> None:
        """Refuses the waiting pulls and lets pinned slices go on. Call it after `reset`."""
        for request in waiting:
            request.refuse(error)
        self._drain_all(list(self._slices))

    def _answer(self, request: Request, message: Pull) -> None:
        if message.bytes_wanted:
            num_bytes = sum(self._slot(number).part.num_bytes for number in message.slices)
            send = functools.partial(self._send_pulled, request, message, num_bytes)
            self.outgoing.pull(request.endpoint, num_bytes, functools.partial(self._send, request, send))
            return
        versions = [self._slot(number).shown() for number in message.slices]
        request.reply(Pulled(versions, self._clocks()))

    def _send_pulled(self, request: Request, message: Pull, num_bytes: int) -> None:
        try:
            self._copy_and_reply(request, message)
        finally:
            self.outgoing.pulled(request.endpoint, num_bytes)

    def _copy_and_reply(self, request: Request, message: Pull) -> None:
        """Sends a consistent copy of each slice, with its version."""
        buffers, versions = list[Buffer](), list[int]()
        for number in message.slices:
            slot = self._slot(number)
            buffers.append(buffer_of(np.empty(slot.part.num_bytes, np.uint8)))
            version = slot.copy_into(buffers[-1])
            self._copied(slot.part.num_bytes)
            slot.state.seen[request.peer.name] = version
            versions.append(version)
        request.reply(Pulled(versions, self._clocks()), buffers, sum(map(len, buffers)))

    # -- read pins ----------------------------------------------------------------------------------------

    def pin(self, request: Request, message: Pin) -> None:
        """Blocks updates until unpinned, for a reader whose optimistic copies were overwritten twice."""
        versions = []
        with self.state_lock:
            self._check(request)
            for number in message.slices:
                slot = self._slices.get(number)
                if slot is None:
                    raise self._not_here(number)
                versions.append(slot.pin())
                slot.state.seen[request.peer.name] = versions[-1]
                self._pinned.setdefault(request.endpoint, []).append(number)
                self.num_pins += 1
        if not request.endpoint.is_open:  # its earlier pins were released with the connection
            self.forget(request.endpoint)
            return
        request.reply(Pulled(versions, self._clocks()))

    def unpin(self, request: Request, message: Unpin) -> None:
        with self.state_lock:
            held = self._pinned.get(request.endpoint, [])
            for number in message.slices:
                if number not in held:
                    if self._was_reset:
                        raise Refresh(f"slice {number} is not pinned any more: primaries have changed")
                    raise ProtocolError(f"{request.peer} lets go of slice {number}, which it has not pinned")
                held.remove(number)
                self._let_go(number)
        self._drain_all(message.slices)
        request.reply(Done())

    def forget(self, endpoint: Endpoint) -> None:
        """A connection ended: releases its pins and drops its waiting pulls."""
        with self.state_lock:
            numbers = self._pinned.pop(endpoint, [])
            for number in numbers:
                self._let_go(number)
        with self._lock:
            self._waiting = [item for item in self._waiting if item[0].endpoint is not endpoint]
        self.outgoing.forget(endpoint)
        self._drain_all(numbers)

    def _let_go(self, number: int) -> None:
        slot = self._slices.get(number)
        if slot is not None:
            slot.unpin()

    def _drain_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            slot = self._slices.get(number)
            if slot is not None:  # else its primary is elsewhere by now
                self._pool.submit(slot.drain)
