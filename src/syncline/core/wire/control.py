"""Messages between members, the launcher and the coordinator."""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.core.layout import Parameter, Segment
from syncline.core.members import Address, Member, Standing
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import RoundMembership
from syncline.core.rule import RuleSpec
from syncline.core.slice_state import Copy
from syncline.core.versions import InstalledVersions
from syncline.core.wire.leases import LeaseAck
from syncline.core.wire.message import Message
from syncline.stats import (
    EpochProgress,
    JobLook,
    JobStatus,
    JobVerdict,
    MemberStats,
    PushBytes,
    SaveCounts,
    ServerStats,
    StageStats,
    StepTimes,
    Wait,
)


class Join(Message, frozen=True):
    """A process asks to join; answered when the job is formed. It may ask again and keeps its identity."""

    role: str
    name: str
    host: str
    pid: int
    address: Address | None
    defaults: dict[str, Any]
    process: str  # drawn by the process when it starts
    kind: str  # processor and torch: equal kinds compute bit-equal results
    cores: str = ""  # pinned to it
    num_cores: int = 0  # that it may run on
    versions: InstalledVersions | None = None  # of a rank of another launcher; None: nothing to compare


class Joined(Message, frozen=True):
    """The job is formed: the member's identity, the other members, and the effective settings."""

    incarnation: int
    generation: int
    members: list[Member]
    config: JobConfig
    late: bool = False  # the job was running: a worker takes part after `Enter`, a server with its first slices
    finished: list[Member] = []  # as in `Roster`
    is_chief_done: bool = False  # as in `Roster`
    step: int = 0  # of the checkpoint that the job resumed from
    seconds: float = 0.0  # training time so far, including before the job resumed


class Rejoin(Message, frozen=True):
    """A member has a new connection to the coordinator. Answered with the roster."""

    name: str
    incarnation: int


class Roster(Message, frozen=True):
    """Members and replica sets of a generation. Sent to all members when it changes."""

    generation: int
    members: list[Member]
    replica_sets: list[ReplicaSet]
    finished: list[Member] = []  # workers whose scripts have ended
    is_chief_done: bool = False  # the chief is among these: no other worker becomes the chief


class AskLife(Message, frozen=True):
    """A worker that joined a running job asks for its position; answered when the commits of its name's earlier
    lives are settled.
    """


class GivenLife(Message, frozen=True):
    """The number of this life, and the progress of the job and of earlier lives."""

    number: int = 1
    step: int = 0  # of the job
    own_step: int = 0  # commits of earlier lives that count
    rates: dict[str, list[float]] = {}  # last learning rates of this name, and current ones of other workers
    local_steps: int = 0  # with --sync-every: the steps in these commits, as far as reported; 0: unknown


class AskRoster(Message, frozen=True):
    """Answered with the roster, once its generation is at least this."""

    generation: int


class Heartbeat(Message, frozen=True):
    """A sign of life. `status` and `why` show its content."""

    rtt_seconds: float = 0.0  # of the previous heartbeat
    step: int = 0  # worker: acknowledged commits
    clocks: dict[str, int] = {}  # server: of every worker
    waits: list[Wait] = []
    num_refused: int = 0  # worker: pushes that were not finite
    is_quarantined: bool = False
    acks: list[LeaseAck] = []  # server of slice 0: not confirmed yet
    late: list[LeaseAck] = []  # server of slice 0: of late commits
    samples: int = 0  # worker: handed to its script so far
    work_seconds: float = 0.0  # worker: spent on them, waits left out
    num_updates: int = 0  # server: the most of any of its slices
    boundary: int = 0  # worker: its clock at the last boundary
    stride: int = 0  # worker: commits between two boundaries; 0: unknown
    stats: MemberStats | None = None  # once a second


class Enter(Message, frozen=True):
    """A worker that joined late, or came late to a barrier, is about to push; answered when all servers count it."""

    entry: int = 0  # how often it has entered before
    phase: int = -1  # of its loop: others may be in a later one; -1: in none


class Entered(Message, frozen=True):
    """This worker takes part from its next commit on; in this phase, or level with the slowest worker (`back_at`)."""

    phase: int
    back_at: int
    step: int = 0  # the job's steps before that commit
    num_void: int = 0  # void commits to make first: the others are in the middle of a batch


class Retire(Message, frozen=True):
    """To a member: finish your step and leave. From a server: asks to leave; answered when it hosts nothing."""


class Scale(Message, frozen=True):
    """The wanted numbers of workers and servers; None: unchanged."""

    workers: int | None
    servers: int | None


class AskStatus(Message, frozen=True):
    """Answered with everything the coordinator knows."""


class GivenStatus(Message, frozen=True):
    """The status of the job, for people."""

    status: JobStatus


class Register(Message, frozen=True):
    """Parameters to host. The chief's define the layout; those of others are compared with it."""

    ordinal: int
    parameters: list[Parameter]
    rules: list[RuleSpec]
    reduce: str


class Registered(Message, frozen=True):
    """The job's segments so far. `upload`: the chief must upload the values of this one."""

    segments: list[Segment]
    replica_sets: list[ReplicaSet]
    generation: int
    upload: int | None = None


class AskNominal(Message, frozen=True):
    """A worker's first step in bounded or async: which weight counts in full? The chief's first one does."""

    weight: float  # of its own first step
    insists: bool = False  # the chief has made no step for long: take this worker's


class GivenNominal(Message, frozen=True):
    """The job's nominal weight; 0: the chief has made no step yet."""

    weight: float


class Uploaded(Message, frozen=True):
    """The chief's values of a segment are on the servers."""

    segment: int


class Barrier(Message, frozen=True):
    """Answered when every worker has arrived at this barrier as often. `values`: numbers to merge, with weights."""

    name: str
    turn: int
    phase: int
    values: dict[str, tuple[float, float]] = {}


class Passed(Message, frozen=True):
    """All workers are at the barrier. A new phase follows, the same for all.

    `is_away`: the others passed it earlier. Meanwhile one server may be a round ahead of another, so this worker
    stays out and enters with its next commit.
    """

    phase: int
    is_away: bool = False
    turn: int = 0  # if passed earlier: the last turn that was passed
    values: dict[str, float] = {}  # weighted means over the workers that came with values


class CommittedSteps(msgspec.Struct, frozen=True, array_like=True):
    """With local steps: how many steps of a worker are in its commits, over all its lives."""

    commits: int = 0
    steps: int = 0
    steps_per_push: int = 1

    def at(self, commits: int) -> int:
        """The steps in so many commits; those after the report are assumed to be as long as the last."""
        return max(0, self.steps + (commits - self.commits) * self.steps_per_push)


class Report(Message, frozen=True):
    """A worker's progress; not answered."""

    step: int
    samples: int
    seconds: float  # from the first sample handed out to the last
    epoch: int
    epoch_step: int
    epoch_steps: int
    times: StepTimes = StepTimes()
    job_step: int = 0  # like `job.step`, including steps before a resume
    pushed: PushBytes = PushBytes()
    has_position: bool = True  # of its last commit: a restarted worker could continue after it
    rates: dict[str, float] = {}  # its learning rates now
    is_through: bool = False  # it has finished the run, if its script says how long that is
    committed: CommittedSteps = CommittedSteps()  # with --sync-every
    stages: list[StageStats] = []  # of a pipeline, its processes


class AskStats(Message, frozen=True):
    """Answered with the job's numbers."""


class GivenStats(Message, frozen=True):
    """The job's numbers, as the coordinator and the servers know them."""

    seconds: float
    samples: int
    sample_seconds: float
    servers: list[ServerStats]
    num_revoked: int = 0  # acknowledged updates that were lost with a server
    shares: dict[str, float] = {}  # share of the samples by worker
    epochs: list[EpochProgress] = []
    pushed: PushBytes = PushBytes()  # by all workers


class Leave(Message, frozen=True):
    """This member has finished, or was asked to leave; this is not a death.

    `comes_back`: it was asked to leave, and what started its process starts it again.
    """

    retired: bool = False
    comes_back: bool = False


class Ending(Message, frozen=True):
    """To all members: the job is saved, then it ends. A member that was told to leave stays for the save, for so long
    at most. Not answered.
    """

    seconds: float


class Watch(Message, frozen=True):
    """The launcher asks for the standings."""


class Standings(Message, frozen=True):
    """The progress of the job, for a progress line."""

    formed: bool
    missing: list[str]
    seconds: float
    reports: dict[str, Report]
    left: list[str]
    verdict: str
    culprit: str
    incarnations: dict[str, int]  # of live members
    pushed: list[str]  # members with an acknowledged push or a slice since they joined
    wanted: dict[str, int]  # role -> wanted number; in a ring of workers only
    retiring: list[str]
    num_scalings: int = 0  # how often `wanted` was set
    epochs: list[EpochProgress] = []
    step: int = 0  # the job's, as `job.step` is
    readings: dict[str, float] = {}  # the newest of each metric
    stop: str = ""  # the rule and value that ended training
    saves: SaveCounts = SaveCounts()
    settled: dict[str, int] = {}  # counted commits of each worker's past lives
    unsettled: list[str] = []  # members whose last life is not settled yet
    is_chief_done: bool = False  # the chief's script has ended well
    policy: str = ""  # effective: the chief's script may have set it
    num_revoked: int = 0  # acknowledged updates that were lost with a server
    best: str = ""  # the best checkpoint so far, and its reading
    pushed_told: str = ""  # bytes per step, if encoded or sent over the network
    lag: int = 0  # commits that the slowest worker is behind the fastest
    long_wait: str = ""  # who waits for whom, if that is long
    verdicts: list[JobVerdict] = []


class Died(Message, frozen=True):
    """The launcher reports how a member's process ended, and whether it is restarted."""

    name: str
    reason: str
    comes_back: bool = True
    ends_job: bool = True  # if it is not restarted; False: it was asked to go


class Host(Message, frozen=True):
    """To a server: a segment; allocate these slices of it."""

    segment: Segment
    slices: list[int]


class Prepare(Message, frozen=True):
    """A reconfiguration begins. The server refuses fenced workers, finishes started updates, holds all commits, and
    replies with its state. `Install`, `LetGo` or a deadline ends the hold.

    `replica_sets`: those of the next generation, already journaled: a slice without its backup may acknowledge alone.
    `moves`: primaries change, and open commits must be replayed. `servers`: all current servers with incarnations;
    updates of any others are refused. `times`: how many times its usual time the hold lasts.
    """

    generation: int
    fenced: list[tuple[str, int]]
    replica_sets: list[ReplicaSet]
    moves: bool
    servers: list[tuple[str, int]] = []
    times: float = 1.0


class LetGo(Message, frozen=True):
    """The prepared generation was cancelled: the hold ends. Not answered."""

    generation: int


class Prepared(Message, frozen=True):
    """The state of a held server: the workers' standings, and the clocks of its slices."""

    standings: list[Standing]
    num_orphans: int  # open commits of removed workers
    clocks: list[tuple[str, int, int]] = []  # name, incarnation, the highest clock on any copy here
    # Name, incarnation, the least clock that this server's current or future slices can reach, and the incarnation of
    # their primary so far. If that primary is alive, its updates arrive before the Install.
    reach: list[tuple[str, int, int, str]] = []
    is_primary: bool = True  # False: it receives no commits, and its standings are outdated
    round_memberships: list[RoundMembership] = []  # with spare workers: all that it knows of
    # In a ring: name, incarnation and the clock up to which all slices here have or hold everything.
    holds: list[tuple[str, int, int]] | None = None
    num_updates: int = 0  # the most of any of its slices
    num_open: int = 0  # rounds that are open and not applied


class Install(Message, frozen=True):
    """The generation begins. First the staged commits of fenced workers count up to these clocks, then the workers
    are removed.
    """

    generation: int
    members: list[Member]
    settle: list[tuple[str, int, int]]  # name, incarnation, clock
    standings: list[Standing]  # of the workers that take part from now on
    round_memberships: list[RoundMembership] = []  # with spare workers: all that any server knows of


class SeedTo(Message, frozen=True):
    """To a primary: seed these slices on this server; answered when all are there."""

    slices: list[int]
    target: Member


class AskCopies(Message, frozen=True):
    """To a worker: which versions of these slices do you have copies of?"""

    slices: list[int]


class GivenCopies(Message, frozen=True):
    """The versions of the copies, their clocks, and the highest version ever acknowledged to this worker."""

    copies: list[Copy]


class GiveCopies(Message, frozen=True):
    """To a worker: send your copies of these slices to their new primary; answered when they are there."""

    copies: list[Copy]
    target: Member


class AskServerStats(Message, frozen=True):
    """Answered with a server's numbers."""


class GivenServerStats(Message, frozen=True):
    """A server's numbers."""

    stats: ServerStats


class Over(Message, frozen=True):
    """The job has ended; `failed` is the reason if it failed."""

    failed: bool
    culprit: str
    reason: str


class AskLook(Message, frozen=True):
    """From outside: the newest look at the job."""


class GivenLook(Message, frozen=True):
    """None: the job is not looked at yet."""

    look: JobLook | None


class AskPage(Message, frozen=True):
    """From outside: a link that opens the web page once."""


class GivenPage(Message, frozen=True):
    """The link; empty if the job has no page."""

    link: str


class AskWhy(Message, frozen=True):
    """Asks whom this worker waits for."""

    step: int = 0
    servers: list[str] = []  # that have not answered


class GivenWhy(Message, frozen=True):
    """The reason in words."""

    reason: str
    is_awaited: bool = False  # from a server: its oldest open round waits for the caller
    verdicts: list[JobVerdict] = []  # from the coordinator: what is slow or wrong with the job
