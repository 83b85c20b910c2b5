"""Messages between workers and servers, and among servers.

Sizes of the raw buffers after a message follow from the registered layout.
"""

from __future__ import annotations

import math

import msgspec

from syncline.core.layout import ITEM_BYTES, MAX_DIMENSIONS, Ranges
from syncline.core.ring import Ballot
from syncline.core.rounds import RoundMembership
from syncline.core.rule import Option
from syncline.core.slice_state import Copy
from syncline.core.wire.leases import LeaseAck
from syncline.core.wire.message import Message
from syncline.errors import FrameError


class StateEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a rule's state for one piece: its bytes follow."""

    slice: int
    piece: int
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size. Invalid sizes are refused before anything is allocated."""
        if self.dtype not in ITEM_BYTES or len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise FrameError(f"state of {self.dtype}{list(self.shape[:MAX_DIMENSIONS])}")
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Upload(Message, frozen=True):
    """The chief's initial values of some slices; their bytes follow in this order."""

    segment: int
    slices: list[int]
    again: bool = False  # also after updates: the only worker of a job has changed them


class Attach(Message, frozen=True):
    """A worker's shared arena for one segment and slot; the memory comes with the frame."""

    segment: int
    slot: int
    num_bytes: int


class AttachDevice(Message, frozen=True):
    """A worker's memory on a GPU for one segment and slot: its gradients, behind them room for as many bytes of
    parameters. The server maps it.
    """

    segment: int
    slot: int
    num_bytes: int  # of the segment
    device: str  # the UUID of the GPU
    namespace: str  # of the handles
    memory: bytes
    filled: bytes  # an event: the gradients of a commit are there when it is sent
    answered: bytes  # an event: the server has read them, and its parameters are there when it answers


class AttachedDevice(Message, frozen=True):
    """Whether the server has mapped it."""

    refusal: str = ""  # why not: gradients go through host memory


class DetachDevice(Message, frozen=True):
    """The server is to let go of a worker's arenas on the GPU for this segment."""

    segment: int


class AskHosted(Message, frozen=True):
    """Asks where the slices lie whose primary is this server."""


class Hosted(Message, frozen=True):
    """Memory blocks, and the place of every slice: slice, block, offset."""

    blocks: list[tuple[int, int]]  # number, bytes
    slices: list[tuple[int, int, int]]


class Map(Message, frozen=True):
    """A worker asks for a block of the server's shared parameters."""

    block: int


class Mapped(Message, frozen=True):
    """The block asked for; the memory comes with the frame."""

    num_bytes: int


class Restore(Message, frozen=True):
    """A worker's copy of a slice whose server is lost; its bytes follow."""

    copy: Copy


class ShareRegion(Message, frozen=True):
    """A primary's memory for updates to a backup; it comes with the frame."""

    number: int
    num_bytes: int


class Seed(Message, frozen=True):
    """A full copy of a slice for its new backup: the bytes of its parameters, then of its rule state, follow."""

    slice: int
    version: int
    clocks: list[tuple[str, int, int]]  # name, incarnation, clock
    fences: list[tuple[str, int]]
    entries: list[StateEntry]
    lent: int | None  # shared memory for updates, and the offset in it
    offset: int = 0
    acks: list[LeaseAck] = []  # slice 0: unconfirmed
    late: list[LeaseAck] = []  # slice 0: unconfirmed, of late commits


class Replicate(Message, frozen=True):
    """A primary's next update of a slice. The backup applies it before the primary does.

    The gradient of the pieces in `has` lies in shared memory, or follows.
    """

    slice: int
    version: int  # of the slice before the update
    clocks: list[tuple[str, int, int]]
    fences: list[tuple[str, int]]
    has: list[int]  # pieces with a gradient
    overrides: list[tuple[int, dict[str, Option]]]  # group, hyperparameters
    scale: float
    wants_digest: bool = False
    acks: list[LeaseAck] = []  # slice 0: lease ranges used by these commits
    late: list[LeaseAck] = []  # slice 0: lease ranges of late commits
    round_membership: RoundMembership | None = (
        None  # with spare workers: of their round, or of the round that they missed
    )
    ballot: Ballot | None = None  # in a ring: the update is held until all have voted for this
    codec: str = ""  # in a ring: of the bytes that follow
    sizes: list[int] = []  # of the units of the slice, as in Stage
    counts: float = 1.0  # in bounded and async: how much it counts, by its weight
    gather: int = 0  # the update is held until its group has so many; 1 without pieces: what is held is applied


class Vote(Message, frozen=True):
    """In a ring, from a server to all others: every server holds the sums of this server's slices for this round."""

    ballot: Ballot


class GroupStoreKey(Message, frozen=True):
    """In a ring with a process group, from a server to all others: a key of torch.distributed's store."""

    generation: int
    key: str
    value: bytes


class ShareSums(Message, frozen=True):
    """In a ring, from a host leader to its local peers: memory for sums, which comes with the frame."""

    generation: int
    num_bytes: int
    places: list[tuple[int, int]]  # slice, offset


class HostSum(Message, frozen=True):
    """From a host leader to the primary of a slice: the sum of its host's gradients. Its bytes follow, in the
    precision of the sum.
    """

    generation: int
    round: int  # index within this generation, from 0
    slice: int
    again: bool = False  # replaces a sum that was made during backward, for a round that turned out otherwise


class WholeSum(Message, frozen=True):
    """A round's sum of a slice: from its primary to host leaders, from them to their local peers. Its bytes
    follow, or lie in shared memory until this is answered.
    """

    generation: int
    round: int
    slice: int
    again: bool = False


class Replicated(Message, frozen=True):
    """The backup has applied it and is at this version."""

    version: int
    digest: bytes = b""


class Stage(Message, frozen=True):
    """Bytes (over sockets) or shared memory staged for this clock.

    The rest counts at the commit: ranges of pushed parameter ids, the weight, and hyperparameters that differ from
    the registered ones by (segment, group). `skip`: an overflow; the round must change nothing.
    """

    clock: int
    phase: int
    slot: int
    pushed: Ranges
    weight: float
    skip: bool
    clip_norm: float | None
    overrides: list[tuple[int, int, dict[str, Option]]]
    slices: list[int]  # whose bytes follow
    back_at: int | None  # the position at which a worker returns from a rest; the same at every server
    commit: bool  # with one server the last bucket contains the commit
    pull: list[int]  # slices whose bytes go back over a socket with the answer
    parts: bool = False  # say which slices are applied while others are not yet
    rows: list[int] | None = None  # room for row-sparse gradients; refused today
    acks: list[LeaseAck] = []  # what of leases this commit has used
    num_segments: int = 0  # that this worker has registered
    codec: str = ""  # by which slices are encoded, those that `sizes` has sizes for
    sizes: list[list[int]] = []  # of the pieces of each slice, in bytes; -1: not sent; none: as it lies
    ready: list[int] = []  # before the commit: slices that lie in shared memory as they will be, it seems
    edited: bool = False  # at the commit: some of the slices staged before it have changed since
    early: bool = False  # at the commit: slices were staged before it, to be added up
    nominal: float = 1.0  # in bounded and async: the weight of a push that counts in full
    squared_norm: float = 0.0  # with --aggregate norm-clipped: of its gradients, over all servers
    reads: bool = True  # at the commit: the worker takes new parameters when it is answered


class CommitStaged(Message, frozen=True):
    """Commits what is staged for this clock."""

    clock: int
    pull: list[int]
    parts: bool = False
    round_membership: RoundMembership | None = (
        None  # with spare workers and several servers: the word of the one that has slice 0
    )
    reads: bool = True  # as in Stage


class Committed(Message, frozen=True):
    """The commit is applied: versions of all slices of this server, ordered by id.

    With `slices`, and in a part before the end: versions of these; over a socket their bytes follow.
    """

    clock: int
    versions: list[int]
    slices: list[int] = []
    clocks: dict[str, int] = {}  # with one replica: upper bound of the workers' clocks in these versions
    late: bool = False  # its round was closed before: nothing of it is applied
    round_membership: RoundMembership | None = (
        None  # with spare workers and several servers: to be sent to the other servers
    )
    skipped: bool = False  # an overflow at some worker: the round changed nothing
    codec: str = ""  # as in Stage
    sizes: list[list[int]] = []


class AskClip(Message, frozen=True):
    """The answer to a commit with clip_norm and several servers: this server's share of the round's norm."""

    clock: int
    squared_norm: float
    round_membership: RoundMembership | None = None  # as in Committed


class GiveClip(Message, frozen=True):
    """The squared norm over all servers: the round of this clock may be applied. Answered with Committed."""

    clock: int
    squared_norm: float
    pull: list[int]
    parts: bool = False
    reads: bool = True  # as in Stage


class Prefer(Message, frozen=True):
    """The order in which this worker needs its slices, and in which they are applied. Others come last."""

    slices: list[int]


class Rest(Message, frozen=True):
    """This worker takes part in no more rounds of its phase; `at_barrier`: in none until its next push."""

    phase: int
    at_barrier: bool


class AskPlace(Message, frozen=True):
    """Asks for the position of the slowest worker, before a worker returns from a rest."""


class GivenPlace(Message, frozen=True):
    """The position of the slowest active worker at this server."""

    position: int


class Pull(Message, frozen=True):
    """Parameters of some slices, at least as new as `min_version`; over a socket their bytes follow."""

    slices: list[int]
    min_version: int | None
    bytes_wanted: bool
    rows: list[int] | None = None  # reserved for row-sparse parameters; refused today


class Pulled(Message, frozen=True):
    """Versions of the slices asked for; their bytes follow over a socket."""

    versions: list[int]
    clocks: dict[str, int] = {}  # with one replica: upper bound of the workers' clocks in these versions


class Verify(Message, frozen=True):
    """Asks whether these slices kept these versions while they were copied; `counted`: and how many commits each of
    them has.
    """

    slices: list[int]
    versions: list[int]
    counted: bool = False


class Verified(Message, frozen=True):
    """The slices that did not, with their current versions."""

    stale: list[int]
    versions: list[int]
    clocks: dict[str, int] = {}  # with one replica: upper bound of the workers' clocks in these versions
    counts: list[int] = []  # if `counted`: commits of each slice asked for, at these versions


class Pin(Message, frozen=True):
    """Blocks updates of these slices until `Unpin`, or until the connection ends."""

    slices: list[int]


class Unpin(Message, frozen=True):
    """The pinned copy is made."""

    slices: list[int]


class AskState(Message, frozen=True):
    """Asks for the rule state of some slices; `key`: only this entry."""

    slices: list[int]
    key: str = ""


class GivenState(Message, frozen=True):
    """The state asked for."""

    entries: list[StateEntry]


class LoadState(Message, frozen=True):
    """The chief sets rule state; entries that are not named are dropped.

    `about`: announces the load: between 1 and 2 some servers may have it and others not, so no snapshot is taken.
    """

    slices: list[int]
    entries: list[StateEntry]
    about: int = 0
