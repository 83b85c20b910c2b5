"""A worker's session with the coordinator: rosters, its messages, and requests to it."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from syncline.core.liveness import beat_seconds
from syncline.core.members import Member, by_name
from syncline.core.metrics import Steer
from syncline.core.slice_state import Copy
from syncline.core.wire.checkpoints import EndSave, Expect, Save, WriteScript
from syncline.core.wire.control import (
    AskCopies,
    AskLife,
    AskWhy,
    Barrier,
    Ending,
    GiveCopies,
    GivenCopies,
    GivenWhy,
    Heartbeat,
    Joined,
    Over,
    Register,
    Retire,
    Roster,
    Uploaded,
)
from syncline.core.wire.leases import AskLease, AskLeaseAcks, GaveBack, GivenLeaseAcks, LeaseAck, Recall
from syncline.core.wire.message import Done, Message
from syncline.core.wire.pace import Pace
from syncline.core.wire.validation import (
    AskReading,
    AskValidationShard,
    Attend,
    Begin,
    Called,
    Come,
    LocalCandidate,
    WriteCandidate,
)
from syncline.errors import (
    ConfigError,
    ConnectionLost,
    FencedError,
    JobFailed,
    ProtocolError,
    SynclineError,
    WaitTimeout,
)
from syncline.net.link import SILENT, Link
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, Peer
from syncline.worker.checkpoint.boundary import Boundary
from syncline.worker.metrics import RuleSignals
from syncline.worker.waits import StepClock, Waits


class Rosters:
    """The newest roster. Set by the thread that reads from the coordinator; the script's thread waits for it."""

    def __init__(self) -> None:
        self.newest = Roster(0, [], [])
        self._change = threading.Condition()
        self._telling = threading.RLock()
        self._listeners: list[Callable[[Roster], None]] = []

    def listen(self, listener: Callable[[Roster], None]) -> None:
        """Calls `listener` with every newer roster, in the receiving thread; it must be quick."""
        self._listeners.append(listener)

    def hear(self, roster: Roster) -> None:
        with self._change:
            if roster.generation < self.newest.generation:
                return
            self.newest = roster
            self._change.notify_all()
        with self._telling:  # one at a time, always with the newest
            for listener in self._listeners:
                listener(self.newest)

    def wait(self, generation: int, seconds: float) -> bool:
        """Waits for a roster newer than `generation`. Returns False on timeout."""
        with self._change:
            return self._change.wait_for(lambda: self.newest.generation > generation, max(0.0, seconds))


def ranked(roster: Roster) -> list[Member]:
    """The workers in the order of their ranks. The one that was there first comes first.

    Workers that have finished keep their ranks once the chief has. Before that they come last: of the workers that
    are left, one is the chief.
    """
    finished = {member.name for member in roster.finished} if not roster.is_chief_done else set()
    workers = [member for member in (*roster.members, *roster.finished) if member.role == "worker"]
    return sorted(workers, key=lambda member: (member.name in finished, member.since, by_name(member.name)))


def place_of(me: Member, roster: Roster) -> tuple[int, int, int] | None:
    """Rank, number of workers, local rank; None if it is not a member."""
    workers = ranked(roster)
    names = [member.name for member in workers]
    if me.name not in names:
        return None
    local = [member.name for member in workers if member.host == me.host]
    return names.index(me.name), len(names), local.index(me.name) if me.name in local else 0


#: How often a waiting worker checks whether it must leave or the job is over.
LOOK_SECONDS = 0.2


class StepPacing:
    """The pace set by the coordinator; the script's thread follows it between two steps."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises the job's outcome for this worker, if there is one."""
        self._check = check
        self._pace = Pace("")
        self.is_held = False  #: between two steps, until a pace that is not paused
        self._change = threading.Condition()

    def hear(self, pace: Pace) -> None:
        with self._change:
            self._pace, self.is_held = pace, pace.is_paused
            self._change.notify_all()

    def slow_down(self, look: Callable[[], None]) -> None:
        """Pauses after a step as the pace demands. A new pace ends the pause; `look` may raise."""
        pace = self._pace
        if pace.delay_seconds:
            self._wait(lambda: self._pace is not pace, time.monotonic() + pace.delay_seconds, look)

    def hold(self, look: Callable[[], None], times: StepClock) -> None:
        """Waits while this worker is held. The time does not count as step time."""
        if self.is_held:
            times.pause()
            self._wait(lambda: not self.is_held, math.inf, look)
            times.resume()

    def _wait(self, is_over: Callable[[], bool], until: float, look: Callable[[], None]) -> None:
        while not is_over() and (left := until - time.monotonic()) > 0:
            self._check()
            look()
            with self._change:
                if not is_over():
                    self._change.wait(min(left, LOOK_SECONDS))


class GivesCopies(Protocol):
    """This worker's copies of slices."""

    def copies_of(self, slices: list[int]) -> list[Copy]:
        """The versions of these slices that this worker has."""

    def give_copies(self, copies: list[Copy], target: Member) -> None:
        """Sends copies to a server; raises if that fails."""


class ReadsSamples(Protocol):
    """This worker's leases."""

    def give_back(self, recall: Recall) -> GaveBack:
        """Returns the samples that are not started."""

    def used(self) -> list[LeaseAck]:
        """Lease ranges used by commits."""

    def late(self) -> list[LeaseAck]:
        """Lease ranges of late commits."""

    def are_told(self) -> bool:
        """Whether the answers of `used` and `late`, if asked after this, are final."""


class HandlesSaves(Protocol):
    """This worker's side of saves."""

    def hear(self, request: Request) -> None:
        """Expect, WriteScript or EndSave."""


class HandlesValidation(Protocol):
    """This worker's side of validations."""

    def hear(self, called: Called) -> None:
        """Other workers wait for this one in a validation."""

    def write_candidate(self, request: Request) -> None:
        """Writes this worker's own model; may take long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """The parts of a job that answer the coordinator."""

    break_off: Callable[[], None]  #: ends all waits for servers: the job has failed, or this worker is out
    heartbeat: Callable[[], Heartbeat]
    copies: GivesCopies
    samples: ReadsSamples
    saves: HandlesSaves
    validation: HandlesValidation


class CoordinatorHandlers:
    """Handles the coordinator's messages. Slow work runs in its own thread, never in the reading one."""

    def __init__(self, ending: Callable[[float], None] = lambda seconds: None) -> None:
        """`ending`: called when the job is saved, and then ends; with the seconds for which this process stays."""
        self._ending = ending
        self.rosters = Rosters()
        self.over: Over | None = None
        self.evicted: FencedError | None = None
        self.heard = threading.Event()  # the outcome is known
        self.is_retiring = self.has_retired = False
        self.comes_back = False  # what started this process starts it again when it has left
        self.pacing = StepPacing(self.check)
        self.signals = RuleSignals()
        self._parts: WorkerParts | None = None  # None until the job exists
        self._has_begun = False
        self._life = ("", 0)

    def begin(self, link: Link, joined: Joined, name: str, *, beats: bool) -> None:
        """This process is a member from now on. Idempotent."""
        if self._has_begun:
            return
        self._has_begun, self._life = True, (name, joined.incarnation)
        self.rosters.hear(
            Roster(joined.generation, joined.members, [], joined.finished, is_chief_done=joined.is_chief_done)
        )
        link.begin(
            name,
            joined.incarnation,
            beat=self.heartbeat if beats else None,
            beat_seconds=beat_seconds(joined.config, len(joined.members)),
            silent_seconds=SILENT * joined.config.deadline_seconds,
            on_roster=self.rosters.hear,
        )

    def attach(self, parts: WorkerParts) -> None:
        """The job exists: its parts answer the coordinator from now on."""
        self._parts = parts
        if self.evicted is not None or (self.over is not None and self.over.failed):
            parts.break_off()

    def heartbeat(self) -> Heartbeat:
        """The content of the next heartbeat."""
        return self._parts.heartbeat() if self._parts is not None else Heartbeat()

    def retires_now(self) -> bool:
        """Whether this worker was asked to leave; if so, it starts to leave."""
        if not self.is_retiring:
            return False
        self.is_retiring, self.has_retired = False, True
        return True

    def check(self) -> None:
        """Raises the outcome for this worker, if there is one."""
        if self.evicted is not None:
            raise FencedError(str(self.evicted))
        if self.over is not None and self.over.failed:
            raise JobFailed(f"the job has ended: {self.over.reason}")

    # -- what the link calls ------------------------------------------------------------------------------

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> list[Buffer]:
        raise ProtocolError(f"{type(message).__name__} has no payload")

    def handle(self, request: Request) -> None:
        message, parts = request.message, self._parts
        if isinstance(message, Over):
            self._end(message)
        elif isinstance(message, Ending):
            self._ending(message.seconds)
        elif isinstance(message, Roster):
            self.rosters.hear(message)
        elif isinstance(message, Retire):
            self.is_retiring = True
            request.reply(Done())
        elif isinstance(message, Pace):
            self.pacing.hear(message)
        elif isinstance(message, Steer):
            self.signals.hear(message)
        elif isinstance(message, Called):
            if parts is not None:
                parts.validation.hear(message)
        elif isinstance(message, WriteCandidate):
            if parts is not None:
                write = parts.validation.write_candidate
                threading.Thread(target=write, args=(request,), name="candidate", daemon=True).start()
        elif isinstance(message, Recall):
            request.reply(parts.samples.give_back(message) if parts is not None else GaveBack([]))
        elif isinstance(message, AskLeaseAcks):
            request.reply(self._acks(parts.samples) if parts is not None else GivenLeaseAcks([]))
        elif isinstance(message, AskCopies | GiveCopies):
            threading.Thread(target=self._see_to_copies, args=(request, message), name="copies", daemon=True).start()
        elif isinstance(message, Expect | WriteScript | EndSave) and parts is not None:
            parts.saves.hear(request)
        else:
            raise ProtocolError(f"a worker does not answer {type(message).__name__}")

    def _acks(self, samples: ReadsSamples) -> GivenLeaseAcks:
        is_all = samples.are_told()  # first: answers that arrive meanwhile are included
        return GivenLeaseAcks(samples.used(), samples.late(), [] if is_all else [self._life])

    def _see_to_copies(self, request: Request, message: AskCopies | GiveCopies) -> None:
        try:
            if self._parts is None:
                raise ProtocolError("this worker has no copies yet")
            copies = self._parts.copies
            if isinstance(message, AskCopies):
                request.reply(GivenCopies(copies.copies_of(message.slices)))
            else:
                copies.give_copies(message.copies, message.target)
                request.reply(Done())
        except Exception as error:  # the coordinator waits for a reply, whatever happens
            request.refuse(error)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        """The link handles broken connections."""

    def fenced(self, error: FencedError) -> None:
        """This process was evicted, as the coordinator or a server said."""
        if self.evicted is None:
            self.evicted = error
            self.heard.set()
            self._break_off()

    def gone(self, reason: str) -> None:
        """The coordinator did not come back."""
        self._end(Over(True, "coordinator", reason))

    def _end(self, over: Over) -> None:
        if self.over is None:
            self.over = over
            self.heard.set()
            if over.failed:
                self._break_off()

    def _break_off(self) -> None:
        if self._parts is not None:
            self._parts.break_off()


#: How long to wait for the coordinator to explain a broken connection.
VERDICT_SECONDS = 4.0
_WAITS: dict[type[Message], str] = {
    Register: "registration",
    AskLease: "the end of the epoch",
    AskLife: "the end of its earlier life",
    Save: "a save",
    **dict.fromkeys((Come, Attend, Begin, AskValidationShard, LocalCandidate, AskReading), "the validation"),
}
#: Requests that may wait for other workers; a worker that was asked to leave stops waiting.
_FOR_OTHERS = (AskLife, Barrier, Register, Uploaded, AskLease, Attend, Begin, AskReading)
#: Requests during which no round waits for this worker.
_WHILE_RESTING = (Barrier, AskLease, Attend, Begin, AskReading)


def left(name: str) -> ConfigError:
    """The error for a call after the worker has left."""
    return ConfigError(
        f"{name} has left its job: job.close() was called, `with job:` has ended, or syncline.Stopped was raised; "
        "step, push and pull before that"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhileWaiting:
    """Called now and then while a worker waits for the coordinator."""

    leave_if_retiring: Callable[[], None]  #: ends the script of a worker that was asked to leave
    follow: Callable[[], None]  #: a server that joined meanwhile must not wait for this worker
    look_for_validation: Callable[[], None]  #: raises ValidationCalled if others wait for this worker in a validation


class CoordinatorSession:
    """A job's requests to the coordinator, in the script's thread."""

    def __init__(
        self, name: str, wait_seconds: float, link: Link, handlers: CoordinatorHandlers, waits: Waits,
        boundary: Boundary, closed: threading.Event, meanwhile: WhileWaiting,
    ) -> None:  # fmt: skip
        """`closed`: the worker has left the job."""
        self._name, self._wait_seconds, self._link, self._handlers = name, wait_seconds, link, handlers
        self._waits, self._boundary, self._closed, self._meanwhile = waits, boundary, closed, meanwhile

    def ask(self, message: Message, meanwhile: Callable[[], None] = lambda: None) -> Message:
        """Returns the coordinator's answer. `meanwhile` is called now and then while other workers are waited for.

        On ValidationCalled, ask again after the validation.
        """
        if self._closed.is_set():
            raise left(self._name)
        what = _WAITS.get(type(message), type(message).__name__.lower())
        seconds = self._wait_seconds
        called_away = self._meanwhile.look_for_validation
        try:
            with self._waits.of(what):
                if isinstance(message, AskLease) and message.waits:
                    with self._boundary.waiting():
                        return self._link.call(message, seconds, self._while_resting(called_away))
                if isinstance(message, Barrier):
                    return self._link.call(message, seconds, self._while_resting(called_away))
                look = self._while_resting(meanwhile) if isinstance(message, _WHILE_RESTING) else self._look
                return self._link.call(message, seconds, look if isinstance(message, _FOR_OTHERS) else None)
        except WaitTimeout:
            why = self._why()
            words = why if "has waited" in why else f"{what} has waited {seconds:g} s: {why}"
            raise WaitTimeout(f"{self._name}: {words}") from None
        except FencedError as error:
            self._handlers.fenced(error)
            raise
        except ConnectionLost as error:
            raise self.explain(error) from None

    def _look(self) -> None:
        """A wait ends when the job has failed, or when this worker was asked to leave."""
        self._handlers.check()
        self._meanwhile.leave_if_retiring()

    def _while_resting(self, meanwhile: Callable[[], None]) -> Callable[[], None]:
        """Also follows rosters: a server that joined meanwhile must not wait for this worker."""

        def look() -> None:
            self._look()
            self._meanwhile.follow()
            meanwhile()

        return look

    def _why(self) -> str:
        try:
            answer = self._link.try_call(AskWhy()).wait(5.0)
        except SynclineError as error:
            return str(error)
        return answer.reason if isinstance(answer, GivenWhy) else ""

    def explain(self, error: SynclineError) -> SynclineError:
        """The reason for a broken connection, by the coordinator if it answers soon."""
        self._handlers.heard.wait(VERDICT_SECONDS)
        try:
            self._handlers.check()
        except SynclineError as found:
            return found
        return error
