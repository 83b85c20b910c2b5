"""Links to the other workers: made when they are first needed, one connection for each pair.

A `PeerStream` holds what one other worker has said and no call has taken yet.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from syncline.core.members import Member
from syncline.core.wire.collectives import Describe, Offer, Taken
from syncline.core.wire.control import Roster
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, FencedError, ProtocolError
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Buffer, Connection, Memory, Peer
from syncline.stats import WireStats
from syncline.worker.arrays import Bytes
from syncline.worker.session import Rosters

#: A roster may reach the one who asks sooner than the one who is asked.
ROSTER_SECONDS = 3.0
#: A worker that waits to be dialled knocks again after this long.
_KNOCK_SECONDS = 2.0
#: For a worker that has just joined to hear that it has.
_JOIN_SECONDS, _JOIN_LOOK_SECONDS = 10.0, 0.02


class Connector(Protocol):
    """How another worker is reached, over whatever transport."""

    def connect(self, member: Member) -> Connection:
        """A connection to this worker, proved by both; ConnectionLost when it cannot be reached."""

    def knock(self, member: Member) -> None:
        """Asks this worker to connect to us; a ConnectionLost when it cannot be told."""

    def create_memory(self, num_bytes: int) -> Memory:
        """Memory that workers on this host can read and write; an OSError when there is too little."""


class PeerHandler(Protocol):
    """Hears what other workers say, in the thread that brings it. A ProtocolError closes the link it came on."""

    def buffers_for(self, link: PeerLink, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        """Where the bytes that come with a message go."""

    def hear(self, link: PeerLink, request: Request) -> None:
        """A whole message is here."""


class PeerLink:
    """A connection to one life of another worker."""

    def __init__(
        self, member: Member, handlers: dict[type[Message], PeerHandler], change: threading.Condition
    ) -> None:
        self.member, self._handlers, self._change = member, handlers, change
        self.name, self.incarnation = member.name, member.incarnation
        self.lost = ""  # why there is nothing more to come
        self.has_left = False  # it has said so
        self.shares_memory = False  #: whether it is on this host, as proved by what the connection can carry
        self.waiter_reads = False  #: whether nothing is received until the waiting thread reads
        self._endpoint: Endpoint | None = None

    def begin(self, connection: Connection, stamp: Stamp) -> None:
        self._endpoint = Endpoint(connection, stamp, _Service(self), waiter_reads=True)
        self.shares_memory, self.waiter_reads = self._endpoint.shares_memory, self._endpoint.waiter_reads

    def send(
        self, message: Message, buffers: Iterable[Buffer] = (), payload_bytes: int = 0,
        attachment: Memory | None = None,
    ) -> None:  # fmt: skip
        if self._endpoint is None or self.lost:
            raise ConnectionLost(f"{self.name} is gone: {self.lost or 'not connected'}")
        self._endpoint.send(0, 0, message, buffers, payload_bytes, attachment)

    def read(self, seconds: float) -> bool:
        """Receives one message, where no other thread does."""
        return self._endpoint is not None and not self.lost and self._endpoint.read(seconds)

    @property
    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None
        return self._endpoint

    def close(self, reason: str = "closed") -> None:
        if self._endpoint is not None:
            self._endpoint.close(reason)

    def stats(self) -> WireStats:
        return self._endpoint.stats() if self._endpoint is not None else WireStats()

    def handler(self, message: Message) -> PeerHandler:
        """The handler of messages of this kind."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a worker does not say {type(message).__name__} to a worker")
        return handler

    def ended(self, reason: str) -> None:
        """There is nothing more to come."""
        with self._change:
            self.lost = self.lost or reason or "closed"
            self._change.notify_all()


class _Service:
    """What the endpoint of a link calls."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        return self._link.handler(message).buffers_for(self._link, message, payload_bytes)

    def handle(self, request: Request) -> None:
        link = self._link
        try:
            link.handler(request.message).hear(link, request)
        except ProtocolError as error:
            request.endpoint.close(f"refused what {link.name} sent: {type(error).__name__}: {error}")

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self._link.ended(reason)


class Peers:
    """All links of one worker. Of two workers the later member dials; the other asks it to, by knocking."""

    def __init__(self, rosters: Rosters, stamp: Stamp, connector: Connector, say: Callable[[str], None]) -> None:
        self.rosters, self._stamp, self._connector, self._say = rosters, stamp, connector, say
        self.create_memory = connector.create_memory
        self.lock = threading.RLock()  # of all links and what is heard on them
        self.change = threading.Condition(self.lock)
        self.handlers: dict[type[Message], PeerHandler] = {}
        self.live: frozenset[int] = frozenset()  # incarnations, by the newest roster
        self.links: dict[int, PeerLink] = {}
        self._dialling: set[int] = set()
        self._knocked: dict[int, float] = {}
        self._gone = WireStats()
        self._closed = False
        self.num_changes = 0  # of rosters that were heard
        rosters.listen(self._hear)
        self._hear(rosters.newest)

    @property
    def incarnation(self) -> int:
        return self._stamp.incarnation

    def _hear(self, roster: Roster) -> None:
        with self.change:
            self.live = frozenset(member.incarnation for member in roster.members)
            self.num_changes += 1
            self.change.notify_all()

    # -- making them --------------------------------------------------------------------------------------

    def link(self, member: Member) -> PeerLink | None:
        """The link to this worker; None: it was asked to dial, and `change` is notified when the link is there."""
        with self.change:
            link = self.links.get(member.incarnation)
            if link is not None and not link.lost:
                return link
            if self._closed:
                raise ConnectionLost("this worker has left the job")
        if self.incarnation > member.incarnation:
            self._dial(member)
            return self.links.get(member.incarnation)
        now = time.monotonic()
        if now - self._knocked.get(member.incarnation, -_KNOCK_SECONDS) >= _KNOCK_SECONDS:
            self._knocked[member.incarnation] = now
            self._connector.knock(member)
        return None

    def known(self, incarnation: int) -> PeerLink | None:
        """The link to this worker, if there is one now."""
        link = self.last_link(incarnation)
        return link if link is not None and not link.lost else None

    def last_link(self, incarnation: int) -> PeerLink | None:
        """The same, though it may be closed."""
        with self.change:
            return self.links.get(incarnation)

    def _dial(self, member: Member) -> None:
        with self.change:
            known = self.links.get(member.incarnation)
            if member.incarnation in self._dialling or self._closed or (known is not None and not known.lost):
                return
            self._dialling.add(member.incarnation)
        try:
            self._begin(member, self._reach(member))
        finally:
            with self.change:
                self._dialling.discard(member.incarnation)
                self.change.notify_all()

    def _reach(self, member: Member) -> Connection:
        """A connection to this life of it. One that has joined and not heard so yet is dialled again."""
        until = time.monotonic() + _JOIN_SECONDS
        while True:
            connection = self._connector.connect(member)
            peer = connection.peer
            if (peer.name, peer.incarnation) == (member.name, member.incarnation):
                return connection
            connection.close("another worker was expected")
            if peer.incarnation or time.monotonic() > until:
                raise ConnectionLost(f"{peer.name} answers where {member.name} was")
            time.sleep(_JOIN_LOOK_SECONDS)

    def _begin(self, member: Member, connection: Connection) -> None:
        link = PeerLink(member, self.handlers, self.change)
        link.begin(connection, self._stamp)
        with self.change:
            before, self.links[member.incarnation] = self.links.get(member.incarnation), link
            self._knocked.pop(member.incarnation, None)
            is_closed = self._closed
            self.change.notify_all()
        if before is not None:
            before.close("there is a newer connection")
            self._gone += before.stats()
        if is_closed:
            link.close()

    def accept(self, connection: Connection) -> None:
        """Another worker has connected, and proved who it is; a worker that is not in the roster is refused."""
        peer = connection.peer
        member = self._member(peer)
        if member is None:
            reason = f"{peer.name} of incarnation {peer.incarnation} is no worker of this job, by the roster"
            self._say(f"a connection was refused: {reason}")
            connection.close(reason)
        elif member.incarnation < self.incarnation:
            self.knocked(member, connection)
        else:
            self._begin(member, connection)

    def knocked(self, member: Member, connection: Connection | None = None) -> None:
        """A worker asks to be dialled."""
        if connection is not None:
            connection.close()
        try:
            self._dial(member)
        except (ConnectionLost, FencedError, ProtocolError) as error:
            self._say(f"{member.name} asked for a connection, which could not be made: {error}")

    def _member(self, peer: Peer) -> Member | None:
        until = time.monotonic() + ROSTER_SECONDS
        while peer.role == "worker":
            roster = self.rosters.newest
            for member in roster.members:
                if (member.role, member.name, member.incarnation) == ("worker", peer.name, peer.incarnation):
                    return member
            if not self.rosters.wait(roster.generation, until - time.monotonic()):
                break
        return None

    # -- the end ------------------------------------------------------------------------------------------

    def forget_gone(self) -> None:
        """Closes the links to workers that are gone."""
        with self.change:
            gone = [link for number, link in self.links.items() if number not in self.live]
            for link in gone:
                del self.links[link.incarnation]
        for link in gone:
            self._gone += link.stats()
            link.close()

    def tell_all(self, message: Message) -> None:
        """Sends a message on every open link."""
        for link in list(self.links.values()):
            try:
                link.send(message)
            except ConnectionLost:
                continue

    def stats(self) -> WireStats:
        return sum((link.stats() for link in list(self.links.values())), self._gone)

    def close(self, reason: str = "closed") -> None:
        with self.change:
            self._closed = True
            links = list(self.links.values())
            self.change.notify_all()
        for link in links:
            link.close(reason)


#: A worker has few of its own.
MOST_MEMORIES = 1 << 12
Key = tuple[tuple[int, ...], int]


class ChunkReceiver(Protocol):
    """Where chunks of one other worker go, in their order."""

    def place(self, offset: int, num_bytes: int) -> Buffer:
        """For the next one; a FrameError when it is not the next one, or of another size."""

    def came(self) -> None:
        """It is here."""


class PeerStream:
    """What came over one link; changed and read under the lock of all links."""

    def __init__(self) -> None:
        self.checked: tuple[object, int] = (None, 0)  # a description that was found sound, and the bytes with it
        self.said: collections.deque[tuple[Describe, Sequence[Buffer]]] = collections.deque()
        self.last: Key | None = None  # what it has described last: its chunks come now
        self.heard: Key | None = None  # what of it was taken last
        self.receiver: ChunkReceiver | None = None  # for chunks of that
        self.through: set[Key] = set()
        self.memories: dict[int, Memory] = {}  # of the other side
        self.shared: set[int] = set()  # of mine, that it knows
        # from one to one
        self.num_offered = self.num_taken = 0  # to it by me, from it by me
        self.offers: collections.deque[tuple[Offer, Sequence[Buffer]]] = collections.deque()
        self.wants: set[int] = set()  # of my offers: those whose bytes it wants
        self.answers: dict[int, Taken] = {}
        self.inbox: Inbox | None = None  # for the bytes of an offer of its


class Inbox:
    """Where the bytes of one offer go."""

    def __init__(self, number: int, data: Bytes) -> None:
        self.number, self.data, self.count = number, data, 0
