"""With `--trace`: writes down what members trace of their steps, and tells them the time."""

from __future__ import annotations

import contextlib
import pathlib
import queue
import threading
import time

from syncline.coordinator.job import JobContext
from syncline.core.tracing import MOST_SPANS, TracedBatch
from syncline.core.wire.tracing import GiveSpans, GotSpans
from syncline.errors import ProtocolError, StoreError
from syncline.net.rpc import Request
from syncline.store.lines import SPANS, SPANS_BYTES, LinesWriter

#: Batches that wait to be written; more are dropped.
MOST_UNWRITTEN = 1_000
#: After trouble with the disk, the next attempt.
AGAIN_SECONDS = 30.0
#: For the last batches, at the end of the job.
END_SECONDS = 5.0


class TraceService:
    """Takes the spans of all members. A thread writes them; nothing waits for it."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._unwritten: queue.Queue[TracedBatch | None] = queue.Queue(MOST_UNWRITTEN)
        self._thread: threading.Thread | None = None
        self._has_told = False

    @property
    def num_unwritten(self) -> int:
        return self._unwritten.qsize()

    def start(self, folder: pathlib.Path) -> None:
        """From now on spans go to a file in this folder, if the job is traced."""
        if self._job.config.trace:
            self._thread = threading.Thread(target=self._write, args=(folder,), name="write trace", daemon=True)
            self._thread.start()

    def take(self, request: Request, message: GiveSpans) -> None:
        """A member gives spans; the answer has the time at which they came."""
        at, peer = time.time(), request.peer
        if len(message.spans) > MOST_SPANS:
            raise ProtocolError(f"{len(message.spans)} spans in one message; at most {MOST_SPANS}")
        with self._job.lock:
            member = self._job.membership.state.members.get(peer.name)
        batch = TracedBatch(
            member=peer.name,
            role=peer.role,
            incarnation=peer.incarnation,
            number=message.number,
            received=at,
            sent=message.sent,
            host=member.host if member is not None else "",
            knot=message.knot,
            dropped=message.num_dropped,
            spans=message.spans,
        )
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._unwritten.put_nowait(batch)
        request.reply(GotSpans(at))

    def close(self) -> None:
        """Waits a little until all is written."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._unwritten.put(None, timeout=END_SECONDS)
            self._thread.join(END_SECONDS)

    def _write(self, folder: pathlib.Path) -> None:
        file: LinesWriter | None = None
        not_before = 0.0
        while (batch := self._unwritten.get()) is not None:
            if time.monotonic() < not_before:
                continue
            try:
                if file is None:
                    file = LinesWriter(folder / SPANS, SPANS_BYTES)
                file.write([batch])
            except StoreError as error:
                not_before = time.monotonic() + AGAIN_SECONDS
                if not self._has_told:
                    self._has_told = True
                    self._job.log_line(f"{error}; the job goes on, and its trace has a gap")
        if file is not None:
            file.close()
