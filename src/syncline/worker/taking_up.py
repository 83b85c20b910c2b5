"""In a job that took up a checkpoint: what its scripts saved is put back, until they go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from syncline.core.checkpoint.manifest import SavedScript
from syncline.core.wire.checkpoints import AskResume, GivenResume, NoteScript
from syncline.core.wire.message import Message
from syncline.errors import ProtocolError, StoreError
from syncline.store.checkpoints import read_manifest
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorReader
from syncline.worker.arrays import Bytes
from syncline.worker.boundary import Boundary, Position
from syncline.worker.encoding import TREE, from_json
from syncline.worker.script import SavedState, ScriptState

#: Where a script may stand, besides its loops, when it comes to the place again.
PLACES = ("barrier", "save")


class TakenUp:
    """Puts the script's state back at every boundary up to the place where it was noted, or the first batch.

    So what the script does on its way there, a scheduler stepped in loops over epochs that are finished, is undone.
    """

    def __init__(
        self, name: str, boundary: Boundary, ask: Callable[[Message], Message], *, may_be: bool, is_late: bool = False
    ) -> None:  # fmt: skip
        """`may_be`: there are checkpoints in this job at all, or others have gone on before this worker came."""
        self._name, self._boundary, self._ask = name, boundary, ask
        self._is_late = is_late
        self._state: ScriptState | None = None
        self._saved: SavedState | None = None
        self._is_known = not may_be
        self._reached = False
        self.own_step = 0  #: steps that this worker had made before
        self.is_over = not may_be  #: the script goes on by itself

    def begin(self, state: ScriptState) -> None:
        self._state = state
        if not self.is_over:
            self._boundary.watch(self)
            self._boundary.comes_to_place = lambda: self.name  # what was saved is read: others may look at the place

    def saved(self) -> SavedState | None:
        """What this worker's script saved, or the chief's where it saved nothing. In the script's thread."""
        if not self._is_known:
            self._is_known = True
            answer = self._ask(AskResume())
            if not isinstance(answer, GivenResume):
                raise ProtocolError(f"{type(answer).__name__} is no answer about what was taken up")
            behind = read_script(self._name, answer.folder, answer.digest) if answer.folder else None
            self._saved = self._noted(answer, behind) or behind
            if self._saved is None:
                self._end()
            else:
                self.own_step = self._saved.own_step
        return self._saved

    def _noted(self, answer: GivenResume, behind: SavedState | None = None) -> SavedState | None:
        if answer.note is None:
            return None
        found = noted_script(answer.note, answer.noted_by, is_own=answer.noted_by == self._name)
        found.behind = behind  # what was too large for a note
        return found

    def went_on(self) -> None:
        """This script has left out epochs that the others have made, with all that scripts do in them, such as a
        scheduler's step: their state comes here."""
        if not self._is_late or self._state is None:
            return
        answer = self._ask(AskResume(others_first=True))
        if isinstance(answer, GivenResume) and (saved := self._noted(answer)) is not None and not saved.is_own:
            self._state.put_back(saved, random=False)

    @property
    def name(self) -> str:
        """Of the checkpoint, while it is being put back."""
        saved = None if self.is_over else self.saved()
        return saved.name if saved is not None else ""

    def put_back(self) -> None:
        """Now, if it is not over."""
        if not self.is_over and (saved := self.saved()) is not None:
            assert self._state is not None
            self._state.put_back(saved)

    def begins_step(self) -> None:
        """An optimizer's step begins, in a script without a loop over our loaders: but for the random states, which
        it has drawn from for this step, everything is as it was saved."""
        saved = None if self.is_over else self.saved()
        if saved is not None and saved.position[0] == "step" and not self._boundary.is_in_loop():
            assert self._state is not None
            self._state.put_back(saved, random=False)

    def at(self, position: Position, after: int, clock: int, *, waits: bool) -> None:
        if waits:  # also another thread's; where the script stands again where it stood
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


def noted_script(note: NoteScript, name: str, *, is_own: bool) -> SavedState:
    """What a worker has noted of its script, checked as a file is."""
    tensors = [np.frombuffer(data, np.uint8).copy() for _, _, data in note.tensors]

    def read(number: int) -> Bytes:
        if not 0 <= number < len(tensors):
            raise StoreError(f"the note of {name} has no tensor {str(number)[:40]}")
        return tensors[number]

    found = SavedState(f"the note of {name}", from_json(note.tree), read, is_own)
    before = found.tree["facts"].get("before", 0)
    found.own_step = before if type(before) is int else 0  # the job itself knows what was made since
    return found


def read_script(name: str, url: str, digest: str) -> SavedState | None:
    """What a checkpoint has of this worker's script, read and checked; None: no script was saved with it."""
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

    return SavedState(manifest.name, tree, read, is_own=script.worker == name)


def _script_of(name: str, scripts: Sequence[SavedScript]) -> SavedScript | None:
    """Its own, else that of the first worker."""

    def number(script: SavedScript) -> tuple[bool, int, str]:
        digits = script.worker.rpartition("-")[2]
        return script.worker != name, int(digits) if digits.isdecimal() else 1 << 60, script.worker

    return min(scripts, key=number, default=None)
