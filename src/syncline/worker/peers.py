"""Ways to the other workers: made when they are first needed, one connection for each pair."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from syncline.core.members import Member
from syncline.core.wire.control import Roster
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, FencedError, ProtocolError
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Buffer, Connection, Memory, Peer
from syncline.stats import WireStats
from syncline.worker.rosters import Rosters

#: A roster may reach the one who asks sooner than the one who is asked.
_ROSTER_SECONDS = 3.0
#: Who waits to be dialled asks for it again after this long.
_KNOCK_SECONDS = 2.0
#: For a worker that has just joined to hear that it has.
_JOIN_SECONDS, _JOIN_LOOK_SECONDS = 10.0, 0.02


class Connector(Protocol):
    """How another worker is reached, over whatever transport."""

    def connect(self, member: Member) -> Connection:
        """A connection to this worker, proved by both; a ConnectionLost when there is no way."""

    def knock(self, member: Member) -> None:
        """Asks this worker to connect to us; a ConnectionLost when it cannot be told."""

    def create_memory(self, num_bytes: int) -> Memory:
        """Memory that workers on this host can read and write; an OSError when there is too little."""


class Ear(Protocol):
    """Hears what other workers say, in the thread that brings it. A ProtocolError closes the way it came on."""

    def landing(self, way: Way, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        """Where the bytes that come with a message go."""

    def hear(self, way: Way, request: Request) -> None:
        """A whole message is here."""


class Way:
    """To one life of another worker."""

    def __init__(self, member: Member, ears: dict[type[Message], Ear], change: threading.Condition) -> None:
        self.member, self._ears, self._change = member, ears, change
        self.name, self.incarnation = member.name, member.incarnation
        self.lost = ""  # why there is nothing more to come
        self.has_left = False  # it has said so
        self.shares_memory = False  #: whether it is on this host, as proved by what the connection can carry
        self.waiter_reads = False  #: whether nothing is heard until somebody reads
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
        """Hears one message, where nobody else does."""
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

    def ear(self, message: Message) -> Ear:
        """Who hears a message of this kind."""
        ear = self._ears.get(type(message))
        if ear is None:
            raise ProtocolError(f"a worker does not say {type(message).__name__} to a worker")
        return ear

    def ended(self, reason: str) -> None:
        """There is nothing more to come."""
        with self._change:
            self.lost = self.lost or reason or "closed"
            self._change.notify_all()


class _Service:
    """What the endpoint of a way calls."""

    def __init__(self, way: Way) -> None:
        self._way = way

    def landing(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        return self._way.ear(message).landing(self._way, message, payload_bytes)

    def handle(self, request: Request) -> None:
        way = self._way
        try:
            way.ear(request.message).hear(way, request)
        except ProtocolError as error:
            request.endpoint.close(f"refused what {way.name} sent: {type(error).__name__}: {error}")

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self._way.ended(reason)


class Peers:
    """All ways of one worker. Of two, the later member dials; the other asks it to, by knocking."""

    def __init__(self, rosters: Rosters, stamp: Stamp, connector: Connector, say: Callable[[str], None]) -> None:
        self.rosters, self._stamp, self._connector, self._say = rosters, stamp, connector, say
        self.create_memory = connector.create_memory
        self.lock = threading.RLock()  # of all ways and what is heard on them
        self.change = threading.Condition(self.lock)
        self.ears: dict[type[Message], Ear] = {}
        self.live: frozenset[int] = frozenset()  # incarnations, by the newest roster
        self._ways: dict[int, Way] = {}
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

    def way(self, member: Member) -> Way | None:
        """The way to this worker; None: it was asked to make one, and `change` is notified when it is there."""
        with self.change:
            way = self._ways.get(member.incarnation)
            if way is not None and not way.lost:
                return way
            if self._closed:
                raise ConnectionLost("this worker has left the job")
        if self.incarnation > member.incarnation:
            self._dial(member)
            return self._ways.get(member.incarnation)
        now = time.monotonic()
        if now - self._knocked.get(member.incarnation, -_KNOCK_SECONDS) >= _KNOCK_SECONDS:
            self._knocked[member.incarnation] = now
            self._connector.knock(member)
        return None

    def known(self, incarnation: int) -> Way | None:
        """The way to this one, if there is one now."""
        way = self.last_way(incarnation)
        return way if way is not None and not way.lost else None

    def last_way(self, incarnation: int) -> Way | None:
        """The same, though it may be closed."""
        with self.change:
            return self._ways.get(incarnation)

    def _dial(self, member: Member) -> None:
        with self.change:
            known = self._ways.get(member.incarnation)
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
        way = Way(member, self.ears, self.change)
        way.begin(connection, self._stamp)
        with self.change:
            before, self._ways[member.incarnation] = self._ways.get(member.incarnation), way
            self._knocked.pop(member.incarnation, None)
            is_closed = self._closed
            self.change.notify_all()
        if before is not None:
            before.close("there is a newer connection")
            self._gone += before.stats()
        if is_closed:
            way.close()

    def accept(self, connection: Connection) -> None:
        """Another worker has connected, and proved who it is; whoever the roster does not have is refused."""
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
        until = time.monotonic() + _ROSTER_SECONDS
        while peer.role == "worker":
            roster = self.rosters.newest
            for member in roster.members:
                if (member.role, member.name, member.incarnation) == ("worker", peer.name, peer.incarnation):
                    return member
            if not self.rosters.wait(roster.generation, until - time.monotonic()):
                break
        return None

    # -- the end ------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Ways to those who are gone are given back."""
        with self.change:
            gone = [way for number, way in self._ways.items() if number not in self.live]
            for way in gone:
                del self._ways[way.incarnation]
        for way in gone:
            self._gone += way.stats()
            way.close()

    def tell_all(self, message: Message) -> None:
        """Says something on every way that is open."""
        for way in list(self._ways.values()):
            try:
                way.send(message)
            except ConnectionLost:
                continue

    def stats(self) -> WireStats:
        return sum((way.stats() for way in list(self._ways.values())), self._gone)

    def close(self, reason: str = "closed") -> None:
        with self.change:
            self._closed = True
            ways = list(self._ways.values())
            self.change.notify_all()
        for way in ways:
            way.close(reason)
