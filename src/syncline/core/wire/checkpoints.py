"""What is said about saves: the cut through a job that goes on, what everybody writes, and taking it up again."""

from __future__ import annotations

from syncline.core.checkpoint.manifest import SavedFile, SavedScript, SavedSlice
from syncline.core.wire.leases import LeaseAck
from syncline.core.wire.message import Message

#: A worker's life and clock: name, incarnation, commits.
Clock = tuple[str, int, int]


class Save(Message, frozen=True):
    """A save is wanted, by a script or by the launcher; answered with `Saved` when it is a checkpoint."""

    reason: str = ""


class Saved(Message, frozen=True):
    """A checkpoint exists. Without a name: it is made soon, at the next boundaries; who asked is to go on, since
    others wait for its step."""

    name: str
    step: int


class Expect(Message, frozen=True):
    """To a worker: a save is coming. From now on it notes its script's state at every boundary; answered with `Noted`
    when it has done so for the first time."""

    number: int


class Noted(Message, frozen=True):
    """The clock of the worker's newest boundary, and how many commits lie between two: a cut among them would have a
    part of a batch. 0: it has seen no two yet."""

    clock: int
    num_commits: int = 1


class WriteScript(Message, frozen=True):
    """To a worker: its script's state as it was noted at the boundary after this commit goes to this file.

    Answered with `WrittenScript` when it is there; when that boundary is still to come, after it.
    """

    number: int
    clock: int
    folder: str
    file: str


class WrittenScript(Message, frozen=True):
    """It is on disk. `clock`: of the boundary where it was noted; beyond the script's, a batch is only partly in."""

    script: SavedScript
    clock: int = 0


class EndSave(Message, frozen=True):
    """To workers and servers: this save is over; what was noted or marked for it is let go. Not answered."""

    number: int


class CloseSnapshotBarrier(Message, frozen=True):
    """To a server: nothing begins to count from now on, but commits up to `through`, and what those need.

    Answered with `SnapshotBarrierClosed` when all that has begun here is applied, and all of `through` is in. The
    gate opens by
    itself after a deadline; a higher number, or a higher `turn` of the same one, takes the place of the one before.
    """

    number: int
    turn: int = 0
    through: list[Clock] = []


class SnapshotBarrierClosed(Message, frozen=True):
    """What is in this server's slices, which stand still: of every worker that takes part the clock.

    `behind`: whose last commits are on some of its slices only, with the clock that all have: primaries have changed,
    and they are to be made again. `registered`: how many segments workers had with their last commit;
    `first_segment`: the first of which anything is here; what those who had less have committed is not for here.
    `acks`, `late`: of slice 0, where it is here, what was not confirmed yet.
    """

    clocks: list[Clock]
    acks: list[LeaseAck] = []
    late: list[LeaseAck] = []
    num_updates: int = 0
    has_slices: bool = True
    behind: list[Clock] = []
    registered: list[tuple[str, int, int]] = []
    first_segment: int = 0
    versions: int = 0  # of all its slices together


class Mark(Message, frozen=True):
    """To a server whose gate is closed by this number: its slices are marked as they are, and the gate opens.

    Refused when the gate has opened meanwhile. Answered with `Done`; what is marked is kept until it is written, or
    until `EndSave`, or until a save of a higher number.
    """

    number: int


class OpenSnapshotBarrier(Message, frozen=True):
    """To a server: this cut is not to be. Not answered."""

    number: int


class WriteMarked(Message, frozen=True):
    """To a server: what was marked goes to this file; answered with `WrittenMarked` when it is there."""

    number: int
    folder: str
    file: str


class WrittenMarked(Message, frozen=True):
    """It is on disk."""

    file: SavedFile
    slices: list[SavedSlice]
    num_copied: int = 0  # bytes that were copied since somebody wrote to a marked slice first
    num_waited: int = 0  # updates that waited for memory


class Resume(Message, frozen=True):
    """To a server: these slices, which it hosts, get what the checkpoint in this folder has for them.

    `digest`: of its manifest. `clocks`: with the clocks in it (a lost slice of a job that goes on); else without:
    it is another job's, or an earlier run's. `fresh`: groups, by (segment, group), whose rules' state starts afresh.
    `known`: with clocks, for each slice the highest version that was acknowledged to anybody; no version is less.
    Answered with `Done`.
    """

    folder: str
    digest: str
    slices: list[int]
    clocks: bool = False
    fresh: list[tuple[int, int]] = []
    known: list[int] = []


class AskResume(Message, frozen=True):
    """A worker asks which checkpoint the job took up. `others_first`: it has left out what the others have done, and
    wants their note rather than its own."""

    others_first: bool = False


class NoteScript(Message, frozen=True):
    """From a worker, not answered: its script's state behind this commit, for a later life of it, or for others."""

    clock: int
    tree: bytes
    tensors: list[tuple[str, list[int], bytes]]  # dtype, shape


class GivenResume(Message, frozen=True):
    """The folder of the checkpoint that the job took up, and the digest of its manifest; empty: none.

    To a worker that joined a running job: what a worker has noted last, and the newest checkpoint for all else.
    """

    folder: str = ""
    digest: str = ""
    note: NoteScript | None = None
    noted_by: str = ""  # the worker whose note it is


class Finish(Message, frozen=True):
    """A worker's script has come to its end, and it is in no rounds any more: answered when the last save is made."""
