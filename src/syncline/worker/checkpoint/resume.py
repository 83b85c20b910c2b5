"""Restores a script's state after a restart: from a checkpoint, or from notes sent to the coordinator.

Notes are taken by the script's own thread at a boundary: at the beginning of every epoch, after its schedulers have
stepped, and between these in at most 1 % of its time. In a job that resumed, `ScriptResume` puts the saved state back
until the script goes on from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from syncline.core.checkpoint.manifest import SavedScript
from syncline.core.wire.checkpoints import AskResume, GivenResume, NoteScript
from syncline.core.wire.message import Message
from syncline.errors import ProtocolError, StoreError, SynclineError
from syncline.net.link import Link
from syncline.store.checkpoints import read_manifest
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorReader
from syncline.worker.arrays import Bytes
from syncline.worker.checkpoint.boundary import Boundary, Position
from syncline.worker.checkpoint.encoding import TREE, from_json
from syncline.worker.checkpoint.script_state import SavedScriptState, ScriptState

#: Places besides loops at which a script may continue.
PLACES = ("barrier", "save")


class ScriptResume:
    """Puts the script's state back at every boundary, up to the place where it was noted or to the first batch.

    This undoes what the script does on its way there, for example a scheduler that steps through finished epochs.
    """

    def __init__(
        self, name: str, boundary: Boundary, ask: Callable[[Message], Message], *, may_be: bool, is_late: bool = False
    ) -> None:  # fmt: skip
        """`may_be`: whether there can be saved state: the job has checkpoints, or this worker is late."""
        self._name, self._boundary, self.ask = name, boundary, ask
        self._is_late = is_late
        self._state: ScriptState | None = None
        self._saved: SavedScriptState | None = None
        self.is_known = not may_be
        self._reached = False
        self.own_step = 0  #: this worker's steps before
        self.is_over = not may_be  #: the script continues by itself

    def begin(self, state: ScriptState) -> None:
        self._state = state
        if not self.is_over:
            self._boundary.watch(self)
            self._boundary.before_place(lambda: self.name)  # loads the saved state, whose place others may need

    def saved(self) -> SavedScriptState | None:
        """The saved state of this worker's script, else the chief's. Call it in the script's thread."""
        if not self.is_known:
            self.is_known = True
            answer = self.ask(AskResume())
            if not isinstance(answer, GivenResume):
                raise ProtocolError(f"{type(answer).__name__} is no answer about what is resumed")
            behind = read_script(self._name, answer.folder, answer.digest) if answer.folder else None
            self._saved = self._noted(answer, behind) or behind
            if self._saved is None:
                self._end()
            else:
                self.own_step = self._saved.own_step
        return self._saved

    def _noted(self, answer: GivenResume, behind: SavedScriptState | None = None) -> SavedScriptState | None:
        if answer.note is None:
            return None
        found = noted_script(answer.note, answer.noted_by, is_own=answer.noted_by == self._name)
        found.behind = behind  # state too large for a note
        return found

    def went_on(self) -> None:
        """This script skipped epochs that other workers have made: takes over their state, for example of
        schedulers.
        """
        if not self._is_late or self._state is None:
            return
        answer = self.ask(AskResume(others_first=True))
        if isinstance(answer, GivenResume) and (saved := self._noted(answer)) is not None and not saved.is_own:
            self._state.put_back(saved, random=False)

    @property
    def name(self) -> str:
        """The name of the checkpoint while it is being restored."""
        saved = None if self.is_over else self.saved()
        return saved.name if saved is not None else ""

    def put_back(self) -> None:
        """Restores the state, unless that is over."""
        if not self.is_over and (saved := self.saved()) is not None:
            assert self._state is not None
            self._state.put_back(saved)

    def begins_step(self) -> None:
        """An optimizer's step begins in a script without our loaders: restores everything but the random states,
        which this step has already used.
        """
        saved = None if self.is_over else self.saved()
        if saved is not None and saved.position[0] == "step" and not self._boundary.is_in_loop:
            assert self._state is not None
            self._state.put_back(saved, random=False)

    def at(self, position: Position, after: int, clock: int, *, waits: bool) -> None:
        if waits:  # also in other threads, if the script waits at the same place again
            is_place = self._saved is not None and self._saved.position == position and not self._reached
            if position[0] in PLACES and is_place:
                self._reached = True
                self.put_back()
            return
        if position[0] == "step":
            if clock:
                self._end()
            return
        saved = self.saved()
        if saved is None or (self._reached and position != saved.position):
            self._end()
            return
        self._reached = self._reached or position == saved.position
        self.put_back()

    def handed_out(self) -> None:
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._boundary.unwatch(self)
        if self._saved is not None and self._state is not None and not self._state.wants(self._saved):
            self._saved = None


def noted_script(note: NoteScript, name: str, *, is_own: bool) -> SavedScriptState:
    """Validates a worker's note of its script."""
    tensors = [np.frombuffer(data, np.uint8).copy() for _, _, data in note.tensors]

    def read(number: int) -> Bytes:
        if not 0 <= number < len(tensors):
            raise StoreError(f"the note of {name} has no tensor {str(number)[:40]}")
        return tensors[number]

    found = SavedScriptState(f"the note of {name}", from_json(note.tree), read, is_own)
    before = found.tree["facts"].get("before", 0)
    found.own_step = before if type(before) is int else 0  # the job itself knows what was made since
    return found


def read_script(name: str, url: str, digest: str) -> SavedScriptState | None:
    """Reads and validates this worker's script state in a checkpoint; None if there is none."""
    folder = open_folder(url)
    manifest, _ = read_manifest(folder, digest)
    script = _script_of(name, manifest.scripts)
    if script is None:
        return None
    with TensorReader(folder, script.file) as reader:
        found = {tensor.name: reader.read(tensor.name) for tensor in script.file.tensors}
    if TREE not in found:
        raise StoreError(f"{manifest.name}: {script.file.name} has no {TREE!r}: it is no script's state")
    tree = from_json(found.pop(TREE).tobytes())

    def read(number: int) -> Bytes:
        try:
            return found[f"tensor-{number}"]
        except KeyError:
            raise StoreError(f"{manifest.name}: {script.file.name} has no tensor {str(number)[:40]}") from None

    return SavedScriptState(manifest.name, tree, read, is_own=script.worker == name)


def _script_of(name: str, scripts: Sequence[SavedScript]) -> SavedScript | None:
    """The worker's own script state, else the first worker's."""

    def number(script: SavedScript) -> tuple[bool, int, str]:
        digits = script.worker.rpartition("-")[2]
        return script.worker != name, int(digits) if digits.isdecimal() else 1 << 60, script.worker

    return min(scripts, key=number, default=None)


#: The least pause between two notes, and its multiple of a note's duration.
NOTE_SECONDS, TIMES_AS_LONG = 0.05, 100.0
#: Limit for one noted object; a larger one is restored from a checkpoint only.
MOST_BYTES = 8 << 20


class Notes:
    """Takes notes of one job's script. A thread says when one is due; the next boundary takes and sends it."""

    def __init__(
        self, boundary: Boundary, link: Link, state: ScriptState, facts: Callable[[], dict[str, Any]],
        say: Callable[[str], None], *, own_step: Callable[[], int], is_resumed: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`own_step`: this worker's steps. `is_resumed`: whether restoring is over."""
        self._boundary, self._link, self._state, self._facts, self._say = boundary, link, state, facts, say
        self._own_step, self._is_resumed = own_step, is_resumed
        self._noted = -1  # the worker's step at the last note
        self._is_epoch_new = False  # what the script did between two epochs is in no note
        self._cost_seconds = (0.0, 0.0)  # processor time of the last two: one may have looked for schedulers
        self._told: set[str] = set()

    def begin(self, closed: threading.Event) -> None:
        """From now on, until it is closed."""
        self._boundary.before_epoch(self._epoch_begins)
        threading.Thread(target=self._run, args=(closed,), name="notes", daemon=True).start()

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(max(NOTE_SECONDS, TIMES_AS_LONG * min(self._cost_seconds))):
            if self._own_step() != self._noted and self._state.has_any and self._link.is_open:
                self._boundary.watch(self)
                self._boundary.look_where_it_waits()

    def _epoch_begins(self) -> None:
        """A note of the epoch before is not enough for a worker that is started again: it lacks the steps that
        schedulers make between two epochs, and no step of the optimizer tells them apart."""
        if self._state.has_any and self._link.is_open:
            self._is_epoch_new = True
            self._boundary.watch(self)

    # -- what the boundary calls --------------------------------------------------------------------------

    def at(self, position: Position, after: int, clock: int, *, waits: bool) -> None:
        if not self._is_resumed():
            return  # the state is being restored
        self._boundary.unwatch(self)
        own_step = self._own_step()
        if self._noted == own_step and not self._is_epoch_new:
            return
        self._is_epoch_new = False
        began, self._noted = time.thread_time(), own_step
        try:
            note = self._state.take(position, after, clock, self._facts(), MOST_BYTES)
            tensors = [(dtype, list(shape), data.tobytes()) for dtype, shape, data in note.tensors]
            self._link.tell(NoteScript(clock, note.tree, tensors))
        except SynclineError as error:  # the coordinator is away, or something cannot be saved
            self._tell(f"the script's state is not kept for a restart: {error}")
        except Exception as error:  # raised by an object of the script
            self._tell(f"the script's state is not kept for a restart: {type(error).__name__}: {error}")
        for name in self._state.left_out:
            self._tell(
                f"{name} has more than {MOST_BYTES >> 20} MiB: a worker that is started again gets it back from a "
                "checkpoint only (--checkpoint)"
            )
        self._cost_seconds = (self._cost_seconds[1], time.thread_time() - began)

    def handed_out(self) -> None:
        """Notes are taken earlier."""

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
            self._say(text)
