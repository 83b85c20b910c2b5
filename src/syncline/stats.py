"""Numbers that objects keep about themselves; whatever shows numbers only reads these."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec


class WireStats(msgspec.Struct, frozen=True, kw_only=True):
    """What went over one connection, or over several added up."""

    frames_sent: int = 0
    frames_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: WireStats) -> WireStats:
        return WireStats(
            frames_sent=self.frames_sent + other.frames_sent,
            frames_received=self.frames_received + other.frames_received,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_received=self.bytes_received + other.bytes_received,
        )


class PushBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What pushes took of each way: gradients or deltas, as they were sent."""

    socket: int = 0  #: over sockets; encoded where the job has a codec
    shared: int = 0  #: in memory that servers read in place

    def __add__(self, other: PushBytes) -> PushBytes:
        return PushBytes(socket=self.socket + other.socket, shared=self.shared + other.shared)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of one worker's steps went."""

    num_steps: int = 0
    compute: float = 0.0  #: the script's own work: forward, backward, data
    stage: float = 0.0  #: gradients into the arena and on their way
    wait: float = 0.0  #: for the servers to answer; they apply in it
    pull: float = 0.0  #: new parameters into their place
    apply: float = 0.0  #: the servers' rules, by their own clocks: within `wait`, or beside it with a window
    data: float = 0.0  #: of `compute`: the script waited for its loader to read a batch
    steps_per_push: int = 1  #: local steps that it makes for a push now: H of --sync-every

    @property
    def total(self) -> float:
        return self.compute + self.stage + self.wait + self.pull

    @property
    def exchange(self) -> float:
        """What it took to push and to get new parameters."""
        return self.stage + self.wait + self.pull


class StageStats(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a pipeline, in all steps since the model was cut as it is."""

    stage: int  #: 0: the leader
    num_steps: int
    busy_seconds: float  #: in forwards and backwards
    step_seconds: float  #: of the steps, from the beginning to the last stage's end
    layers: str = ""  #: that it has
    sent_bytes: int = 0  #: activations and their gradients, to other processes
    parameter_bytes: int = 0

    @property
    def utilisation(self) -> float:
        """The share of the steps in which it computed; the rest is the schedule's bubble and messages."""
        return self.busy_seconds / self.step_seconds if self.step_seconds else 0.0


class StageSpan(msgspec.Struct, frozen=True, array_like=True):
    """A forward (F) or backward (B) of one micro-batch in one part of the model, in the newest step of a pipeline."""

    stage: int
    part: int
    kind: str
    micro_batch: int
    begin: float  #: in seconds since the step began
    end: float


def bubble(stages: Sequence[StageStats]) -> float:
    """The part of the processes' time in steps in which they did not compute."""
    return 1.0 - sum(each.utilisation for each in stages) / len(stages) if stages else 0.0


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """Who waits, for whom, since when."""

    who: str  #: worker that waits; "": everyone in the round
    step: int  #: of the job in a round; otherwise of the worker that waits
    for_whom: list[str]
    seconds: float
    what: str  #: round, lag, barrier, registration, server


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One member, as the coordinator knows it."""

    name: str
    role: str
    incarnation: int
    host: str
    since: int  #: generation in which it joined
    heard_seconds: float  #: since it was last heard of
    deadline_seconds: float  #: of silence, and it is evicted
    rtt_seconds: float
    state: str  #: joining, working, resting, retiring, quarantined, …
    step: int = 0
    lag: int = 0  #: clocks behind the fastest
    num_primary: int = 0  #: slices
    num_backup: int = 0
    num_restarts: int = 0
    cores: str = ""  #: of its own, e.g. 0-3
    samples_per_second: float = 0.0
    steps_per_push: int = 1  #: of a worker: local steps that it makes for a push now
    share: float = 0.0  #: its part of the samples that the workers have read
    pid: int = 0  #: of its process, on its host
    stages: list[StageStats] = []  #: of a pipeline, its processes


class SaveCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a job has saved so far."""

    folder: str = ""  #: where to
    resumed_from: str = ""  #: the checkpoint that the job continues from
    last: str = ""  #: name of the newest checkpoint
    step: int = 0  #: its step
    num_saved: int = 0
    num_failed: int = 0  #: given up
    failure: str = ""  #: why the last of these

    def told(self) -> str:
        """In words; nothing where nothing is saved."""
        if not self.folder:
            return ""
        words = [f"{self.num_saved} saved in {self.folder}"]
        words += [f"the last: {self.last}"] if self.last else []
        words += [f"{self.num_failed} given up, the last one because: {self.failure}"] if self.num_failed else []
        words += [f"resumed from: {self.resumed_from}"] if self.resumed_from else []
        return "; ".join(words)


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `syncline status` shows."""

    job: str
    name: str
    term: int
    generation: int
    policy: str
    replicas: int
    ack: str
    protection: str  #: what a server's death would cost, in words; in a ring, that of a worker's process
    seconds: float
    members: list[MemberStatus]
    waits: list[Wait]
    why: str
    events: list[str]  #: what happened lately
    num_revoked: int = 0  #: acknowledged updates that were lost with a server
    epochs: list[EpochProgress] = []  #: that are under way
    saves: SaveCounts = SaveCounts()
    verdict: str = ""
    readings: dict[str, float] = {}  #: the newest of each metric
    stop: str = ""  #: which rule has ended training, on what value
    lr_factor: float = 1.0  #: on every learning rate, by --on-plateau
    exchange: str = "servers"
    step: int = 0  #: the job's, as `job.step` is
    verdicts: list[JobVerdict] = []  #: what is slow or wrong, the worst first
    missing: list[str] = []  #: members that the job waits for before it starts


class ServerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one server has done so far."""

    name: str = ""
    num_slices: int = 0
    parameter_bytes: int = 0
    num_updates: int = 0  #: applied to slices, counted per slice
    most_updates: int = 0  #: of the slice that has had the most, also before a job was taken up
    num_commits: int = 0
    num_late: int = 0  #: commits that came when their round was closed: nothing of them counts
    apply_seconds: float = 0.0  #: of all threads, in rules on slices
    num_rounds: int = 0  #: applied: in sync whole rounds, otherwise commits
    round_seconds: float = 0.0  #: from a round that is whole to its last slice, added up over rounds
    bytes_copied: int = 0  #: parameters copied once more on their way to a socket
    staleness_sum: float = 0.0
    staleness_count: int = 0  #: contributions measured, per slice
    staleness_max: int = 0
    staleness_counts: tuple[int, ...] = ()  #: contributions with a staleness of 0, 1, 2-3, 4-7, 8-15, … updates
    busiest: tuple[tuple[int, float], ...] = ()  #: the slices that took longest to apply: id, seconds
    damping_sum: float = 0.0  #: what the contributions measured counted: 1 each, less where the policy damps them
    lag_max: int = 0  #: largest clock distance to the slowest worker at which a reply went out
    num_pins: int = 0
    num_cuts: int = 0  #: times that commits were held for a cut which a follower reads
    cut_seconds: float = 0.0  #: how long, added up
    cut_seconds_max: float = 0.0
    wire: WireStats = WireStats()


class ProcessStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has used of its machine."""

    cpu_seconds: float = 0.0  #: of all its threads, and of processes of its own that have ended
    memory_bytes: int = 0  #: resident now
    gpu_bytes: int = 0  #: held on GPUs now, as far as known
    gpu_busy: float | None = None  #: part of the time in which a kernel ran on these GPUs, of any process


class MemberStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a member tells the coordinator about itself once a second: totals since it started."""

    process: ProcessStats = ProcessStats()
    wire: WireStats = WireStats()
    peers: dict[str, tuple[int, int]] = {}  #: the members it speaks to most -> bytes sent, received over sockets
    server: ServerStats | None = None  #: of a server


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a job, for people."""

    number: int  #: rises by one
    at: float  #: wall clock
    step: int  #: of the job
    kind: str  #: join, death, promotion, checkpoint, stop, scale, coordinator, verdict, note
    text: str


class JobVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a job, or slow, and why we think so."""

    kind: str  #: straggler, hot-server, data-starvation, communication, hang, diverging, flat
    subject: str  #: the member or metric that it is about; "": the job
    text: str  #: one sentence with the figures
    advice: str = ""  #: what to do about it
    since: float = 0.0  #: wall clock


class MemberCounts(msgspec.Struct, frozen=True, array_like=True):
    """Totals of one life of a member. They only rise, so a rate over any time can be made from them."""

    sent_bytes: int = 0  #: over sockets, and pushed through shared memory
    received_bytes: int = 0
    cpu_seconds: float = 0.0
    num_samples: int = 0  #: of a worker: read


class MemberFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One member over the last second or so. Durations are seconds of one step, in the mean."""

    name: str
    role: str
    host: str = ""
    state: str = ""
    incarnation: int = 0
    step: int = 0
    lag: int = 0
    num_steps: int = 0  #: made in this time
    compute: float = 0.0
    data: float = 0.0  #: of `compute`: waited for the loader
    stage: float = 0.0
    wait: float = 0.0
    pull: float = 0.0
    samples_per_second: float = 0.0
    share: float = 0.0
    apply: float = 0.0  #: of a server: seconds of one round in its rules
    num_rounds: int = 0  #: of a server: applied in this time
    cores: float = 0.0  #: kept busy
    memory_bytes: int = 0
    gpu_bytes: int = 0
    gpu_busy: float | None = None  #: part of the time in which a kernel ran on its GPUs; None: not known
    sent_per_second: float = 0.0  #: bytes; over sockets, and pushed through shared memory
    received_per_second: float = 0.0
    peers: dict[str, float] = {}  #: members -> bytes per second sent to them
    parameter_bytes: int = 0
    busiest: tuple[tuple[int, float], ...] = ()  #: of a server: slices by the share of the time in their rules
    heard_seconds: float = 0.0
    rtt_seconds: float = 0.0
    pid: int = 0
    stages: tuple[StageStats, ...] = ()  #: of a pipeline: its processes, in the steps of this time
    counts: MemberCounts = MemberCounts()


class JobFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job over the last second or so: what the page, `top` and the verdicts are made from."""

    at: float  #: wall clock
    step: int = 0
    seconds: float = 0.0  #: of the job
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    members: tuple[MemberFigures, ...] = ()
    gone: tuple[str, ...] = ()  #: members that died and are waited for
    waits: tuple[Wait, ...] = ()
    why: str = ""  #: in one sentence; "" where no member waits
    staleness_counts: tuple[int, ...] = ()  #: since the job began
    epochs: tuple[EpochProgress, ...] = ()
    readings: dict[str, float] = {}
    verdict: str = ""  #: how the job ended
    stop: str = ""  #: which rule has ended training, on what value
    generation: int = 0
    term: int = 0


class JobLook(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a job, once a second."""

    number: int  #: rises by one within the life of a coordinator
    figures: JobFigures
    verdicts: tuple[JobVerdict, ...] = ()
    events: tuple[Event, ...] = ()  #: since the look before
    readings: tuple[tuple[str, int, float, float | None], ...] = ()  #: likewise: metric, step, wall clock, value
    media: tuple[str, ...] = ()  #: likewise: names of images, histograms and texts


class EpochProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job is in an epoch of a loader."""

    loader: str
    epoch: int  #: from 0 on
    num_samples: int  #: 0: of shards it shows when they are read
    num_done: int  #: in steps that count
    num_passed_over: int = 0  #: read, and in no step
    num_quarantined: int = 0  #: three different workers failed on them
    leased: dict[str, int] = {}  #: worker -> samples that it has still to do
    is_steps: bool = False  #: of `job.steps`: all numbers are of steps

    @property
    def num_left(self) -> int:
        return max(0, self.num_samples - self.num_done - self.num_passed_over - self.num_quarantined)


class JobStats(msgspec.Struct, frozen=True, kw_only=True):
    """What `job.stats()` returns: this worker's own counts, and the job's as a whole."""

    name: str
    step: int  #: of the job
    own_step: int
    seconds: float  #: since the job was formed
    samples: int  #: handed out to all workers
    samples_per_second: float  #: of all workers, while samples were handed out
    own_samples: int
    shares: dict[str, float]  #: worker -> its part of these samples
    epochs: tuple[EpochProgress, ...]  #: that are under way
    staleness_mean: float
    staleness_max: int
    damping_mean: float  #: what a gradient counted in the mean; 1 where the policy does not damp stale ones
    lag_max: int
    num_late: int  #: commits of the job that came when their round was closed
    num_refused: int  #: pushes of this worker that were not finite
    is_quarantined: bool  #: whether this worker only pulls
    replicas: int  #: servers that have each slice
    ack: str  #: memory: a push lives as long as its server; replicated: it survives the loss of any one server
    num_revoked: int  #: acknowledged updates of the job that were lost with a server
    times: StepTimes  #: where the seconds of this worker's steps went
    servers: tuple[ServerStats, ...]
    wire: WireStats  #: of this worker
    wire_to_workers: WireStats = WireStats()  #: of that: what it and other workers said to each other, in collectives
    pushed: PushBytes = PushBytes()  #: by all workers
    own_pushed: PushBytes = PushBytes()
    num_cuts: int = 0  #: times that a server held commits for a cut which a follower reads, at the server with most
    cut_seconds_max: float = 0.0  #: the longest of these

    @property
    def bytes_per_step(self) -> float:
        """Bytes that all workers together have sent over sockets for a step of the job."""
        return self.pushed.socket / max(1, self.step)

    @property
    def cost_told(self) -> str:
        """What it cost that not everybody was waited for, in words."""
        words = [f"staleness {self.staleness_mean:.2f} updates in the mean, {self.staleness_max} at most"]
        words += [f"gradients counted {self.damping_mean:.2f} in the mean"] if self.damping_mean < 1 else []
        words += [f"{self.num_late} commits were late, and counted for nothing"] if self.num_late else []
        return "; ".join(words)


class WorkerDebugState(msgspec.Struct, frozen=True, kw_only=True):
    """What `job.debug_state()` returns: this worker at one moment, for tests and bug reports.

    Another thread may be in the middle of a change: each field is right, two of them may be of different moments.
    """

    name: str
    incarnation: int
    generation: int
    step: int
    clock: int  #: of the last commit
    open_clocks: tuple[int, ...]  #: commits that no server has acknowledged in full
    num_early_slices: int  #: of the next commit, that are on their way already
    servers: tuple[str, ...]  #: that it has a connection to
    primaries: dict[int, str]  #: slice -> the server that its gradients go to
    has_leased: bool  #: whether samples were read that are in no commit yet
    is_paused: bool  #: by the coordinator
    waits_for: str  #: what the script's thread waits for; "" while it computes
    save_number: int  #: of the save that is expected; 0: none
    num_save_notes: int  #: states of the script that are kept for a save
    save_patience_seconds: float  #: steps may still wait so long for the save, while it keeps too much
    is_boundary_watched: bool  #: whether the next boundary between two steps is noted for a save
    notices: tuple[str, ...]  #: what this worker has told its user, each text once
    threads: tuple[str, ...]  #: of this process, by name


class ServerDebugState(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's `debug_state()` returns: the server at one moment, for tests and bug reports."""

    name: str
    generation: int  #: that is installed; 0: it is not part of a whole job yet
    versions: dict[int, int]  #: slices that it is the primary of -> updates that they have had
    backups: tuple[int, ...]  #: slices that it is a backup of
    clocks: dict[str, int]  #: worker -> its last commit
    held: dict[str, int]  #: how many it has of everything that workers bring and that must go with them
    arena_bytes: int  #: of workers, that it has mapped
    buffer_bytes: int  #: of its own, for gradients that come over sockets
    threads: tuple[str, ...]  #: of this process, by name


class CoordinatorDebugState(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator's `debug_state()` returns: the job at one moment, for tests and bug reports."""

    generation: int
    term: int
    members: tuple[str, ...]
    pending_joins: tuple[str, ...]  #: members that wait for an answer
    num_defaults: int  #: settings of scripts that are kept until the job is formed
    lease_requests: tuple[str, ...]  #: workers that wait for samples
    num_unsaved_uses: int  #: spans of samples that are used and not in the journal yet
    script_notes: dict[str, bytes]  #: worker -> the state of its script that it told last
    save: str  #: why the save that is under way was asked for; "": there is none
    next_save: str  #: likewise of the one behind it
    threads: tuple[str, ...]  #: of this process, by name


def thread_names() -> tuple[str, ...]:
    return tuple(sorted(thread.name for thread in threading.enumerate()))


def apply_seconds(servers: Sequence[ServerStats]) -> float:
    """How long the servers take for one round, in the mean; they work at the same time, the slowest counts."""
    return max((server.round_seconds / server.num_rounds for server in servers if server.num_rounds), default=0.0)
