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
        self.marks: CowSnapshot | None = None
        self._writing: CowSnapshot | None = None
        self._num_writing = 0

    def mark(self, number: int, slots: list[HostedSlice]) -> None:
        """Marks the slices, under `state_lock` while no update is in flight. Ends an earlier save."""
        with self._changed:
            before, self.marks = self.marks, None
        _let_go(before)
        marks = CowSnapshot(number, slots, self.most_bytes, self._log)
        with self._changed:
            self.marks = marks

    def end(self, message: EndSave) -> None:
        with self._changed:
            marks = self.marks
            if marks is None or marks.number > message.number:
                return
            self.marks = None
        _let_go(marks)

    def close(self) -> None:
        """The server is closing and will free its memory."""
        with self._changed:
            if self.marks is not None:
                self.marks.end()
            self._changed.wait_for(lambda: not self._num_writing, _END_SECONDS)

    # -- the file -----------------------------------------------------------------------------------------

    def write(self, request: Request, message: WriteMarked) -> None:
        in_thread("save", request, lambda: request.reply(self._write(message)))

    def _write(self, message: WriteMarked) -> WrittenMarked:
        with self._changed:
            marks = self.marks
            if marks is None or marks.number != message.number:
                raise StoreError(f"nothing is marked for save {message.number}")
            if marks is self._writing:
                raise StoreError(f"save {message.number} is being written already")
            self._writing = marks
            self._num_writing += 1
        try:
            return self._write_marked(marks, message)
        finally:
            marks.end()
            marks.release()
            with self._changed:
                self.marks = None if self.marks is marks else self.marks
                self._writing = None if self._writing is marks else self._writing
                self._num_writing -= 1
                self._changed.notify_all()

    def _write_marked(self, marks: CowSnapshot, message: WriteMarked) -> WrittenMarked:
        slices = list(marks.slices)
        writer = self.open_writer(message.folder, message.file, [t for marked in slices for t in marked.plan()])
        try:
            marks.begin(writer)
            self._write_all(marks, writer)
            marks.check()
            file = writer.finish()
        except BaseException:
            marks.end()
            marks.release()  # after this no update writes the file
            writer.abandon()
            raise
        return WrittenMarked(file, [m.saved(message.file) for m in slices], marks.num_copied, marks.num_waited)

    def _write_all(self, marks: CowSnapshot, writer: Writer) -> None:
        """Writes all slices. This thread makes the copies itself, so that updates never wait for a lower-priority
        thread.
        """
        taken: queue.Queue[SnapshotSlice | None] = queue.Queue(1)
        threads = [threading.Thread(target=_write_some, args=(marks, writer, taken), name=f"save-{k}", daemon=True)
                   for k in range(min(NUM_WRITERS, num_cores()))]  # fmt: skip
        for thread in threads:
            thread.start()
        try:
            while not marks.is_over and (marked := marks.next()) is not None:
                marked.take(writer)
                taken.put(marked)
        finally:
            for _ in threads:
                taken.put(None)
            for thread in threads:
                thread.join()


def _let_go(marks: CowSnapshot | None) -> None:
    """Ends a save in its own thread: an update may hold a slice's lock while it waits for a slow disk."""
    if marks is not None:
        marks.end()
        threading.Thread(target=marks.release, name="let go", daemon=True).start()


def _write_some(marks: CowSnapshot, writer: Writer, taken: queue.Queue[SnapshotSlice | None]) -> None:
    _give_way()
    while (marked := taken.get()) is not None:
        try:
            if not marks.is_over:
                marked.write(writer)
        except SynclineError as error:
            marks.fail(str(error))
        except Exception as error:  # callers must get an error, whatever it is
            marks.fail(f"{type(error).__name__}: {error}")


def _give_way() -> None:
    """Lowers this thread's priority, so that steps go first. Only Linux has thread priorities."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice + LESS_PRIORITY)
