"""What members, the launcher and the coordinator say to each other."""

from __future__ import annotations

from typing import Any

from syncline.config import JobConfig
from syncline.core.layout import Parameter, Segment
from syncline.core.members import Address, Member, Standing
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import RoundMembership
from syncline.core.rule import RuleSpec
from syncline.core.slice_state import Copy
from syncline.core.wire.leases import LeaseAck
from syncline.core.wire.message import Message
from syncline.stats import EpochProgress, JobStatus, PushBytes, SaveCounts, ServerStats, StepTimes, Wait


class Join(Message, frozen=True):
    """A process asks to be a member; answered when the job is whole. It may ask again, and is the same one."""

    role: str
    name: str
    host: str
    pid: int
    address: Address | None
    defaults: dict[str, Any]
    process: str  # drawn by the process when it starts
    kind: str  # processor and torch: copies of a slice on equal ones are equal bit by bit
    cores: str = ""  # that are its own
    num_cores: int = 0  # that it may run on


class Joined(Message, frozen=True):
    """The job is whole: who one is, who the others are, and the settings that count."""

    incarnation: int
    generation: int
    members: list[Member]
    config: JobConfig
    late: bool = False  # the job was whole before: a worker takes part after `Enter`, a server with its first slices
    finished: list[Member] = []  # as in `Roster`
    is_chief_done: bool = False  # as in `Roster`
    step: int = 0  # the job's: of the checkpoint that it goes on from
    seconds: float = 0.0  # of training so far, with what was trained before the job was taken up


class Rejoin(Message, frozen=True):
    """A member's connection to the coordinator is new: it is the same member. Answered with the roster."""

    name: str
    incarnation: int


class Roster(Message, frozen=True):
    """The membership and placement of a generation. Told to all when it changes."""

    generation: int
    members: list[Member]
    replica_sets: list[ReplicaSet]
    finished: list[Member] = []  # workers whose scripts have ended
    is_chief_done: bool = False  # one of these was the chief: no other worker becomes it


class AskLife(Message, frozen=True):
    """A worker that joined a running job asks where it stands; answered when all that counts of its name's earlier
    lives is known."""


class GivenLife(Message, frozen=True):
    """Which life of its name this worker is, and what the job and those lives have done so far."""

    number: int = 1
    step: int = 0  # of the job
    own_step: int = 0  # commits of this name's earlier lives that count
    rates: dict[str, list[float]] = {}  # learning rates that this name has used last, and others use now


class AskRoster(Message, frozen=True):
    """Answered with the roster, once its generation is at least this."""

    generation: int


class Heartbeat(Message, frozen=True):
    """A member lives. What it says of itself is shown by `status` and `why`."""

    rtt_seconds: float = 0.0  # of the beat before
    step: int = 0  # worker: acknowledged commits
    clocks: dict[str, int] = {}  # server: of every worker
    waits: list[Wait] = []
    num_refused: int = 0  # worker: pushes that were not finite
    is_quarantined: bool = False
    acks: list[LeaseAck] = []  # server: of slice 0, that were not confirmed yet
    late: list[LeaseAck] = []  # server: likewise, of commits that were late
    samples: int = 0  # worker: handed to its script so far
    work_seconds: float = 0.0  # worker: spent on them, waits left out
    num_updates: int = 0  # server: of that slice of its own that has had the most
    boundary: int = 0  # worker: its clock when its script last came for a batch, or a step
    stride: int = 0  # worker: its commits between two of these; 0: not known


class Enter(Message, frozen=True):
    """A worker that joined late, or came late to a barrier, is about to push; answered when all servers count it."""

    entry: int = 0  # so often it has entered before
    phase: int = -1  # of the loop that it is in: others may be in a later one; -1: it is in none


class Entered(Message, frozen=True):
    """From its next commit on this worker takes part; in this phase, or beside the slowest (`back_at`)."""

    phase: int
    back_at: int
    step: int = 0  # the job's steps before that commit
    num_void: int = 0  # commits with nothing in them to make first: the others are in the middle of a batch


class Retire(Message, frozen=True):
    """To a member: finish your step and leave. From a server: may I? Answered when nothing is left on it."""


class Scale(Message, frozen=True):
    """How many workers and servers there are to be from now on; None: as before."""

    workers: int | None
    servers: int | None


class AskStatus(Message, frozen=True):
    """Answered with all that the coordinator knows."""


class GivenStatus(Message, frozen=True):
    """How the job stands, for people."""

    status: JobStatus


class Register(Message, frozen=True):
    """Parameters to be hosted. The chief's make the layout; the others' are compared with it."""

    ordinal: int
    parameters: list[Parameter]
    rules: list[RuleSpec]
    reduce: str


class Registered(Message, frozen=True):
    """The job's segments so far. `upload`: the chief is to send the values of this one to the servers."""

    segments: list[Segment]
    replica_sets: list[ReplicaSet]
    generation: int
    upload: int | None = None


class Uploaded(Message, frozen=True):
    """The chief's values of a segment are on the servers."""

    segment: int


class Barrier(Message, frozen=True):
    """Answered when every worker has said the same name as often."""

    name: str
    turn: int
    phase: int


class Passed(Message, frozen=True):
    """Everyone is at the barrier. What follows is a new phase, the same for all.

    `is_away`: the others passed it before. While this worker was away, one server may have gone a round further than
    another: it stays away, and enters again with its next commit.
    """

    phase: int
    is_away: bool = False
    turn: int = 0  # the last one that was passed, when this one was passed before


class Report(Message, frozen=True):
    """A worker's progress; not answered."""

    step: int
    samples: int
    seconds: float  # from the first sample handed out to the last
    epoch: int
    epoch_step: int
    epoch_steps: int
    times: StepTimes = StepTimes()
    job_step: int = 0  # as `job.step`: with what was made before a job was taken up
    pushed: PushBytes = PushBytes()
    has_position: bool = True  # of its last commit: a new life of this worker could go on behind it
    rates: dict[str, float] = {}  # its learning rates now
    is_through: bool = False  # it has made all of the run, where its script says how long that is


class AskStats(Message, frozen=True):
    """Answered with the job's numbers."""


class GivenStats(Message, frozen=True):
    """The job's numbers, as the coordinator and the servers know them."""

    seconds: float
    samples: int
    sample_seconds: float
    servers: list[ServerStats]
    num_revoked: int = 0  # acknowledged updates that were lost with a server
    shares: dict[str, float] = {}  # of the samples, by worker
    epochs: list[EpochProgress] = []
    pushed: PushBytes = PushBytes()  # by all workers


class Leave(Message, frozen=True):
    """This member has finished, or was asked to leave; its end is not a death."""

    retired: bool = False


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
    incarnations: dict[str, int]  # of the members that live
    pushed: list[str]  # members with an acknowledged push, or a slice, since they joined
    wanted: dict[str, int]  # role: how many there are to be; in a ring of workers only
    retiring: list[str]
    num_scalings: int = 0  # how often `wanted` was said
    epochs: list[EpochProgress] = []
    step: int = 0  # the job's, as `job.step` is
    readings: dict[str, float] = {}  # the newest of each metric
    stop: str = ""  # which rule has ended training, on what value
    saves: SaveCounts = SaveCounts()
    settled: dict[str, int] = {}  # commits that count of each worker's lives that are over
    unsettled: list[str] = []  # members whose last life is over, and what of it counts is not known yet
    is_chief_done: bool = False  # the chief's script has ended well
    policy: str = ""  # that counts: the chief's script may have said it
    num_revoked: int = 0  # acknowledged updates that were lost with a server
    best: str = ""  # the best checkpoint so far, and its reading
    pushed_told: str = ""  # bytes per step, where they are few or travel


class Died(Message, frozen=True):
    """The launcher says how a member's process ended, and whether it starts another in its place."""

    name: str
    reason: str
    comes_back: bool = True
    ends_job: bool = True  # where it does not come back; False: somebody wanted it to go


class Host(Message, frozen=True):
    """A server hears of a segment and makes room for these slices of it."""

    segment: Segment
    slices: list[int]


class Prepare(Message, frozen=True):
    """The next generation, on its way. The server refuses the fenced ones from now on, finishes what it has begun,
    holds all commits, and answers how things stand; `Install` ends the hold, or `LetGo`, or a deadline.

    `replica_sets` are those of the next generation, already kept by the coordinator: who has lost its backup there
    may acknowledge alone. `moves`: primaries change, and every open commit is to be made again. `servers`, with their
    incarnations, are all that there are: from any other one no update is taken any more.
    """

    generation: int
    fenced: list[tuple[str, int]]
    replica_sets: list[ReplicaSet]
    moves: bool
    servers: list[tuple[str, int]] = []


class LetGo(Message, frozen=True):
    """The generation that was prepared is not to be for now: the hold is over. Not answered."""

    generation: int


class Prepared(Message, frozen=True):
    """How a server stands, held: who has committed what, and how far its slices are, and can come."""

    standings: list[Standing]
    num_orphans: int  # open commits of workers that are no longer there
    clocks: list[tuple[str, int, int]] = []  # name, incarnation, the highest clock on any copy here
    # Name, incarnation, the least clock that those slices can come to that are this server's, or will be, and which
    # life has been their primary until now: what that one has, where it lives, comes here before it is installed.
    reach: list[tuple[str, int, int, str]] = []
    is_primary: bool = True  # of anything; else it hears no commits, and its standings were so once, or never
    rolls: list[RoundMembership] = []  # with spare workers: all that it knows of
    # In a ring: name, incarnation and the clock up to which all slices here have what there is, or hold it.
    holds: list[tuple[str, int, int]] | None = None
    num_updates: int = 0  # of that slice of its own that has had the most
    num_open: int = 0  # rounds that are begun and not applied


class Install(Message, frozen=True):
    """The generation begins. First the fenced ones' staged commits up to these clocks count, then they are out."""

    generation: int
    members: list[Member]
    settle: list[tuple[str, int, int]]  # name, incarnation, clock
    standings: list[Standing]  # of those who take part from now on
    rolls: list[RoundMembership] = []  # with spare workers: all that any server knows of


class SeedTo(Message, frozen=True):
    """A primary is to give these slices a backup on this server; answered when it has them all."""

    slices: list[int]
    target: Member


class AskCopies(Message, frozen=True):
    """Which versions of these slices does this worker have a copy of?"""

    slices: list[int]


class GivenCopies(Message, frozen=True):
    """The versions landed, with the clocks they contain, and the highest version that was ever acknowledged here."""

    copies: list[Copy]


class GiveCopies(Message, frozen=True):
    """A worker is to bring its copies of these slices to their new primary; answered when they are there."""

    copies: list[Copy]
    target: Member


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


class AskWhy(Message, frozen=True):
    """For whom does this worker wait?"""

    step: int = 0
    servers: list[str] = []  # that have not answered


class GivenWhy(Message, frozen=True):
    """In words."""

    reason: str
    is_awaited: bool = False  # by a server's word: its oldest open round waits for who asks
