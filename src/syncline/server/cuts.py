"""A server's side of cuts: slices as they were at one point between commits, until a follower has read them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from syncline.core.wire.following import EndCut, GivenSlices, MarkCut, MarkedCut, ReadCut
from syncline.core.wire.message import Message
from syncline.errors import ProtocolError, StoreError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, buffer_of
from syncline.server.slices import Bytes, HostedSlice
from syncline.server.snapshot_barrier import SnapshotBarrierService
from syncline.server.tasks import in_thread

#: A cut that is not read for so long is dropped: its follower is gone.
CUT_SECONDS = 30.0
#: Cuts at a time; an older one is dropped.
MOST_CUTS = 4
#: How long to wait for a slice that is being updated.
_LOCK_SECONDS = 0.2
_FRAME_BYTES = 4 << 20


class MarkedSlice:
    """One slice as of the cut. Its bytes stay in the live slice until it changes."""

    def __init__(self, slot: HostedSlice) -> None:
        """Under the slice's lock."""
        if not slot.uploaded:
            raise StoreError(f"slice {slot.part.id} has no values yet")
        self._slot, self.version = slot, slot.state.version
        self._kept: Bytes | None = None
        self._trouble: MemoryError | None = None
        self._is_over = False
        slot.rules.mark(self._keep)

    def _keep(self, waits: bool) -> None:
        """Under the slice's lock, before an update, which goes on whatever happens here."""
        try:
            self._kept = self._copy()
        except MemoryError as error:
            self._trouble = error

    def _copy(self) -> Bytes:
        with self._slot.storage.at_work():
            return np.array(self._slot.memory)

    def take(self) -> Bytes:
        """Its bytes as of the cut; once."""
        with self._slot.lock:
            if self._is_over or self._trouble is not None:
                raise StoreError(f"slice {self._slot.part.id} of this cut is gone: {self._trouble or 'it was read'}")
            kept = self._kept if self._kept is not None else self._copy()
            self._forget()
        return kept

    def let_go(self) -> None:
        with self._slot.lock:
            self._forget()

    def _forget(self) -> None:
        self._is_over, self._kept = True, None
        self._slot.rules.unmark(self._keep)


class MarkedCuts:
    """All cuts here, by number."""

    def __init__(
        self,
        find: Callable[[int], HostedSlice | None],
        primaries: Callable[[], Sequence[HostedSlice]],
        barrier: Callable[[], SnapshotBarrierService],
        *,
        seconds: float = CUT_SECONDS,
    ) -> None:
        """`find`: a slice that is here, as primary or backup. `primaries`: those whose primary is here."""
        self._find, self._primaries, self._barrier, self._seconds = find, primaries, barrier, seconds
        self._lock = threading.Lock()
        self._cuts: dict[int, tuple[dict[int, MarkedSlice], threading.Timer]] = {}

    @property
    def handlers(self) -> dict[type[Message], Callable[[Request, MarkCut | ReadCut | EndCut], None]]:
        return {MarkCut: self._handle, ReadCut: self._handle, EndCut: self._handle}

    def _handle(self, request: Request, message: MarkCut | ReadCut | EndCut) -> None:
        match message:
            case MarkCut():
                in_thread("mark cut", request, lambda: request.reply(self._mark(message)))
            case ReadCut():
                in_thread("read cut", request, lambda: self._read(request, message))
            case EndCut():
                self._end(message.number)

    def _mark(self, message: MarkCut) -> MarkedCut:
        if not message.has_barrier:
            return MarkedCut(self._mark_all(message, math.inf))
        with self._barrier().while_closed(message.number) as until:
            versions = self._mark_all(message, until)
            primaries = [(slot.part.id, slot.state.version) for slot in self._primaries()]
        return MarkedCut(versions, primaries)

    def _mark_all(self, message: MarkCut, until: float) -> list[int]:
        marked: dict[int, MarkedSlice] = {}
        try:
            for number in message.slices:
                slot = self._find(number)
                if slot is None:
                    raise ProtocolError(f"slice {number} is not here")
                left = until - time.monotonic()
                if left < 0:
                    raise StoreError(
                        f"{len(message.slices)} slices were not marked in time; the host may be overloaded"
                    )
                if not slot.lock.acquire(timeout=min(_LOCK_SECONDS, left)):
                    raise StoreError(f"slice {number} is being updated")
                try:
                    marked[number] = MarkedSlice(slot)
                finally:
                    slot.lock.release()
        except BaseException:
            _let_go(marked)
            raise
        versions = [one.version for one in marked.values()]
        timer = threading.Timer(self._seconds, self._end, (message.number,))
        timer.name, timer.daemon = "end of a cut", True
        self._end(message.number)  # of a coordinator that did not keep its number
        with self._lock:
            self._cuts[message.number] = marked, timer
            old = list(self._cuts)[:-MOST_CUTS]
        timer.start()
        for number in old:
            self._end(number)
        return versions

    def _read(self, request: Request, message: ReadCut) -> None:
        with self._lock:
            marked, _ = self._cuts.get(message.number, ({}, None))
            if not marked.keys() >= set(message.slices):
                raise ProtocolError(f"cut {message.number} is not here, or not with all of these slices")
        numbers: list[int] = []
        buffers: list[Buffer] = []
        num_bytes = 0
        for number in message.slices:
            data = marked[number].take()
            numbers.append(number)
            buffers.append(buffer_of(data))
            num_bytes += data.nbytes
            if num_bytes >= _FRAME_BYTES:
                request.reply_part(GivenSlices(numbers), buffers, num_bytes)
                numbers, buffers, num_bytes = [], [], 0
        request.reply(GivenSlices(numbers), buffers, num_bytes)

    def _end(self, number: int) -> None:
        with self._lock:
            known = self._cuts.pop(number, None)
        if known is not None:
            known[1].cancel()
            _let_go(known[0])

    def close(self) -> None:
        with self._lock:
            numbers = list(self._cuts)
        for number in numbers:
            self._end(number)


def _let_go(marked: dict[int, MarkedSlice]) -> None:
    for one in marked.values():
        one.let_go()
