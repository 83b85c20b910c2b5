"""What members say to each other: one small struct per verb, and who may say it.

A frame holds one message; its number on the wire is its place in `MESSAGES`. Sizes of raw buffers behind a
message follow from the registered layout.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.core.layout import ITEM_BYTES, MAX_DIMENSIONS, Parameter, Ranges, Segment
from syncline.core.membership import Address, Member
from syncline.core.rule import Option, RuleSpec
from syncline.errors import FrameError
from syncline.stats import ServerStats, StepTimes

PROTOCOL = 1
ROLES = ("coordinator", "server", "worker", "launcher")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The root of all messages."""


# -- answers ----------------------------------------------------------------------------------------------


class Done(Message, frozen=True):
    """Yes, without more to say."""


class Refused(Message, frozen=True):
    """No: the error that was raised on the other side."""

    error: str
    reason: str


# -- to the coordinator -----------------------------------------------------------------------------------


class Join(Message, frozen=True):
    """A process asks to be a member; answered when the job is whole."""

    role: str
    name: str
    host: str
    pid: int
    address: Address | None
    defaults: dict[str, Any]


class Joined(Message, frozen=True):
    """The job is whole: who one is, who the others are, and the settings that count."""

    incarnation: int
    generation: int
    members: list[Member]
    config: JobConfig


class Register(Message, frozen=True):
    """Parameters to be hosted. The chief's make the layout; the others' are compared with it."""

    ordinal: int
    parameters: list[Parameter]
    rules: list[RuleSpec]
    reduce: str


class Registered(Message, frozen=True):
    """The job's segments so far. `upload`: the chief is to send the values of this one to the servers."""

    segments: list[Segment]
    upload: int | None = None


class Uploaded(Message, frozen=True):
    """The chief's values of a segment are on the servers."""

    segment: int


class Barrier(Message, frozen=True):
    """Answered when every worker has said the same name as often."""

    name: str
    turn: int
    stretch: int


class Passed(Message, frozen=True):
    """Everyone is at the barrier. What follows is a new stretch, the same for all."""

    stretch: int


class Report(Message, frozen=True):
    """A worker's progress; not answered."""

    step: int
    samples: int
    seconds: float  # from the first sample handed out to the last
    epoch: int
    epoch_step: int
    epoch_steps: int
    times: StepTimes = StepTimes()


class AskStats(Message, frozen=True):
    """Answered with the job's numbers."""


class GivenStats(Message, frozen=True):
    """The job's numbers, as the coordinator and the servers know them."""

    seconds: float
    samples: int
    sample_seconds: float
    servers: list[ServerStats]


class Leave(Message, frozen=True):
    """This member has finished; its end is not a death."""


class Watch(Message, frozen=True):
    """The launcher asks how the job stands."""


class Standings(Message, frozen=True):
    """How the job stands, for a progress line."""

    formed: bool
    missing: list[str]
    seconds: float
    reports: dict[str, Report]
    left: list[str]
    verdict: str
    culprit: str


class Died(Message, frozen=True):
    """The launcher says how a member's process ended."""

    name: str
    reason: str


# -- from the coordinator ---------------------------------------------------------------------------------


class Host(Message, frozen=True):
    """A server is to host its slices of this segment."""

    segment: Segment


class AskServerStats(Message, frozen=True):
    """Answered with a server's numbers."""


class GivenServerStats(Message, frozen=True):
    """A server's numbers."""

    stats: ServerStats


class Over(Message, frozen=True):
    """The job has ended; `failed` says why, if it did not end well."""

    failed: bool
    culprit: str
    reason: str


# -- worker to server -------------------------------------------------------------------------------------


class Upload(Message, frozen=True):
    """The chief's first values of some slices; their bytes follow in this order."""

    segment: int
    slices: list[int]


class Attach(Message, frozen=True):
    """A worker's shared arena for one segment and slot; the memory comes with the frame."""

    segment: int
    slot: int
    num_bytes: int


class Map(Message, frozen=True):
    """A worker asks for the server's shared parameters of a segment."""

    segment: int


class Mapped(Message, frozen=True):
    """The server's shared parameters of a segment; the memory comes with the frame."""

    num_bytes: int


class Stage(Message, frozen=True):
    """Bytes (over sockets) or a place in shared memory wait at the server for this clock.

    What it says counts at the commit: ranges of parameter ids pushed, the weight, hyperparameters that differ
    from the registered ones by (segment, group). `skip`: an overflow, the round is to change nothing.
    """

    clock: int
    stretch: int
    slot: int
    pushed: Ranges
    weight: float
    skip: bool
    clip_norm: float | None
    overrides: list[tuple[int, int, dict[str, Option]]]
    slices: list[int]  # whose bytes follow
    back_at: int | None  # the position at which a worker comes back from a rest; the same at every server
    commit: bool  # with one server the commit rides on the last bucket
    pull: list[int]  # slices whose bytes go back over a socket with the answer
    parts: bool = False  # say which slices are applied while others are not yet
    rows: list[int] | None = None  # room for row-sparse gradients; refused today


class CommitStaged(Message, frozen=True):
    """What is staged for this clock counts from now on."""

    clock: int
    pull: list[int]
    parts: bool = False


class Committed(Message, frozen=True):
    """The commit is applied: versions of all slices of this server, in the order of their ids.

    With `slices`, and in a part that comes before the end: versions of these; over a socket their bytes follow.
    """

    clock: int
    versions: list[int]
    slices: list[int] = []


class AskClip(Message, frozen=True):
    """The answer to a commit with clip_norm and several servers: this server's share of the round's norm."""

    clock: int
    squared_norm: float


class GiveClip(Message, frozen=True):
    """The squared norm over all servers: the round of this clock may be applied. Answered with Committed."""

    clock: int
    squared_norm: float
    pull: list[int]
    parts: bool = False


class Prefer(Message, frozen=True):
    """The order in which this worker needs its slices; they are applied in it. What is not named comes last."""

    slices: list[int]


class Rest(Message, frozen=True):
    """This worker takes part in no more rounds of its stretch; `away`: of none at all until its next push."""

    stretch: int
    away: bool


class AskPlace(Message, frozen=True):
    """Where does the slowest worker stand? Asked by one that comes back from a rest."""


class GivenPlace(Message, frozen=True):
    """The position of the slowest active worker at this server."""

    position: int


class Pull(Message, frozen=True):
    """Parameters of some slices, at least as new as `min_version`; over a socket their bytes follow."""

    slices: list[int]
    min_version: int | None
    bytes_wanted: bool
    rows: list[int] | None = None  # room for row-sparse parameters; refused today


class Pulled(Message, frozen=True):
    """Versions of the slices asked for; their bytes follow over a socket."""

    versions: list[int]


class Verify(Message, frozen=True):
    """Were these slices still at these versions, untouched, after the copy that was just made?"""

    slices: list[int]
    versions: list[int]


class Verified(Message, frozen=True):
    """The slices that were not, with their versions now."""

    stale: list[int]
    versions: list[int]


class Pin(Message, frozen=True):
    """No update of these slices until `Unpin`, or until the connection ends."""

    slices: list[int]


class Unpin(Message, frozen=True):
    """The pinned copy is made."""

    slices: list[int]


class StateEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a rule's state for one piece: its bytes follow."""

    slice: int
    piece: int
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size, checked: nothing is allocated for a size that cannot be."""
        if self.dtype not in ITEM_BYTES or len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise FrameError(f"state of {self.dtype}{list(self.shape[:MAX_DIMENSIONS])}")
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class AskState(Message, frozen=True):
    """A rule's state on some slices."""

    slices: list[int]


class GivenState(Message, frozen=True):
    """The state asked for."""

    entries: list[StateEntry]


class LoadState(Message, frozen=True):
    """The chief gives rules their state; what is not named is forgotten."""

    slices: list[int]
    entries: list[StateEntry]


class AskWhy(Message, frozen=True):
    """For whom does this worker wait?"""


class GivenWhy(Message, frozen=True):
    """In words."""

    reason: str


MESSAGES: tuple[type[Message], ...] = (
    Done, Refused, Join, Joined, Register, Registered, Uploaded, Barrier, Passed, Report, AskStats, GivenStats,
    Leave, Watch, Standings, Died, Host, AskServerStats, GivenServerStats, Over, Upload, Attach, Map, Mapped,
    Stage, CommitStaged, Committed, AskClip, GiveClip, Rest, AskPlace, GivenPlace, Pull, Pulled, Verify,
    Verified, Pin, Unpin, AskState, GivenState, LoadState, AskWhy, GivenWhy, Prefer,
)  # fmt: skip
KIND = {message: number for number, message in enumerate(MESSAGES)}

#: Which role may ask what. Answers may come from anyone who was asked.
MAY_SAY: dict[str, frozenset[type[Message]]] = {
    "worker": frozenset({
        Join, Register, Uploaded, Barrier, Report, AskStats, Leave, Upload, Attach, Map, Stage, CommitStaged,
        GiveClip, Rest, AskPlace, Pull, Verify, Pin, Unpin, AskState, LoadState, AskWhy, Prefer,
    }),
    "server": frozenset({Join, Leave}),
    "coordinator": frozenset({Host, AskServerStats, Over}),
    "launcher": frozenset({Watch, Died}),
}  # fmt: skip
