"""A worker's side of saves: notes the script's state at boundaries while a save is expected, and writes the note of
the snapshot point.

`ScriptCheckpoints` combines the parts of this package for one job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from syncline import faults
from syncline.config import JobConfig
from syncline.core.checkpoint.manifest import SavedScript
from syncline.core.wire.checkpoints import EndSave, Expect, Finish, Noted, Save, Saved, WriteScript, WrittenScript
from syncline.core.wire.message import Message
from syncline.errors import ConfigError, ConnectionLost, FencedError, StoreError, SynclineError
from syncline.net.link import Link
from syncline.net.rpc import Request
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorWriter
from syncline.worker.checkpoint.boundary import END, Boundary, Position
from syncline.worker.checkpoint.encoding import TREE
from syncline.worker.checkpoint.resume import Notes, ScriptResume
from syncline.worker.checkpoint.rng_state import OwnStream
from syncline.worker.checkpoint.script_state import Note, ScriptState
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.session import CoordinatorHandlers

#: Above this size of notes the script waits at its boundary for the snapshot, up to this time in total. Then the
#: oldest notes are dropped, down to this number: the snapshot will be later than those.
MOST_NOTED_BYTES, HELD_SECONDS, LEAST_NOTES = 256 << 20, 5.0, 2


class ScriptSaves:
    """Keeps notes from `Expect` on, until the snapshot point is known."""

    def __init__(
        self, name: str, boundary: Boundary, state: ScriptState,
        num_landed: Callable[[], int], facts: Callable[[], dict[str, Any]], say: Callable[[str], None],
        steps_per_push: Callable[[], int] = lambda: 1,
    ) -> None:  # fmt: skip
        """`num_landed`: this worker's answered commits; no snapshot can be earlier. `steps_per_push`: with local
        steps, how many it makes for a commit.
        """
        self._steps_per_push = steps_per_push
        self._name, self._boundary, self._state = name, boundary, state
        self._num_landed, self._facts, self._say = num_landed, facts, say
        self._change = threading.Condition()
        self._number = self._ended = 0  # the expected save; the highest finished one
        self._notes: list[Note] = []
        self._noted_step = 0  # this worker's steps at the last note
        self._is_found = False  # the note of the snapshot point is known: no more are needed
        self._patience, self._has_dropped = HELD_SECONDS, False
        self._expecting: Request | None = None
        self._wanted: tuple[Request, WriteScript] | None = None
        self._told = ""
        self._stopped: Note | None = None  # where training ended by a rule

    @property
    def number(self) -> int:
        """The save that is expected; 0: none."""
        return self._number

    @property
    def num_notes(self) -> int:
        """States of the script that are kept for it."""
        return len(self._notes)

    @property
    def patience_seconds(self) -> float:
        """The script may still wait so long, in all, while too much is noted."""
        return self._patience

    def hear(self, request: Request) -> None:
        """Called in the thread that reads from the coordinator; slow work goes to another thread."""
        message = request.message
        if isinstance(message, EndSave):
            self._end(message.number)
        else:
            threading.Thread(target=self._see_to, args=(request,), name="save", daemon=True).start()

    def _see_to(self, request: Request) -> None:
        message = request.message
        try:
            if isinstance(message, Expect):
                self._expect(request, message.number)
            elif isinstance(message, WriteScript):
                self._want(request, message)
        except SynclineError as error:
            request.refuse(error)

    def _expect(self, request: Request, number: int) -> None:
        with self._change:
            if number < self._number:
                raise StoreError(f"save {number} is over: {self._number} has begun")
            if number <= self._ended:  # the message of its end came first
                raise StoreError(f"save {number} is over")
            if number > self._number:
                self._let_go(f"save {number} has begun")
            self._number, self._expecting = number, request
        self._answer_expect()
        self._boundary.watch_while(self, self._wants_notes)
        self._boundary.look_where_it_waits()

    def _want(self, request: Request, message: WriteScript) -> None:
        with self._change:
            if message.number != self._number:
                raise StoreError(f"{self._name} was told nothing of save {message.number}")
            found = self._covering(message.clock)
            if found is None and self._notes and message.clock <= self._notes[-1].clock:
                raise StoreError(self._why_not(message.clock))
            self._wanted = (request, message)
        if found is not None:
            self._write(found)
        else:
            self._boundary.look_where_it_waits()

    def _why_not(self, clock: int) -> str:
        if self._has_dropped:
            return f"{self._name} keeps its state of step {clock} no more: the cut was late, and notes are large"
        return f"{self._name} was behind step {clock} when it noted its state first"

    # -- at a boundary ------------------------------------------------------------------------------------

    def at(self, position: Position, after: int, clock: int, *, waits: bool) -> None:
        with self._change:
            number = 0 if self._is_found or (self._notes and self._notes[-1].clock >= clock) else self._number
        is_new = bool(number) and self._note(number, position, after, clock)
        self._answer_expect()
        wanted = self._wanted
        if wanted is not None:
            found = self._covering(wanted[1].clock)
            if found is not None:
                threading.Thread(target=self._write, args=(found,), name="script", daemon=True).start()
            elif clock > wanted[1].clock:
                self._refuse_wanted(self._why_not(wanted[1].clock))
        if is_new and not waits:
            self._hold()

    def handed_out(self) -> None:
        """Notes are taken earlier."""

    def _note(self, number: int, position: Position, after: int, clock: int) -> bool:
        """Takes one note under the boundary's lock. It is slow, so it does not take our lock."""
        try:
            stopped = self._stopped
            is_there = stopped is not None and stopped.clock == clock
            note = stopped if stopped and is_there else self._state.take(position, after, clock, self._facts())
        except Exception as error:  # raised by an object of the script
            self._cannot_note(number, f"the script's state cannot be saved: {error}")
            return False
        with self._change:
            if number != self._number:
                return False
            self._notes.append(note)
            self._noted_step = self._facts()["own_step"]
        if faults.armed is not None:
            faults.reach("save.noted")
        return True

    def note_stop(self, position: Position, clock: int) -> None:
        """The last save is of this state, however far the script runs until its end."""
        try:
            self._stopped = self._state.take(position, clock - 1, clock, self._facts())
        except Exception as error:  # raised by an object of the script; the last save reports it
            self._cannot_note(-1, f"the script's state cannot be saved: {error}")

    def _cannot_note(self, number: int, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(text)
        with self._change:
            expecting = self._expecting if number == self._number else None
            if expecting is not None:
                self._expecting = None
        if expecting is not None:
            expecting.refuse(StoreError(f"{self._name}: {text}"))

    @property
    def _is_ready(self) -> bool:
        """Whether the snapshot can only be at or after the first note."""
        return bool(self._notes) and self._num_landed() > self._notes[0].after

    def _answer_expect(self) -> None:
        """Answers `Expect` as soon as that is true."""
        with self._change:
            expecting = self._expecting if self._is_ready else None
            if expecting is not None:
                self._expecting = None
                answer = Noted(self._notes[-1].clock, self._boundary.stride, self._noted_step, self._steps_per_push())
        if expecting is not None:
            expecting.reply(answer)

    def _covering(self, clock: int) -> Note | None:
        return next((note for note in self._notes if note.covers(clock)), None)

    def _hold(self) -> None:
        """Limits the notes: the script waits here with all its commits sent. It does not wait at every boundary of
        a slow save, since another worker may be at none.
        """
        with self._change:
            until = time.monotonic() + self._patience
            while self._is_too_much and self._is_ready and (left := until - time.monotonic()) > 0:
                self._change.wait(left)
            self._patience = max(0.0, until - time.monotonic()) if self._is_too_much else self._patience
            while self._is_too_much and len(self._notes) > LEAST_NOTES and self._notes[0].clock < self._num_landed():
                del self._notes[0]
                self._has_dropped = True

    @property
    def _is_too_much(self) -> bool:
        return len(self._notes) > 1 and self._num_noted_bytes > MOST_NOTED_BYTES

    @property
    def _num_noted_bytes(self) -> int:
        return sum(note.num_bytes for note in self._notes)

    # -- writing ------------------------------------------------------------------------------------------

    def _write(self, note: Note) -> None:
        with self._change:
            wanted, self._wanted = self._wanted, None
            if wanted is None:
                return
            self._notes, self._is_found = [note], True
            self._change.notify_all()
        self._boundary.watch_while(self, self._wants_notes)
        request, message = wanted
        try:
            script = write_script(self._name, note, message)
        except SynclineError as error:
            request.refuse(error)
            return
        except Exception as error:  # a disk that is full, or a bug: the coordinator waits for an answer
            request.refuse(StoreError(f"{self._name}: {error}"))
            return
        if faults.armed is not None:
            faults.reach("script.written")
        request.reply(WrittenScript(script, note.clock))

    def _refuse_wanted(self, reason: str) -> None:
        with self._change:
            wanted, self._wanted = self._wanted, None
        if wanted is not None:
            wanted[0].refuse(StoreError(reason))

    def _end(self, number: int) -> None:
        with self._change:
            self._ended = max(self._ended, number)
            if number == self._number:
                self._let_go(f"save {number} is over")
                threading.Thread(target=self._look_away, name="save", daemon=True).start()

    def _look_away(self) -> None:
        """Not in the thread that hears: the script may be noting just now."""
        self._boundary.watch_while(self, self._wants_notes)

    def _wants_notes(self) -> bool:
        with self._change:
            return bool(self._number) and not self._is_found

    def _let_go(self, reason: str) -> None:
        expecting, self._expecting = self._expecting, None
        wanted, self._wanted = self._wanted, None
        self._number, self._notes, self._is_found = 0, [], False
        self._patience, self._has_dropped = HELD_SECONDS, False
        self._change.notify_all()
        for request in (expecting, wanted[0] if wanted is not None else None):
            if request is not None:
                request.refuse(StoreError(reason))


def write_script(name: str, note: Note, message: WriteScript) -> SavedScript:
    """Writes a worker's script state to its own file."""
    tree = np.frombuffer(note.tree, np.uint8)
    plan: list[tuple[str, str, tuple[int, ...]]] = [(TREE, "uint8", (tree.size,))]
    plan += [(f"tensor-{n}", dtype, shape) for n, (dtype, shape, _) in enumerate(note.tensors)]
    writer = TensorWriter(open_folder(message.folder), message.file, plan)
    try:
        writer.write(TREE, tree)
        for number, (_, _, data) in enumerate(note.tensors):
            writer.write(f"tensor-{number}", data)
    except BaseException:
        writer.abandon()
        raise
    return SavedScript(name, message.clock, writer.finish())


#: The last save may take as long as other workers take: no deadline.
_FINISH_SECONDS = 1e9


class _Leaves(Exception):  # no error
    """This worker was asked to leave meanwhile."""


class CheckpointedJob(Protocol):
    """What checkpoints need of a job."""

    name: str
    config: JobConfig
    exchange: ServersExchange
    boundary: Boundary
    own_step: int

    @property
    def known_device(self) -> str: ...
    def ask(self, message: Message, /) -> Message: ...
    def settle(self) -> None: ...
    def explain(self, error: SynclineError) -> SynclineError: ...


class ScriptCheckpoints:
    """Saves and restores the script of one job."""

    def __init__(
        self, job: CheckpointedJob, link: Link, handlers: CoordinatorHandlers, stream: OwnStream,
        say: Callable[[str], None], *, is_late: bool,
    ) -> None:  # fmt: skip
        """`is_late`: this worker joined a running job; it restores notes of other workers or of its own earlier
        life.
        """
        self._job, self._link, self._handlers, self._say = job, link, handlers, say
        self._has_told = False  # that a save is made later
        self._num_saves = 0  # outside of loops
        exchange, boundary = job.exchange, job.boundary
        has_saves = bool(job.config.checkpoint or job.config.resume)
        may_be = has_saves or is_late
        self.resume = ScriptResume(job.name, boundary, job.ask, may_be=may_be, is_late=is_late)
        self.state = ScriptState(
            self.resume.saved, lambda: self.resume.is_over, lambda: job.known_device, stream.restored
        )
        self.resume.begin(self.state)
        self.saves = ScriptSaves(
            job.name, boundary, self.state, lambda: exchange.num_landed, self._facts, say,
            lambda: exchange.times.steps_per_push,
        )  # fmt: skip
        if has_saves:
            boundary.note_stop(self.saves.note_stop)
        self.notes = Notes(
            boundary, link, self.state, self._facts, say,
            own_step=lambda: job.own_step, is_resumed=lambda: self.resume.is_over,
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        before = self.resume.own_step
        return {"own_step": before + self._job.own_step, "before": before}

    def save(self) -> str:
        job, message = self._job, Save(f"{self._job.name} called job.save()")
        if not job.config.checkpoint:
            raise ConfigError("job.save(): this job has no place for checkpoints; start it with --checkpoint DIR")
        if not self._job.boundary.is_clean:
            self._link.try_call(message)
            return ""
        place: Position | None = None
        if not self._job.boundary.is_in_loop:
            self._num_saves += 1
            place = ("save", "", self._num_saves)
            self._job.boundary.comes_to_place()
        job.settle()
        with self._job.boundary.waiting(place):
            if name := self.resume.name:
                return name  # it stands at the saved place, or is on its way there
            answer = job.ask(message)
        assert isinstance(answer, Saved)
        if not answer.name and not self._has_told:
            self._has_told = True
            self._say(
                "job.save() was called by some workers only, while others wait for this one in their step; the job "
                "is saved with the next step; call job.save() in all workers at the same step"
            )
        return answer.name

    def finish(self) -> None:
        """The script has ended: waits for the last save, and for followers to read the last state, unless this worker
        is asked to leave.
        """
        try:
            # Others may take longer, for example with an evaluation: not worth a report.
            waits = self._job.exchange.waits.of("the last save", loud_seconds=60.0)
            with waits, self._job.boundary.waiting(END):
                self._link.call(Finish(), _FINISH_SECONDS, self._while_finishing)
        except (_Leaves, FencedError):
            return
        except ConnectionLost as error:
            raise self._job.explain(error) from None

    def _while_finishing(self) -> None:
        self._handlers.check()
        if self._handlers.retires_now():
            raise _Leaves
