"""Copy-on-write snapshots: slices as they were at the snapshot point, until they are written."""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from syncline.core.checkpoint.manifest import SavedFile, SavedSlice, SavedState
from syncline.core.layout import ITEM_BYTES
from syncline.core.wire.traffic import StateEntry
from syncline.errors import StoreError
from syncline.net.transport import Buffer, buffer_of
from syncline.server.numbers import bytes_of
from syncline.server.slices import Bytes, HostedSlice

_HUGE_BYTES = 2 << 20


def new_memory(num_bytes: int) -> Bytes:
    """Allocates memory, in huge pages if possible: the first touch of a small page costs more than the copy."""
    if num_bytes < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(num_bytes, np.uint8)
    room = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array: Bytes = np.frombuffer(room, np.uint8)
    start = -array.ctypes.data % _HUGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // _HUGE_BYTES * _HUGE_BYTES)
    return array[start : start + num_bytes]


class CopyMemory:
    """Memory for a save's copies, limited and reused."""

    def __init__(self, most_bytes: int, num_copies: int) -> None:
        """`most_bytes`: the limit; 0 for none. `num_copies`: the most that will be requested."""
        self.most_bytes, self._num_left = most_bytes, num_copies
        self.used = 0
        self._spare: list[Bytes] = []

    def take(self, num_bytes: int) -> Bytes | None:
        """Returns memory, or None if the limit is reached."""
        self._num_left -= 1
        found = next((k for k, one in enumerate(self._spare) if one.nbytes == num_bytes), None)
        if found is None and self.most_bytes and self.used + self.num_spare + num_bytes > self.most_bytes:
            self._spare.clear()
            if self.used + num_bytes > self.most_bytes:
                return None
        self.used += num_bytes
        return self._spare.pop(found) if found is not None else new_memory(num_bytes)

    @property
    def num_spare(self) -> int:
        """Bytes that are free and kept for reuse."""
        return sum(one.nbytes for one in self._spare)

    def give_back(self, memory: Bytes) -> None:
        self.used -= memory.nbytes
        self._spare.append(memory)
        if self._num_left <= 0:
            self._spare.clear()

    def drop(self) -> None:
        """No more copies are made."""
        self._num_left = 0
        self._spare.clear()


#: Name, dtype and shape of a tensor in a file.
Planned = tuple[str, str, tuple[int, ...]]
#: How long to wait for the file when no memory is left. After that the save fails, not the job.
WORD_SECONDS = 5.0
#: How long to wait for a slice that the previous save is still writing. Commits wait meanwhile.
MARK_SECONDS = 0.2
_LOOK_SECONDS = 0.01


class Writer(Protocol):
    """Writes marked slices: any thread, any order, every tensor once."""

    def write(self, name: str, data: Buffer) -> None: ...

    def finish(self) -> SavedFile: ...

    def abandon(self) -> None: ...


class SnapshotSlice:
    """One slice as of the snapshot. Its data stays in the live slice until it is taken."""

    def __init__(self, slot: HostedSlice, snapshot: CowSnapshot) -> None:
        self.slot, self._snapshot = slot, snapshot
        self.version = slot.state.version
        self.clocks = tuple(slot.state.clock_entries())
        self.num_bytes = 0  # with rule state, once known
        self._entries: list[StateEntry] | None = None
        self.kept: Bytes | None = None  # a copy: the parameters, then the rule state
        self.is_taken = False  # copied or written: the live slice may change

    @property
    def name(self) -> str:
        return f"slice-{self.slot.part.id}"

    def _name_of(self, entry: StateEntry) -> str:
        return f"{self.name}/{entry.piece}/{entry.key}"

    def entries(self) -> list[StateEntry]:
        """The rule state entries. Requires the slice's lock unless the slice is taken."""
        if self._entries is None:
            entries = [entry for entry, _ in self.slot.rules.live_state()]
            self.num_bytes = self.slot.part.num_bytes + sum(entry.num_bytes for entry in entries)
            self._entries = entries
        return self._entries

    def plan(self) -> list[Planned]:
        """The tensors of the file."""
        part, lock = self.slot.part, self.slot.lock
        # The holder of the lock may be waiting for this file, but has set the entries by then.
        while self._entries is None:
            if lock.acquire(timeout=_LOOK_SECONDS):
                try:
                    self.entries()
                finally:
                    lock.release()
        entries, num_items = self.entries(), part.num_bytes // ITEM_BYTES[part.dtype]
        return [(self.name, part.dtype, (num_items,)), *((self._name_of(e), e.dtype, e.shape) for e in entries)]

    def saved(self, file: str) -> SavedSlice:
        states = tuple(SavedState(e.piece, e.key, self._name_of(e)) for e in self._entries or ())
        return SavedSlice(self.slot.part.id, file, self.name, self.version, self.clocks, states)

    # -- who comes first ----------------------------------------------------------------------------------

    def keep(self, waits: bool) -> None:
        """Under the slice's lock, before an update: keeps the old data. The update goes on even if the save fails."""
        if self.is_taken or self._snapshot.is_over:
            return
        self.is_taken = True
        try:
            self.entries()
            if self._copy():
                self._snapshot.was_copied(self)
            else:
                self._snapshot.wait_for_writer(self, WORD_SECONDS if waits else 0.0)
        except Exception as error:
            self._snapshot.fail(f"slice {self.slot.part.id}: {error}")

    def let_go(self) -> None:
        """Under the slice's lock: the data is no longer needed."""
        self.unhook()
        self.kept = None

    def unhook(self) -> None:
        """Under the slice's lock: updates no longer call this object."""
        self.slot.rules.unmark(self.keep)

    def write_live(self, writer: Writer) -> None:
        """Under the slice's lock: writes the live slice without a copy."""
        for name, data in self._live():
            writer.write(name, buffer_of(data))

    def _live(self) -> Iterator[tuple[str, Bytes]]:
        """The bytes of the live slice: its parameters, then its rule state."""
        with self.slot.storage.at_work():
            yield self.name, self.slot.memory
            for entry, numbers in self.slot.rules.live_state():
                yield self._name_of(entry), bytes_of(numbers)

    def _copy(self) -> bool:
        """Copies the slice. Returns False if there is no memory."""
        memory = self._snapshot.reserve(self.num_bytes)
        if memory is None:
            return False
        at = 0
        for _, data in self._live():
            memory[at : at + data.size] = data
            at += data.size
        self.kept = memory
        return True

    def take(self, writer: Writer) -> None:
        """Copies the slice for the file's writer, before `write`; writes it directly if there is no memory."""
        with self.slot.lock:
            if self.is_taken or self._snapshot.is_over:  # it may be marked for the next save by now
                return
            self.is_taken = True
            self.unhook()
            if not self._copy():
                self.write_live(writer)

    def write(self, writer: Writer) -> None:
        """Writes the copy and frees its memory. Does nothing if an update has written the slice already."""
        kept, self.kept = self.kept, None
        if kept is None:
            return
        sizes = [(self.name, self.slot.part.num_bytes), *((self._name_of(e), e.num_bytes) for e in self.entries())]
        at = 0
        for name, num_bytes in sizes:
            writer.write(name, buffer_of(kept[at : at + num_bytes]))
            at += num_bytes
        self._snapshot.free(kept)


class CowSnapshot:
    """All marked slices of one save at this server, and the memory for them."""

    def __init__(
        self, number: int, slots: Sequence[HostedSlice], most_bytes: int, log: Callable[[str], None]
    ) -> None:
        """Call under `state_lock` while no update is in flight; `slots` are in update order. `most_bytes`: the limit
        for copies; 0 for none.
        """
        self.number, self._log = number, log
        self.num_copied = self.num_waited = 0
        self.memory = CopyMemory(most_bytes, len(slots))
        self._changed = threading.Condition()
        self._writer: Writer | None = None
        self.trouble = ""  # why this save has failed
        self.is_over = False
        self.slices: list[SnapshotSlice] = []
        self._copied: collections.deque[SnapshotSlice] = collections.deque()
        self._left: collections.deque[SnapshotSlice] = collections.deque()
        self._claimed: set[int] = set()
        without = next((slot.part.id for slot in slots if not slot.uploaded), None)
        if without is not None:
            raise StoreError(f"slice {without} has no values yet")
        try:
            for slot in slots:
                self._mark(slot)
        except StoreError:
            self.end()
            self.release()
            raise
        self._left.extend(self.slices)

    def _mark(self, slot: HostedSlice) -> None:
        if not slot.lock.acquire(timeout=MARK_SECONDS):
            raise StoreError(f"slice {slot.part.id} is still being written for the save before")
        try:
            marked = SnapshotSlice(slot, self)
            slot.rules.mark(marked.keep)
            self.slices.append(marked)
        finally:
            slot.lock.release()

    # -- memory -------------------------------------------------------------------------------------------

    def reserve(self, num_bytes: int) -> Bytes | None:
        """Memory for a copy, or None if the limit is reached."""
        with self._changed:
            return self.memory.take(num_bytes)

    def free(self, memory: Bytes) -> None:
        with self._changed:
            self.memory.give_back(memory)

    def was_copied(self, marked: SnapshotSlice) -> None:
        """An update copied the slice before it changed it."""
        with self._changed:
            self.num_copied += marked.num_bytes
            self._copied.append(marked)

    def next(self) -> SnapshotSlice | None:
        """The slice to write next. Uncopied slices come first, the last in update order first, so that updates need
        not copy them. With limited memory, copies come first.
        """
        with self._changed:
            while self._copied or self._left:
                if self._left and not (self._copied and self.memory.most_bytes):
                    marked = self._left.pop()
                    if marked.is_taken:  # being copied; the caller waits for it
                        self._copied.append(marked)
                        continue
                else:
                    marked = self._copied.popleft()
                if marked.slot.part.id not in self._claimed:
                    self._claimed.add(marked.slot.part.id)
                    return marked
            return None

    def wait_for_writer(self, marked: SnapshotSlice, seconds: float) -> None:
        """Under the slice's lock, in the thread of an update: waits until the slice is written without a copy."""
        with self._changed:
            self.num_waited += 1
            is_first = self.num_waited == 1
            self._changed.wait_for(lambda: self._writer is not None or self.is_over, seconds)
            writer = self._writer
        if is_first:
            self._log(
                f"save {self.number}: the {self.memory.most_bytes} bytes of --save-memory are used up; updates wait "
                "until their slices are written"
            )
        if self.is_over:
            return
        if writer is None:
            self.fail("there was no memory left for it, and no word where to write to")
            return
        marked.write_live(writer)

    # -- its way ------------------------------------------------------------------------------------------

    def begin(self, writer: Writer) -> None:
        """The file is open."""
        with self._changed:
            self._writer = writer
            self._changed.notify_all()

    def fail(self, trouble: str) -> None:
        with self._changed:
            self.trouble = self.trouble or trouble
        self.end()

    def end(self) -> None:
        """Ends the save and frees its memory. Idempotent."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def release(self) -> None:
        """Stops keeping data for this save and frees what was kept."""
        for marked in self.slices:
            with marked.slot.lock:
                marked.let_go()
        with self._changed:
            self.slices = []
            self._copied.clear()
            self._left.clear()
            self.memory.drop()

    def check(self) -> None:
        if self.is_over:
            raise StoreError(f"save {self.number} was given up: {self.trouble or 'it is over, or another has begun'}")
