"""The coordinator: membership, registrations, barriers, numbers and the verdict. Small, and off the hot path."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from syncline import config as configuration
from syncline.coordinator.ending import Ending, Watching
from syncline.coordinator.leases import Handing
from syncline.coordinator.members import Joining
from syncline.coordinator.metrics import Readings, StopRules
from syncline.coordinator.reconfigure import Changing
from syncline.coordinator.registration import Registering
from syncline.coordinator.rendezvous import Meeting
from syncline.coordinator.restore import Resuming
from syncline.coordinator.saves import Saving
from syncline.coordinator.scaling import Pacing, Scaling, WorkerSizing
from syncline.coordinator.status import Reporting
from syncline.coordinator.validation import Bests, Validations
from syncline.core.layout import Segment
from syncline.core.liveness import Liveness
from syncline.core.membership import JobState, Membership, Outcome
from syncline.core.metrics import Metrics
from syncline.core.registry import Registry
from syncline.core.ring import partner_of
from syncline.core.wire.checkpoints import AskResume, Finish, NoteScript, Save
from syncline.core.wire.control import (
    AskLife,
    AskRoster,
    AskStats,
    AskStatus,
    AskWhy,
    Barrier,
    Died,
    Enter,
    Heartbeat,
    Join,
    Leave,
    Register,
    Rejoin,
    Report,
    Retire,
    Scale,
    Uploaded,
    Watch,
)
from syncline.core.wire.leases import AskLease, EndShard, LeaveEpoch, OpenEpoch
from syncline.core.wire.message import Done, Message
from syncline.core.wire.pace import Pace
from syncline.core.wire.validation import AskReading, AskValidationShard, Attend, Begin, Come, LocalCandidate
from syncline.errors import FencedError, ProtocolError, StoreError
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, Peer

#: What happened lately, for `status`.
MOST_EVENTS = 50


class Keeper(Protocol):
    """What remembers a job's state through the coordinator's death: the journal."""

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """The state kept last, and the segments."""

    def save(self, state: bytes, segments: Mapping[int, bytes] = {}, drop: Collection[int] = ()) -> None:
        """Keeps it, adds these segments and drops those, before it returns."""

    def check(self) -> None:
        """Raises FencedError when a newer coordinator has taken it over."""


class Coordinator:
    """The service that every member and the launcher speak to. Its parts share its lock and its state."""

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        log: Callable[[str], None],
        ended: Callable[[Outcome], None] = lambda outcome: None,
        journal: Keeper | None = None,
        job: str = "",
        watches: bool = True,
    ) -> None:
        """`watches`: members are other processes, which beat, and may die unseen."""
        self.given = dict(given)  # said at launch or in syncline.toml
        self.log_line, self.ended, self.journal, self.job = log, ended, journal, job
        self.term = 1
        self.lock = threading.RLock()
        self._unsaved: dict[int, bytes] = {}  # segments
        self._undropped: set[int] = set()  # segments that were taken back, and are in the journal
        state, segments = self._load()
        self.membership = Membership(state)
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
        self.endpoints: dict[str, Endpoint] = {}
        self.beats: dict[str, tuple[Heartbeat, float]] = {}
        self.advanced: dict[str, float] = {}  # when a worker's step was last another than before
        self.reports: dict[str, Report] = {}
        self.rates: dict[str, dict[str, float]] = {}  # of workers: the last that each name has reported
        self.events: collections.deque[str] = collections.deque(maxlen=MOST_EVENTS)
        self.retiring: set[str] = set()
        self.evicted: dict[str, str] = {}  # names, with the reason
        self.launchers: set[Endpoint] = set()
        self.formed_at = time.monotonic() if state.formed else None
        self.began = time.monotonic()
        self.over = threading.Event()
        self.joining = Joining(self)
        self.meeting = Meeting(self)
        self.ending = Ending(self)
        self.registering = Registering(self)
        self.reporting = Reporting(self)
        self.resuming = Resuming(self)
        self.saving = Saving(self)
        self.changing = Changing(self)
        self.handing = Handing(self)
        self.pacing = Pacing(self)
        self.readings = Readings(self)
        self.stopping = StopRules(self)
        self.validating, self.bests = Validations(self), Bests(self)
        self.scaling = Scaling(self)
        self.sizing = WorkerSizing(self)
        self.watching = Watching(self) if watches else None
        self._handlers = self._all_handlers()
        if state.formed:
            self._take_up()
        else:
            self.resuming.is_ready(state.config)  # it may take a while: begun before anybody is there

    def _load(self) -> tuple[JobState, list[Segment]]:
        data, segments = self.journal.load() if self.journal is not None else (None, [])
        if data is None:
            return JobState(config=configuration.resolve(self.given)), []
        state = msgspec.msgpack.decode(data, type=JobState)
        return state, [msgspec.msgpack.decode(one, type=Segment) for one in segments]

    def _take_up(self) -> None:
        """A job that an earlier coordinator began: everybody has one full deadline to be heard of."""
        now = time.monotonic()
        for name in self.membership.state.members:
            self.liveness.watch(name, now, full=True)
        self.event(f"the coordinator is back, in generation {self.membership.generation}")
        self.stopping.begin()
        self.changing.start(resume=True)

    @property
    def config(self) -> configuration.JobConfig:
        return self.membership.state.config

    def start_deadline(self) -> None:
        """From now on the members have `start_seconds` to be there."""
        self.began = time.monotonic()
        if self.watching is not None:
            self.watching.start()

    # -- what outlives this process -----------------------------------------------------------------------

    def keep(self) -> None:
        """Under the lock: what was decided is on disk when this returns; nobody may be told before."""
        if self.journal is None:
            return
        state = self.membership.state
        self.stopping.count()
        state.ready = sorted(self.registry.ready)
        told = (report.job_step for report in self.reports.values())
        state.num_steps = max([state.num_steps, self.reporting.step(), *told])
        self.journal.save(msgspec.msgpack.encode(state), self._unsaved, self._undropped)
        self._unsaved, self._undropped = {}, set()

    def keep_segment(self, segment: Segment) -> None:
        """Under the lock: it is kept with the next `keep`."""
        self._unsaved[segment.index] = msgspec.msgpack.encode(segment)
        self._undropped.discard(segment.index)

    def drop_segment(self, segment: Segment) -> None:
        """Under the lock: it was taken back, and is out of the journal with the next `keep`."""
        self._unsaved.pop(segment.index, None)
        self._undropped.add(segment.index)

    def event(self, text: str) -> None:
        """Something that people want to know: on the screen, in the log, and in `status`."""
        self.events.append(text)
        self.log_line(text)

    def last_word(self, text: str) -> None:
        """A number of the job's end, for `status`. A launcher that watches has it in its table; else it is said."""
        self.events.append(text)
        if not self.launchers:
            self.log_line(text)

    # -- what the endpoint calls --------------------------------------------------------------------------

    def landing(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        raise ProtocolError(f"{type(message).__name__} has no payload")

    def _all_handlers(self) -> dict[type[Message], Callable[[Request, Any], None]]:
        return {
            Join: self.joining.join,
            Rejoin: self.joining.rejoin,
            AskRoster: self.joining.ask_roster,
            AskLife: self.joining.ask_life,
            Heartbeat: self._beat,
            Enter: self.changing.enter,
            Retire: self.changing.retire,
            Register: self.registering.register,
            Uploaded: self.registering.uploaded,
            Barrier: self.meeting.arrive,
            Report: self.reporting.report,
            AskStats: self.reporting.stats,
            AskWhy: self.reporting.why,
            AskStatus: self.reporting.status,
            Watch: self.reporting.watch,
            Leave: self._leave,
            Died: self._died,
            Scale: self.scaling.handle,
            Pace: self.pacing.handle,
            Metrics: self.readings.handle,
            OpenEpoch: self.handing.open,
            AskLease: self.handing.ask,
            LeaveEpoch: self.handing.leave,
            EndShard: self.handing.end_shard,
            Come: self.validating.come,
            Attend: self.validating.attend,
            Begin: self.validating.begin,
            AskValidationShard: self.validating.ask,
            AskReading: self.validating.ask_reading,
            LocalCandidate: self.validating.own,
            Save: self.saving.save,
            Finish: self.saving.finish,
            AskResume: self.resuming.asked,
            NoteScript: self.resuming.note,
        }

    def handle(self, request: Request) -> None:
        handler = self._handlers.get(type(request.message))
        if handler is None:
            raise ProtocolError(f"the coordinator does not answer {type(request.message).__name__}")
        if request.peer.role in ("worker", "server") and not isinstance(request.message, Join | Rejoin):
            self._check_member(request)
        handler(request, request.message)

    def _check_member(self, request: Request) -> None:
        member = self.membership.state.members.get(request.peer.name)
        if member is None or member.incarnation != request.peer.incarnation:
            if isinstance(request.message, Leave | Report):
                return  # it has left, or is about to hear that it is out
            self.refuse_fenced(request.peer.name, request.peer.incarnation)

    def refuse_fenced(self, name: str, incarnation: int) -> None:
        reason = self.evicted.get(name, "it has left, or was replaced")
        raise FencedError(f"{name}, incarnation {incarnation}, is out of the job: {reason}")

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        """A closed connection is suspicion: the member may come back, or the launcher knows how it ended."""
        with self.lock:
            self.launchers.discard(endpoint)
            name = next((n for n, known in self.endpoints.items() if known is endpoint), None)
            if name is None or self.membership.outcome is not None:
                return
            del self.endpoints[name]
            self.joining.forget(name)
            if name not in self.membership.state.members:
                return
            if not self.membership.formed or self.watching is None:
                self.evict(name, f"is gone: {reason}")
            else:
                self.liveness.suspect(name, time.monotonic(), reason)

    def evict(self, name: str, reason: str) -> None:
        """This member is dead, or counts as dead."""
        with self.lock:
            member = self.membership.state.members.get(name)
            if member is None or self.membership.outcome is not None:
                return
            self.evicted[name], beside = reason, self.membership.beside(name)
            self.registering.slices_are_lost(self.membership.evict(name, reason))
            self.liveness.forget(name)
            self.joining.forget(name)
            self.beats.pop(name, None)
            self.advanced.pop(name, None)
            self.reports.pop(name, None)
            self.handing.forget(name)
            self.saving.forget(name)
            self.retiring.discard(name)
            endpoint = self.endpoints.pop(name, None)
            self.registry.servers = self.membership.servers()
            if self.membership.formed:
                self.event(f"{name} (incarnation {member.incarnation}) is out: {reason}")
            if self.membership.formed:
                self.try_keep()  # a generation that anybody may hear of is never given again
            self.changing.member_is_out(member)
            self.readings.gone()
            self.validating.gone((name, member.incarnation))
            self._fail_if_nobody_is_left(name, reason)
            if beside and self.membership.formed:
                self.evict(beside, f"it is in one process with {name}")
        if endpoint is not None:
            endpoint.close("evicted")
        self.ending.conclude()

    def _fail_if_nobody_is_left(self, name: str, reason: str) -> None:
        """In one process nobody comes back."""
        if self.watching is None and self.membership.formed and not self.membership.workers():
            self.membership.fail(name, f"{name} {reason}")

    def fail(self, name: str, reason: str) -> None:
        """The job ends, with this reason."""
        with self.lock:
            self.membership.fail(name, f"{name} is gone: {reason}")
        self.ending.conclude()

    def _beat(self, request: Request, message: Heartbeat) -> None:
        now = time.monotonic()
        with self.lock:
            name = request.peer.name
            self.liveness.heard(name, now)
            before = self.beats.get(name)
            if before is None or before[0].step != message.step:
                self.advanced[name] = now
            self.beats[name] = (message, now)
            self.handing.beat(name, message)
            self.saving.beat()
        request.reply(Done())

    # -- goings -------------------------------------------------------------------------------------------

    def _leave(self, request: Request, message: Leave) -> None:
        name = request.peer.name
        with self.lock:
            member = self.membership.state.members.get(name)
            if member is not None and member.incarnation == request.peer.incarnation:
                self.membership.leave(name, message.retired)
                self.changing.member_has_left(name)
                self.pacing.left(name)
                self.liveness.forget(name)
                self.retiring.discard(name)
                self.endpoints.pop(name, None)
                self.beats.pop(name, None)
                self.advanced.pop(name, None)
                self.handing.forget(name)
                self.readings.gone()
                self.validating.gone((name, member.incarnation))
                self.saving.forget(name)
                self.try_keep()
        request.reply(Done())
        self.changing.wake()
        self.meeting.release()
        self.registering.try_again()
        self.joining.tell()
        self.ending.conclude()

    def _died(self, request: Request, message: Died) -> None:
        with self.lock:
            ended = [message.name, *([partner_of(message.name)] if self.config.is_ring else [])]
            for name in ended:
                if message.comes_back:
                    self.membership.await_return(name)
                self.evict(name, message.reason)
            if not message.comes_back and message.ends_job and message.name not in self.membership.state.left:
                self.membership.give_up_on(message.name, message.reason)
            elif not message.comes_back:
                for name in ended:
                    self.membership.awaited.pop(name, None)
                self.membership.end_if_done()
        self.ending.conclude()
        request.reply(Done())

    def close(self) -> None:
        self.changing.close()
        self.stopping.close()
        self.saving.close()
        if self.watching is not None:
            self.watching.close()
        for endpoint in [*self.endpoints.values(), *self.launchers]:
            endpoint.close()

    def try_keep(self) -> bool:
        """Keeps what could not be kept before; False while the disk refuses."""
        try:
            with self.lock:
                self.keep()
        except StoreError as error:
            self.say_trouble(error)
            return False
        return True

    def say_trouble(self, error: StoreError) -> None:
        """The disk refuses: said once, as long as it is the same."""
        if str(error) not in self.events:
            self.event(str(error))
