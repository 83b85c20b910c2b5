"""What a script remembers, on its way to the coordinator: a worker that is started again gets it back.

Notes are taken by the script's own thread at a boundary, now and then: in at most 1 % of its time, and not at every
step. What is taken up from a checkpoint goes the same way back: see `taking_up`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from syncline.core.wire.checkpoints import NoteScript
from syncline.errors import SynclineError
from syncline.net.link import Link
from syncline.worker.boundary import Position
from syncline.worker.script import ScriptState

if TYPE_CHECKING:
    from syncline.worker.job import Job

#: Between two notes, at least; and so many times as long as a note takes.
NOTE_SECONDS, TIMES_AS_LONG = 0.05, 100.0
#: Of one object that is noted: a larger one comes back from a checkpoint only.
MOST_BYTES = 8 << 20


class Notes:
    """Of one job. A thread says when it is time; the next boundary takes the note and sends it."""

    def __init__(
        self, job: Job, link: Link, state: ScriptState, facts: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._job, self._link, self._state, self._facts, self._say = job, link, state, facts, say
        self._noted = -1  # the worker's step at the last note
        self._cost_seconds = (0.0, 0.0)  # of the last two: one of them may have looked for schedulers
        self._told: set[str] = set()

    def begin(self, closed: threading.Event) -> None:
        """From now on, until it is closed."""
        threading.Thread(target=self._run, args=(closed,), name="notes", daemon=True).start()

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(max(NOTE_SECONDS, TIMES_AS_LONG * min(self._cost_seconds))):
            if self._job.own_step != self._noted and self._state.has_any and self._link.is_open:
                self._job.boundary.watch(self)
                self._job.boundary.look_where_it_waits()

    # -- what the boundary calls --------------------------------------------------------------------------

    def at(self, position: Position, after: int, clock: int, *, waits: bool) -> None:
        if not self._job.memory.taken_up.is_over:
            return  # what is here is being put back
        self._job.boundary.unwatch(self)
        if self._noted == self._job.own_step:
            return
        began, self._noted = time.monotonic(), self._job.own_step
        try:
            note = self._state.take(position, after, clock, self._facts(), MOST_BYTES)
            tensors = [(dtype, list(shape), data.tobytes()) for dtype, shape, data in note.tensors]
            self._link.tell(NoteScript(clock, note.tree, tensors))
        except SynclineError as error:  # the coordinator is away; or something cannot be saved
            self._tell(f"the script's state is not kept for a restart: {error}")
        except Exception as error:  # of an object of the script's
            self._tell(f"the script's state is not kept for a restart: {type(error).__name__}: {error}")
        for name in self._state.left_out:
            self._tell(
                f"{name} has more than {MOST_BYTES >> 20} MiB: a worker that is started again gets it back from a "
                "checkpoint only (--checkpoint)"
            )
        self._cost_seconds = (self._cost_seconds[1], time.monotonic() - began)

    def handed_out(self) -> None:
        """Notes are taken before."""

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
            self._say(text)
