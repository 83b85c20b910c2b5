"""A server's side of saves: writes marked slices to a file in the background, while updates go on."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from syncline.config import num_cores
from syncline.core.wire.checkpoints import (
    CloseSnapshotBarrier,
    EndSave,
    Mark,
    OpenSnapshotBarrier,
    WriteMarked,
    WrittenMarked,
)
from syncline.core.wire.message import Message
from syncline.errors import StoreError, SynclineError
from syncline.net.rpc import Request
from syncline.server.cow_snapshot import CowSnapshot, Planned, SnapshotSlice, Writer
from syncline.server.slices import HostedSlice
from syncline.server.snapshot_barrier import SnapshotBarrierService
from syncline.server.tasks import in_thread
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorWriter

OpenWriter = Callable[[str, str, Sequence[Planned]], Writer]
#: One digests while the other writes.
NUM_WRITERS = 2
#: A `nice` value: a third of a step's share if both want the same core.
LESS_PRIORITY = 5
_END_SECONDS = 30.0


def open_writer(folder: str, file: str, plan: Sequence[Planned]) -> Writer:
    """A new file with these tensors."""
    return TensorWriter(open_folder(folder), file, plan)


def saving_handlers(
    barrier: Callable[[], SnapshotBarrierService], saving: Saving
) -> dict[type[Message], Callable[[Request, Any], None]]:
    """Handlers for the coordinator's save requests."""

    def end(request: Request, message: EndSave) -> None:
        barrier().open(message.number)
        saving.end(message)

    return {
        CloseSnapshotBarrier: lambda request, message: barrier().close(request, message),
        Mark: lambda request, message: barrier().mark(request, message),
        OpenSnapshotBarrier: lambda request, message: barrier().open(message.number),
        WriteMarked: saving.write,
        EndSave: end,
    }


class Saving:
    """The current save of this server, if any."""

    def __init__(self, log: Callable[[str], None], open_writer: OpenWriter = open_writer) -> None:
        self._log, self.open_writer = log, open_writer
        self.most_bytes = 0  # limit for copies of one save; 0: none
        self._changed = threading.Condition()
        self.snapshot: CowSnapshot | None = None
        self._writing: CowSnapshot | None = None
        self._num_writing = 0

    def mark(self, number: int, slots: list[HostedSlice]) -> None:
        """Marks the slices, under `state_lock` while no update is in flight. Ends an earlier save."""
        with self._changed:
            before, self.snapshot = self.snapshot, None
        _let_go(before)
        snapshot = CowSnapshot(number, slots, self.most_bytes, self._log)
        with self._changed:
            self.snapshot = snapshot

    def end(self, message: EndSave) -> None:
        with self._changed:
            snapshot = self.snapshot
            if snapshot is None or snapshot.number > message.number:
                return
            self.snapshot = None
        _let_go(snapshot)

    def close(self) -> None:
        """The server is closing and will free its memory."""
        with self._changed:
            if self.snapshot is not None:
                self.snapshot.end()
            self._changed.wait_for(lambda: not self._num_writing, _END_SECONDS)

    # -- the file -----------------------------------------------------------------------------------------

    def write(self, request: Request, message: WriteMarked) -> None:
        in_thread("save", request, lambda: request.reply(self._write(message)))

    def _write(self, message: WriteMarked) -> WrittenMarked:
        with self._changed:
            snapshot = self.snapshot
            if snapshot is None or snapshot.number != message.number:
                raise StoreError(f"nothing is marked for save {message.number}")
            if snapshot is self._writing:
                raise StoreError(f"save {message.number} is being written already")
            self._writing = snapshot
            self._num_writing += 1
        try:
            return self._write_marked(snapshot, message)
        finally:
            snapshot.end()
            snapshot.release()
            with self._changed:
                self.snapshot = None if self.snapshot is snapshot else self.snapshot
                self._writing = None if self._writing is snapshot else self._writing
                self._num_writing -= 1
                self._changed.notify_all()

    def _write_marked(self, snapshot: CowSnapshot, message: WriteMarked) -> WrittenMarked:
        slices = list(snapshot.slices)
        writer = self.open_writer(message.folder, message.file, [t for marked in slices for t in marked.plan()])
        try:
            snapshot.begin(writer)
            self._write_all(snapshot, writer)
            snapshot.check()
            file = writer.finish()
        except BaseException:
            snapshot.end()
            snapshot.release()  # after this no update writes the file
            writer.abandon()
            raise
        return WrittenMarked(file, [m.saved(message.file) for m in slices], snapshot.num_copied, snapshot.num_waited)

    def _write_all(self, snapshot: CowSnapshot, writer: Writer) -> None:
        """Writes all slices. This thread makes the copies itself, so that updates never wait for a lower-priority
        thread.
        """
        taken: queue.Queue[SnapshotSlice | None] = queue.Queue(1)
        threads = [threading.Thread(target=_write_some, args=(snapshot, writer, taken), name=f"save-{k}", daemon=True)
                   for k in range(min(NUM_WRITERS, num_cores()))]  # fmt: skip
        for thread in threads:
            thread.start()
        try:
            while not snapshot.is_over and (marked := snapshot.next()) is not None:
                marked.take(writer)
                taken.put(marked)
        finally:
            for _ in threads:
                taken.put(None)
            for thread in threads:
                thread.join()


def _let_go(snapshot: CowSnapshot | None) -> None:
    """Ends a save in its own thread: an update may hold a slice's lock while it waits for a slow disk."""
    if snapshot is not None:
        snapshot.end()
        threading.Thread(target=snapshot.release, name="let go", daemon=True).start()


def _write_some(snapshot: CowSnapshot, writer: Writer, taken: queue.Queue[SnapshotSlice | None]) -> None:
    _give_way()
    while (marked := taken.get()) is not None:
        try:
            if not snapshot.is_over:
                marked.write(writer)
        except SynclineError as error:
            snapshot.fail(str(error))
        except Exception as error:  # callers must get an error, whatever it is
            snapshot.fail(f"{type(error).__name__}: {error}")


def _give_way() -> None:
    """Lowers this thread's priority, so that steps go first. Only Linux has thread priorities."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice + LESS_PRIORITY)
