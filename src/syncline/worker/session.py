"""A worker's session with the coordinator: the newest roster, what the coordinator says, what it is asked."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from syncline.core.members import Member, by_name
from syncline.core.metrics import Steer
from syncline.core.slice_state import Copy
from syncline.core.wire.checkpoints import EndSave, Expect, Save, WriteScript
from syncline.core.wire.control import (
    AskCopies,
    AskLife,
    AskWhy,
    Barrier,
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
from syncline.core.wire.leases import AskLease, AskLeaseAcks, GaveBack, Recall, Use, Uses
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
from syncline.errors import ConnectionLost, FencedError, JobFailed, ProtocolError, SynclineError, WaitTimeout
from syncline.net.link import SILENT, Link
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, Peer
from syncline.worker.exchange.commit import left
from syncline.worker.metrics import Steering
from syncline.worker.waits import StepClock

if TYPE_CHECKING:
    from syncline.worker.job import Job


class Rosters:
    """Told by the thread that hears the coordinator; read, and waited for, by the script's own."""

    def __init__(self) -> None:
        self.newest = Roster(0, [], [])
        self._change = threading.Condition()
        self._telling = threading.RLock()
        self._listeners: list[Callable[[Roster], None]] = []

    def listen(self, listener: Callable[[Roster], None]) -> None:
        """From now on this is told of every newer roster, in the thread that brings it; it must be quick."""
        self._listeners.append(listener)

    def hear(self, roster: Roster) -> None:
        with self._change:
            if roster.generation < self.newest.generation:
                return
            self.newest = roster
            self._change.notify_all()
        with self._telling:  # one after the other, and always of the newest
            for listener in self._listeners:
                listener(self.newest)

    def wait(self, generation: int, seconds: float) -> bool:
        """Until there is a roster of a later generation than this, or this long; whether there is."""
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
    """Rank, number of workers, rank on this host; None: not there."""
    workers = ranked(roster)
    names = [member.name for member in workers]
    if me.name not in names:
        return None
    local = [member.name for member in workers if member.host == me.host]
    return names.index(me.name), len(names), local.index(me.name) if me.name in local else 0


#: So often a worker that waits looks whether it is to leave, or the job is over.
LOOK_SECONDS = 0.2


class Pacing:
    """Set by the thread that hears the coordinator; heeded by the script's own, between two steps."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises how the job has ended for this worker, if it has."""
        self._check = check
        self._pace = Pace("")
        self._change = threading.Condition()

    def hear(self, pace: Pace) -> None:
        with self._change:
            self._pace = pace
            self._change.notify_all()

    def slow_down(self, look: Callable[[], None]) -> None:
        """A step was made: the pause that is to come before the next one. A new pace ends it, and `look` may."""
        pace = self._pace
        if pace.delay_seconds:
            self._wait(lambda: self._pace is not pace, time.monotonic() + pace.delay_seconds, look)

    @property
    def is_held(self) -> bool:
        return self._pace.is_paused

    def hold(self, look: Callable[[], None], times: StepClock) -> None:
        """Returns when this worker is not held; that is no part of a step."""
        if self._pace.is_paused:
            times.pause()
            self._wait(lambda: not self._pace.is_paused, math.inf, look)
            times.resume()

    def _wait(self, is_over: Callable[[], bool], until: float, look: Callable[[], None]) -> None:
        while not is_over() and (left := until - time.monotonic()) > 0:
            self._check()
            look()
            with self._change:
                if not is_over():
                    self._change.wait(min(left, LOOK_SECONDS))


class GivesCopies(Protocol):
    """What knows of this worker's copies of slices."""

    def copies_of(self, slices: list[int]) -> list[Copy]:
        """Which versions of these slices are here."""

    def give_copies(self, copies: list[Copy], target: Member) -> None:
        """Brings them to a server; raises what keeps it from that."""


class ReadsSamples(Protocol):
    """What knows of this worker's leases."""

    def give_back(self, recall: Recall) -> GaveBack:
        """What is not begun goes back."""

    def used(self) -> list[Use]:
        """What commits have used."""

    def late(self) -> list[Use]:
        """What was in commits that were late."""

    def are_told(self) -> bool:
        """Whether that was all, once these two are asked for after this."""


class Saves(Protocol):
    """What sees to this worker's part in saves."""

    def hear(self, request: Request) -> None:
        """Expect, WriteScript or EndSave."""


class FromCoordinator:
    """A worker's ear. Whatever takes long is done in a thread of its own, never in the one that reads."""

    def __init__(self) -> None:
        self.rosters = Rosters()
        self.over: Over | None = None
        self.evicted: FencedError | None = None
        self.heard = threading.Event()  # how it ended
        self.is_retiring = self.has_retired = False
        self.pacing = Pacing(self.check)
        self.steering = Steering()
        self.on_failure: Callable[[], None] = lambda: None
        self.beat: Callable[[], Heartbeat] = Heartbeat
        self.copies: GivesCopies | None = None
        self.samples: ReadsSamples | None = None
        self.hear_call: Callable[[Called], None] = lambda called: None
        self.write_own: Callable[[Request], None] = lambda request: None
        self.saves: Saves | None = None
        self._has_begun = False
        self._life = ("", 0)

    def begin(self, link: Link, joined: Joined, name: str, *, beats: bool) -> None:
        """This process is a member from now on. Said again it changes nothing."""
        if self._has_begun:
            return
        self._has_begun, self._life = True, (name, joined.incarnation)
        self.rosters.hear(
            Roster(joined.generation, joined.members, [], joined.finished, is_chief_done=joined.is_chief_done)
        )
        link.begin(
            name,
            joined.incarnation,
            beat=self._make_beat if beats else None,
            beat_seconds=joined.config.beat_seconds,
            silent_seconds=SILENT * joined.config.deadline_seconds,
            on_roster=self.rosters.hear,
        )

    def _make_beat(self) -> Heartbeat:
        return self.beat()  # set when the job is there

    def check(self) -> None:
        """Raises how it ended for this worker, if it has."""
        if self.evicted is not None:
            raise FencedError(str(self.evicted))
        if self.over is not None and self.over.failed:
            raise JobFailed(f"the job has ended: {self.over.reason}")

    # -- what the link calls ------------------------------------------------------------------------------

    def landing(self, peer: Peer, message: Message, payload_bytes: int) -> list[Buffer]:
        raise ProtocolError(f"{type(message).__name__} has no payload")

    def handle(self, request: Request) -> None:
        message = request.message
        if isinstance(message, Over):
            self._end(message)
        elif isinstance(message, Roster):
            self.rosters.hear(message)
        elif isinstance(message, Retire):
            self.is_retiring = True
            request.reply(Done())
        elif isinstance(message, Pace):
            self.pacing.hear(message)
        elif isinstance(message, Steer):
            self.steering.hear(message)
        elif isinstance(message, Called):
            self.hear_call(message)
        elif isinstance(message, WriteCandidate):
            threading.Thread(target=self.write_own, args=(request,), name="own", daemon=True).start()
        elif isinstance(message, Recall):
            request.reply(self.samples.give_back(message) if self.samples is not None else GaveBack([]))
        elif isinstance(message, AskLeaseAcks):
            request.reply(self._uses(self.samples) if self.samples is not None else Uses([]))
        elif isinstance(message, AskCopies | GiveCopies):
            threading.Thread(target=self._see_to_copies, args=(request, message), name="copies", daemon=True).start()
        elif isinstance(message, Expect | WriteScript | EndSave) and self.saves is not None:
            self.saves.hear(request)
        else:
            raise ProtocolError(f"a worker does not answer {type(message).__name__}")

    def _uses(self, samples: ReadsSamples) -> Uses:
        is_all = samples.are_told()  # first: what is answered meanwhile is said with it
        return Uses(samples.used(), samples.late(), [] if is_all else [self._life])

    def _see_to_copies(self, request: Request, message: AskCopies | GiveCopies) -> None:
        try:
            if self.copies is None:
                raise ProtocolError("this worker has no copies yet")
            if isinstance(message, AskCopies):
                request.reply(GivenCopies(self.copies.copies_of(message.slices)))
            else:
                self.copies.give_copies(message.copies, message.target)
                request.reply(Done())
        except Exception as error:  # whatever it is, the coordinator waits for an answer
            request.refuse(error)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        """The link sees to a connection that breaks."""

    def fenced(self, error: FencedError) -> None:
        """This process was evicted, by the word of the coordinator or of a server."""
        if self.evicted is None:
            self.evicted = error
            self.heard.set()
            self.on_failure()

    def gone(self, reason: str) -> None:
        """The coordinator did not come back."""
        self._end(Over(True, "coordinator", reason))

    def _end(self, over: Over) -> None:
        if self.over is None:
            self.over = over
            self.heard.set()
            if over.failed:
                self.on_failure()


#: How long a broken connection waits for the coordinator's word on why.
VERDICT_SECONDS = 4.0
_WAITS: dict[type[Message], str] = {
    Register: "registration",
    AskLease: "the end of the epoch",
    AskLife: "the end of its earlier life",
    Save: "a save",
    **dict.fromkeys((Come, Attend, Begin, AskValidationShard, LocalCandidate, AskReading), "the validation"),
}
#: What may wait for other workers: who is to leave waits no longer.
_FOR_OTHERS = (AskLife, Barrier, Register, Uploaded, AskLease, Attend, Begin, AskReading)
#: Meanwhile no round waits for this worker, or there is none.
_ASIDE = (Barrier, AskLease, Attend, Begin, AskReading)


class Asking:
    """Of one job, in its script's thread."""

    def __init__(self, job: Job, link: Link, hearing: FromCoordinator) -> None:
        self._job, self._link, self._hearing = job, link, hearing

    def ask(self, message: Message, meanwhile: Callable[[], None] = lambda: None) -> Message:
        """The coordinator's answer; `meanwhile` is called now and then, where others are waited for.

        ValidationCalled: it is to be asked again, behind the validation.
        """
        job = self._job
        if job.is_closed:
            raise left(job.name)
        what = _WAITS.get(type(message), type(message).__name__.lower())
        seconds = job.config.wait_seconds
        called_away = job.validating.while_waiting  # others may be in a validation, and wait for this one
        try:
            with job.exchange.waits.of(what):
                if isinstance(message, AskLease) and message.waits:
                    with job.boundary.waiting():
                        return self._link.call(message, seconds, self._while_resting(called_away))
                if isinstance(message, Barrier):
                    return self._link.call(message, seconds, self._while_resting(called_away))
                look = self._while_resting(meanwhile) if isinstance(message, _ASIDE) else self._look
                return self._link.call(message, seconds, look if isinstance(message, _FOR_OTHERS) else None)
        except WaitTimeout:
            why = self._why()
            words = why if "has waited" in why else f"{what} has waited {seconds:g} s: {why}"
            raise WaitTimeout(f"{job.name}: {words}") from None
        except FencedError as error:
            self._hearing.fenced(error)
            raise
        except ConnectionLost as error:
            raise self.explain(error) from None

    def _look(self) -> None:
        """Nobody comes any more to a job that has failed, and who is to leave waits no longer."""
        self._hearing.check()
        self._job.leave_if_retiring()

    def _while_resting(self, meanwhile: Callable[[], None]) -> Callable[[], None]:
        """A server that has come meanwhile, and knows nobody, must not wait for this one."""

        def look() -> None:
            self._look()
            self._job.exchange.follow()
            meanwhile()

        return look

    def _why(self) -> str:
        try:
            answer = self._link.try_call(AskWhy()).wait(5.0)
        except SynclineError as error:
            return str(error)
        return answer.reason if isinstance(answer, GivenWhy) else ""

    def explain(self, error: SynclineError) -> SynclineError:
        """Why a connection broke, by the coordinator's word if it comes soon."""
        self._hearing.heard.wait(VERDICT_SECONDS)
        try:
            self._hearing.check()
        except SynclineError as found:
            return found
        return error
