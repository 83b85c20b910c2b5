"""A server's part in saves: what is marked goes to a file, in the background, while updates go on."""

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
from syncline.server.snapshot_barrier import SnapshotGate
from syncline.server.tasks import in_thread
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorWriter

OpenWriter = Callable[[str, str, Sequence[Planned]], Writer]
#: One digests while the other writes.
NUM_WRITERS = 2
#: As of `nice`: a third of what a step gets where both want the same core.
LESS_PRIORITY = 5
_END_SECONDS = 30.0


def open_writer(folder: str, file: str, plan: Sequence[Planned]) -> Writer:
    """A new file with these tensors."""
    return TensorWriter(open_folder(folder), file, plan)


def saving_handlers(
    gate: Callable[[], SnapshotGate], saving: Saving
) -> dict[type[Message], Callable[[Request, Any], None]]:
    """Answers the coordinator about saves."""

    def end(request: Request, message: EndSave) -> None:
        gate().open(message.number)
        saving.end(message)

    return {
        CloseSnapshotBarrier: lambda request, message: gate().close(request, message),
        Mark: lambda request, message: gate().mark(request, message),
        OpenSnapshotBarrier: lambda request, message: gate().open(message.number),
        WriteMarked: saving.write,
        EndSave: end,
    }


class Saving:
    """The save that is under way here, if any."""

    def __init__(self, log: Callable[[str], None], open_writer: OpenWriter = open_writer) -> None:
        self._log, self.open_writer = log, open_writer
        self.most_bytes = 0  # that a save may copy at a time; 0: as many as there are
        self._changed = threading.Condition()
        self.marks: CowSnapshot | None = None
        self._writing: CowSnapshot | None = None
        self._num_writing = 0

    def mark(self, number: int, slots: list[HostedSlice]) -> None:
        """Under `state_lock`, while nothing is on its way through the slices. A save that was under way is over."""
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
        """The server ends; its memory is about to go."""
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
            marks.release()  # after this nobody else writes
            writer.abandon()
            raise
        return WrittenMarked(file, [m.saved(message.file) for m in slices], marks.num_copied, marks.num_waited)

    def _write_all(self, marks: CowSnapshot, writer: Writer) -> None:
        """Slices are copied by this thread, so that whoever waits for one waits for nobody of less priority."""
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
    """By whoever must not wait: an update may hold a slice while it is written to a disk that does not answer."""
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
        except Exception as error:  # whoever waits must hear of it, whatever it is
            marks.fail(f"{type(error).__name__}: {error}")


def _give_way() -> None:
    """This thread digests and writes what it is given: steps go first. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice + LESS_PRIORITY)
