"""What the coordinator says to a worker: rosters, that it is to leave, that the job is over; what it asks of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from syncline.core.members import Member
from syncline.core.metrics import Steer
from syncline.core.slice_state import Copy
from syncline.core.wire.checkpoints import EndSave, Expect, WriteScript
from syncline.core.wire.control import AskCopies, GiveCopies, GivenCopies, Heartbeat, Joined, Over, Retire, Roster
from syncline.core.wire.leases import AskLeaseAcks, GaveBack, Recall, Use, Uses
from syncline.core.wire.message import Done, Message
from syncline.core.wire.pace import Pace
from syncline.core.wire.validation import Called, WriteCandidate
from syncline.errors import FencedError, JobFailed, ProtocolError
from syncline.net.link import SILENT, Link
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, Peer
from syncline.worker.pacing import Pacing
from syncline.worker.rosters import Rosters
from syncline.worker.steering import Steering


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
