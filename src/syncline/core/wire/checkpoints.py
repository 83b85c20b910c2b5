"""Messages about saves: the snapshot of a running job, writing it, and resuming from it."""

from __future__ import annotations

from syncline.core.checkpoint.manifest import SavedFile, SavedScript, SavedSlice
from syncline.core.wire.leases import LeaseAck
from syncline.core.wire.message import Message

#: A worker's life and clock: name, incarnation, commits.
Clock = tuple[str, int, int]


class Save(Message, frozen=True):
    """A script or the launcher requests a save; answered with `Saved`."""

    reason: str = ""


class Saved(Message, frozen=True):
    """A checkpoint exists. Without a name, it is made soon, at the next boundaries; the caller must go on, since
    others wait for its step.
    """

    name: str
    step: int


class Expect(Message, frozen=True):
    """To a worker: a save is coming. It notes its script's state at every boundary from now on; answered with
    `Noted` after the first note.
    """

    number: int


class Noted(Message, frozen=True):
    """The clock of the worker's newest boundary, and the commits between two boundaries (0: unknown). A snapshot
    between boundaries would split a batch.
    """

    clock: int
    num_commits: int = 1
    step: int = 0  # with --sync-every: this worker's steps at that boundary, also before a resume
    steps_per_push: int = 1


class WriteScript(Message, frozen=True):
    """To a worker: write the script's state noted at the boundary after this commit.

    Answered with `WrittenScript` when it is written; if that boundary is still to come, after it.
    """

    number: int
    clock: int
    folder: str
    file: str


class WrittenScript(Message, frozen=True):
    """The script state is on disk. `clock`: of the boundary where it was noted; if it is beyond the requested one,
    a batch is only partly included.
    """

    script: SavedScript
    clock: int = 0


class EndSave(Message, frozen=True):
    """To workers and servers: this save is over; notes and marks for it are dropped. Not answered."""

    number: int


class CloseSnapshotBarrier(Message, frozen=True):
    """To a server: hold all commits except those up to `through` and what they need.

    Answered with `SnapshotBarrierClosed` when everything started here is applied and all of `through` is in. The
    barrier opens by itself after a deadline. A higher number, or a higher `turn` of the same number, replaces the
    earlier request. `is_save`: gathered pushes are applied first, since a checkpoint holds none; a cut leaves them.
    `seconds`: the deadline; 0: the server's own.
    """

    number: int
    turn: int = 0
    through: list[Clock] = []
    is_save: bool = True
    seconds: float = 0.0


class SnapshotBarrierClosed(Message, frozen=True):
    """The clocks of all participating workers on this server's slices, which are idle.

    `behind`: workers whose last commits are on some slices only, with the clock that all have: primaries have
    changed, and these commits will be replayed. `registered`: the segments that workers had at their last commit.
    `first_segment`: the first segment with slices here; commits of workers with fewer segments are not for this
    server. `acks`, `late`: unconfirmed lease ranges, if slice 0 is here.
    """

    clocks: list[Clock]
    acks: list[LeaseAck] = []
    late: list[LeaseAck] = []
    num_updates: int = 0
    has_slices: bool = True
    behind: list[Clock] = []
    registered: list[tuple[str, int, int]] = []
    first_segment: int = 0
    versions: int = 0  # the sum over its slices


class Mark(Message, frozen=True):
    """To a server whose barrier is closed by this number: mark the slices and open the barrier.

    Refused if the barrier has opened meanwhile. Answered with `Done`. Marks are kept until they are written, until
    `EndSave`, or until a save of a higher number.
    """

    number: int


class OpenSnapshotBarrier(Message, frozen=True):
    """To a server: the snapshot attempt was given up. Not answered."""

    number: int


class WriteMarked(Message, frozen=True):
    """To a server: write the marked slices to this file; answered with `WrittenMarked`."""

    number: int
    folder: str
    file: str


class WrittenMarked(Message, frozen=True):
    """The marked slices are on disk."""

    file: SavedFile
    slices: list[SavedSlice]
    num_copied: int = 0  # bytes copied because an update changed a marked slice before it was written
    num_waited: int = 0  # updates that waited for memory


class Resume(Message, frozen=True):
    """To a server: load these slices from the checkpoint in this folder.

    `digest`: of its manifest. `clocks`: keep the saved clocks (a lost slice of a running job); otherwise drop them
    (another job, or an earlier run). `fresh`: groups, by (segment, group), whose rule state starts afresh. `known`:
    with clocks, the highest acknowledged version of each slice; no version may be less. Answered with `Done`.
    """

    folder: str
    digest: str
    slices: list[int]
    clocks: bool = False
    fresh: list[tuple[int, int]] = []
    known: list[int] = []


class AskResume(Message, frozen=True):
    """A worker asks which checkpoint the job resumed from. `others_first`: it skipped steps of others and prefers
    their note to its own.
    """

    others_first: bool = False


class NoteScript(Message, frozen=True):
    """From a worker, not answered: its script's state after this commit, for its later life or for others."""

    clock: int
    tree: bytes
    tensors: list[tuple[str, list[int], bytes]]  # dtype, shape


class GivenResume(Message, frozen=True):
    """The folder and manifest digest of the checkpoint that the job resumed from; empty: none.

    To a worker that joined a running job: the last note of a worker, and the newest checkpoint for everything else.
    """

    folder: str = ""
    digest: str = ""
    note: NoteScript | None = None
    noted_by: str = ""  # the worker that took the note


class Finish(Message, frozen=True):
    """A worker's script has ended, and it takes part in no more rounds. Answered after the last save and cut."""
