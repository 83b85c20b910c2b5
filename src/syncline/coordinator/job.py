"""The state that all parts of a coordinator share: its lock, its journal, its members' connections and reports.

A part changes this state under `JobContext.lock`. It calls `keep()` before it tells anybody what it decided.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec

from syncline import config as configuration
from syncline.core.layout import Segment
from syncline.core.liveness import Liveness
from syncline.core.media import MediaItem, ReportedMedia
from syncline.core.membership import JobState, Membership, Outcome
from syncline.core.reconfigure import Planner
from syncline.core.registry import Registry
from syncline.core.slice_state import Identity
from syncline.core.stopping import Steering
from syncline.core.wire.control import CommittedSteps, Heartbeat, Report, Roster
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, FencedError, StoreError
from syncline.net.rpc import Call, Endpoint, Request
from syncline.stats import JobLook, JobVerdict, MemberStats

#: How many of the latest events `status` shows.
MOST_EVENTS = 50
#: Events and readings that are kept until they are recorded; beyond this, the oldest are dropped.
MOST_FRESH = 10_000
#: Likewise of media: names, the newest of each.
MOST_FRESH_MEDIA = 50
#: How often a wait for servers checks whether something more urgent has come up.
_POLL_SECONDS = 0.01


class FreshEvent(NamedTuple):
    """Something that happened, and was not recorded yet."""

    at: float  # wall clock
    kind: str
    text: str


class FreshReading(NamedTuple):
    """A reading that was not recorded yet."""

    at: float  # wall clock
    name: str
    step: int
    value: float


class JobJournal(Protocol):
    """Keeps the state of a job on disk, so that the next coordinator can continue it."""

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """Returns the state that was saved last, and the segments."""

    def save(self, state: bytes, segments: Mapping[int, bytes] = {}, drop: Collection[int] = ()) -> None:
        """Saves the state, adds these segments and drops those. All of it is on disk when this returns."""

    def check(self) -> None:
        """Raises FencedError when a newer coordinator has taken over the journal."""


class TrainingClock:
    """Counts how long a job has trained. The count survives coordinators and goes into checkpoints."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._since: float | None = None  # when the time was last added to the state, by this process's clock

    @property
    def _state(self) -> Steering:
        return self._membership.state.steering

    def start(self, longest_gap_seconds: float) -> None:
        """Starts to count. The time without a coordinator counts as well, up to `longest_gap_seconds`."""
        if self._state.counted_at:
            gap = time.time() - self._state.counted_at
            self._state.seconds += min(max(0.0, gap), longest_gap_seconds)
        self._since = time.monotonic()

    def seconds(self) -> float:
        """How long the job has trained, including the time before it was resumed."""
        return self._state.seconds + (time.monotonic() - self._since if self._since is not None else 0.0)

    def add_to_state(self) -> None:
        """Adds the time since the last call to the state, which is about to be kept."""
        if self._since is not None:
            self._state.seconds, self._since = self.seconds(), time.monotonic()
            self._state.counted_at = time.time()


class JobContext:
    """One job at its coordinator. Every part gets this object; parts know each other only where they must."""

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        log: Callable[[str], None],
        conclude: Callable[[], None],
        ended: Callable[[Outcome], None],
        journal: JobJournal | None = None,
        job_id: str = "",
        term: int = 1,
        watches: bool = True,
    ) -> None:
        """`given`: the settings of the launch and of syncline.toml. `conclude`: ends the job if it has an outcome.

        `ended`: is called once, with the outcome. `watches`: the members are other processes, which send heartbeats
        and may die without a word.
        """
        self.given = dict(given)
        self.log_line, self.conclude, self._ended = log, conclude, ended
        self.journal, self.job_id, self.term, self.watches = journal, job_id, term, watches
        self.lock = threading.RLock()
        self._added_segments: dict[int, bytes] = {}  # not in the journal yet
        self._dropped_segments: set[int] = set()  # still in the journal
        state, segments = self._load()
        self.membership = Membership(state)
        self.planner = Planner(self.membership)
        self.clock = TrainingClock(self.membership)
        self.registry = Registry([], state.config.slice_bytes)
        self.registry.replica_sets = state.replica_sets
        for segment in segments:
            self.registry.restore(segment)
        self.registry.ready.update(state.ready)
        self.registry.servers = self.membership.servers()
        self.liveness = Liveness(
            least_seconds=state.config.deadline_seconds,
            most_seconds=max(state.config.deadline_seconds, state.config.longest_deadline_seconds),
            suspect_seconds=state.config.suspect_seconds,
            asleep_seconds=min(state.config.deadline_seconds, state.config.suspect_seconds) / 2,
        )
        self.endpoints: dict[str, Endpoint] = {}  # by member
        self.launchers: set[Endpoint] = set()
        self.heartbeats: dict[str, tuple[Heartbeat, float]] = {}  # the last one of each member, and when it came
        self.advanced: dict[str, float] = {}  # when a worker's step last changed
        self.reports: dict[str, Report] = {}
        self.latest_look: JobLook | None = None  # of the recorder
        self.long_wait = ""  # of the recorder: who waits for whom, where it is long
        self.verdicts: tuple[JobVerdict, ...] = ()  # of the recorder
        self.member_stats: dict[str, MemberStats] = {}  # what each member told last
        self.rates: dict[str, dict[str, float]] = {}  # the learning rates that each worker reported last
        self.committed: dict[str, CommittedSteps] = {}  # with --sync-every: as each worker reported last
        self.events: collections.deque[str] = collections.deque(maxlen=MOST_EVENTS)
        self.fresh_events: collections.deque[FreshEvent] = collections.deque(maxlen=MOST_FRESH)
        self.fresh_readings: collections.deque[FreshReading] = collections.deque(maxlen=MOST_FRESH)
        self.fresh_media: dict[str, ReportedMedia] = {}  # by name
        self.retiring: set[str] = set()
        self.evicted: dict[str, str] = {}  # names, with the reason
        self.began = time.monotonic()
        self.formed_at = time.monotonic() if state.formed else None
        self.ended_at: float | None = None
        self.over = threading.Event()
        self.is_closing = False
        self._wakes = threading.Condition(self.lock)

    def _load(self) -> tuple[JobState, list[Segment]]:
        data, segments = self.journal.load() if self.journal is not None else (None, [])
        if data is None:
            return JobState(config=configuration.resolve(self.given)), []
        state = msgspec.msgpack.decode(data, type=JobState)
        return state, [msgspec.msgpack.decode(one, type=Segment) for one in segments]

    @property
    def config(self) -> configuration.JobConfig:
        return self.membership.state.config

    # -- the journal --------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Writes the state to the journal. Call it under the lock, and before you tell anybody what was decided."""
        if self.journal is None:
            return
        state = self.membership.state
        self.clock.add_to_state()
        state.ready = sorted(self.registry.ready)
        reported = (report.job_step for report in self.reports.values())
        state.num_steps = max([state.num_steps, self.step(), *reported])
        self.journal.save(msgspec.msgpack.encode(state), self._added_segments, self._dropped_segments)
        self._added_segments, self._dropped_segments = {}, set()

    def try_keep(self) -> bool:
        """Like `keep`; reports a disk error as an event and returns False. The next `keep` writes it then."""
        try:
            with self.lock:
                self.keep()
        except StoreError as error:
            self.report_disk_error(error)
            return False
        return True

    def report_disk_error(self, error: StoreError) -> None:
        """Reports the error as an event, unless the same one is among the latest events."""
        if str(error) not in self.events:
            self.event(str(error))

    def keep_segment(self, segment: Segment) -> None:
        """Under the lock: the next `keep` adds the segment to the journal."""
        self._added_segments[segment.index] = msgspec.msgpack.encode(segment)
        self._dropped_segments.discard(segment.index)

    def drop_segment(self, segment: Segment) -> None:
        """Under the lock: the next `keep` removes the segment from the journal."""
        self._added_segments.pop(segment.index, None)
        self._dropped_segments.add(segment.index)

    # -- events and the end -------------------------------------------------------------------------------

    def event(self, text: str, kind: str = "note") -> None:
        """Something that people want to know: it goes to the screen, into the log and into `status`.

        `kind`: as in `stats.Event`.
        """
        self.events.append(text)
        self.mark(text, kind)
        self.log_line(text)

    def mark(self, text: str, kind: str) -> None:
        """Something for the timeline of the page and for events.jsonl only."""
        self.fresh_events.append(FreshEvent(time.time(), kind, text))

    def note_reading(self, name: str, step: int, value: float) -> None:
        """A reading of the job, for the page and metrics.jsonl."""
        self.fresh_readings.append(FreshReading(time.time(), name, step, value))

    def note_media(self, member: str, item: MediaItem) -> None:
        """Under the lock: something to look at, for the page and the sinks."""
        self.fresh_media.pop(item.name, None)
        self.fresh_media[item.name] = ReportedMedia(time.time(), member, item)
        if len(self.fresh_media) > MOST_FRESH_MEDIA:
            del self.fresh_media[next(iter(self.fresh_media))]

    def take_media(self) -> list[ReportedMedia]:
        """What came since the last call; for the recorder."""
        with self.lock:
            found, self.fresh_media = list(self.fresh_media.values()), {}
        return found

    def final_event(self, text: str) -> None:
        """A result of the job, for `status`. It is logged only without a launcher, which prints it in its table."""
        self.events.append(text)
        self.mark(text, "end")
        if not self.launchers:
            self.log_line(text)

    def fail(self, name: str, reason: str) -> None:
        """Ends the job with this reason."""
        with self.lock:
            self.membership.fail(name, f"{name} is gone: {reason}")
        self.conclude()

    def end(self, outcome: Outcome) -> None:
        """Tells the process of this coordinator that the job is over."""
        self._ended(outcome)
        self.over.set()

    def superseded(self, reason: str) -> None:
        """A newer coordinator has the job: this one ends and tells no member."""
        self.log_line(f"FencedError: {reason}; this coordinator ends")
        self.end(Outcome(True, "coordinator", reason))

    def refuse_fenced(self, name: str, incarnation: int) -> NoReturn:
        """Raises FencedError for a member that is out of the job."""
        reason = self.evicted.get(name, "it has left, or was replaced")
        raise FencedError(f"{name}, incarnation {incarnation}, was removed from the job: {reason}")

    # -- the reconfiguration thread -----------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """Primaries are about to change. Until that is over, members are not told of replica sets."""
        return self.planner.moves

    def wake_reconfigurer(self) -> None:
        """Something has changed that may need a reconfiguration or a save."""
        with self._wakes:
            self._wakes.notify_all()

    def wait_for_wake(self, seconds: float) -> None:
        """Under the lock, which is released meanwhile."""
        self._wakes.wait(seconds)

    # -- progress -----------------------------------------------------------------------------------------

    def step(self) -> int:
        """The step of the job: the updates that reached the servers, or the local steps of the workers."""
        updates = max((heartbeat.num_updates for heartbeat, _ in self.heartbeats.values()), default=0)
        if updates and not self.config.steps_locally:
            return updates
        # Inside one process members send no heartbeats: the workers' reports count.
        return max((report.job_step or report.step for report in self.reports.values()), default=0)

    def seconds(self) -> float:
        """How long this job has run since it formed."""
        if self.formed_at is None:
            return 0.0
        return (self.ended_at or time.monotonic()) - self.formed_at

    # -- members ------------------------------------------------------------------------------------------

    def roster(self) -> Roster:
        """The current generation, as members are told of it."""
        with self.lock:
            state = self.membership.state
            return Roster(
                state.generation,
                self.membership.ordered(),
                list(state.replica_sets.values()),
                list(state.finished.values()),
                is_chief_done=bool(state.chief_done),
            )

    def barrier_workers(self) -> list[str]:
        """The workers for which a barrier waits: those in the rounds, and evicted ones that are not fenced yet."""
        state, finishing = self.membership.state, self.membership.finishing
        names = [name for name in (*state.entered, *state.fencing) if name not in finishing]
        return names or [name for name in self.membership.workers() if name not in finishing]

    def ask_all_servers(self, message: Message, then: Callable[[list[Call]], None]) -> None:
        """Asks every server; `then` runs when all have answered, in the thread of the last answer."""
        with self.lock:
            endpoints = [self.endpoints.get(name) for name in self.membership.servers()]
        calls = []
        for endpoint in endpoints:
            if endpoint is not None:
                with contextlib.suppress(ConnectionLost):
                    calls.append(endpoint.call(message))
        when_all(calls, then)


class ServerCalls:
    """Questions to several servers, for the reconfiguration thread, which waits until all have answered."""

    def __init__(self, job: JobContext) -> None:
        self._job = job

    def ask(
        self,
        messages: Mapping[str, Message],
        *,
        gives_way: bool = False,
        until: float | None = None,
        fails_soon: bool = False,
    ) -> dict[str, Message]:
        """Returns the answer of each server. Raises ConnectionLost when one of them is out or not connected.

        `gives_way`: returns {} as soon as a reconfiguration becomes urgent. `until`: returns {} after this time.
        `fails_soon`: raises the first refusal at once: the other servers may wait for the one that has refused.
        """
        calls: dict[str, Call] = {}
        for name, message in messages.items():
            with self._job.lock:
                endpoint = self._job.endpoints.get(name)
            if endpoint is None:
                raise ConnectionLost(f"{name} is not there")
            calls[name] = endpoint.call(message)
        for call in calls.values():
            while not call.arrives(_POLL_SECONDS):
                refused = [other for other in calls.values() if fails_soon and other.is_done and other.answer is None]
                if refused:
                    refused[0].wait(0)
                with self._job.lock:
                    if self._job.is_closing:
                        raise ConnectionLost("the coordinator is closing")
                    if gives_way and self._job.planner.is_urgent:
                        return {}
                    if until is not None and time.monotonic() > until:
                        return {}
                    # One of the others may wait for a server that is out: it would never answer.
                    gone = [other for other in messages if other not in self._job.membership.state.members]
                    if gone:
                        raise ConnectionLost(f"{', '.join(gone)} is out")
        return {name: call.wait(0) for name, call in calls.items()}


def identity_of(request: Request) -> Identity:
    return (request.peer.name, request.peer.incarnation)


def when_all(calls: list[Call], then: Callable[[list[Call]], None]) -> None:
    """Runs `then` when all calls are done, in the thread of the last answer; at once if there are none."""
    if not calls:
        then(calls)
        return
    lock, left = threading.Lock(), [len(calls)]

    def one_done() -> None:
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last:
            then(calls)

    for call in calls:
        call.when_done(one_done)
