"""Where ranks meet: each describes to all others what it has called, and all see whether that is the same.

Of every pair of workers, each makes its calls in one order, and describes them in that order. So a description of
another group that comes first is a mistake in the script, and no wait would end it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from syncline.client.arrays import Bytes
from syncline.client.collectives.hearing import Heard
from syncline.client.collectives.memories import Memories
from syncline.client.collectives.streams import Key, Stream
from syncline.client.collectives.waiting import Gone, Waiting
from syncline.client.peers import Peers, Way
from syncline.client.rosters import ranked
from syncline.core.collecting import Broken, Describe, Share, Through, Unshare
from syncline.core.collectives import described, disagreement, given, hosts_of, is_inline, other_groups, wanted
from syncline.core.members import Member
from syncline.core.message import Message
from syncline.errors import CollectiveError, ConnectionLost, FencedError, JobFailed, SynclineError
from syncline.net.transport import Buffer, buffer_of


class Again(Exception):
    """Members have come, or left between two calls: all describe it anew, with those who are there."""


class _Told(Exception):
    """An error that all others have, or find by themselves."""


class _Crossed(Exception):
    """Another worker is in a call of another group."""

    def __init__(self, way: Way, said: Describe) -> None:
        super().__init__(way.name)
        self.way, self.said = way, said


@dataclasses.dataclass
class Call:
    """What this rank has called, before it is known who takes part."""

    said: Describe  # but for who takes part, and where the data lie
    data: Bytes  # that it gives, and where the result of a reduction comes to be
    is_own: bool = False  # the data are the caller's, and must not be written


class Meeting:
    """One call, with all of its members, by their places in the group."""

    def __init__(self, members: Sequence[Member], place: int, number: int, waiting: Waiting) -> None:
        self.members, self.place, self.waiting = members, place, waiting
        self.names = [member.name for member in members]
        self.group = tuple(member.incarnation for member in members)
        self.key: Key = (self.group, number)
        self.data: Bytes = np.empty(0, np.uint8)
        self.is_own = self.is_staged = False  # the data: the caller's, not to be written; in memory that is kept
        self.ways: dict[int, Way] = {}
        self.streams: dict[int, Stream] = {}
        self.said: list[Describe] = []
        self.payloads: dict[int, Sequence[Buffer]] = {}
        self.hosts: list[list[int]] = []

    @property
    def mine(self) -> Describe:
        return self.said[self.place]

    @property
    def is_root(self) -> bool:
        return self.mine.root == self.group[self.place]

    @property
    def host(self) -> list[int]:
        """The places of those on this host."""
        return next(places for places in self.hosts if self.place in places)

    def memory_of(self, place: int) -> Bytes:
        """What a rank of this host gives, where it lies."""
        if place == self.place:
            return self.data
        said, size = self.said[place], given(self.said[place], place)
        memory = self.streams[place].memories.get(said.memory)
        if memory is None or said.offset + size > len(memory.array):
            self.ways[place].close(f"{self.names[place]} has described memory that it has not shared")
            raise Gone(self.ways[place], "it has described memory that it has not shared")
        return memory.array[said.offset : said.offset + size]


class Meetings:
    """Of one worker, one after the other."""

    def __init__(self, peers: Peers, memories: Memories, name: str) -> None:
        self._peers, self._memories, self._name = peers, memories, name
        self.heard = Heard(peers)
        self.change = peers.change
        self._scratch: Bytes = np.empty(0, np.uint8)

    def scratch(self, num_bytes: int) -> Bytes:
        """Memory for what comes, until the end of this call."""
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        return self._scratch[:num_bytes]

    @contextlib.contextmanager
    def meet(self, call: Call, members: Sequence[Member], waiting: Waiting) -> Iterator[Meeting]:
        """All have called the same; inside, bytes may go. What is raised inside is raised at all ranks."""
        group = tuple(member.incarnation for member in members)
        with self._peers.change:
            number = self.heard.numbers.get(group, 0)
            self.heard.numbers[group] = number + 1
            self.heard.current = (group, number)
        meeting = Meeting(members, group.index(self._peers.incarnation), number, waiting)
        try:
            self._gather(call, meeting)
            yield meeting
        except Again:
            raise
        except _Told as told:
            raise CollectiveError(str(told)) from None
        except _Crossed as crossed:
            raise self._cross(meeting, call.said, crossed) from None
        except Gone as gone:
            what = described(call.said)
            reason = f"{gone.way.name} is gone while {what} was under way: {gone.reason}"
            raise self._break(meeting, reason) from None
        except BaseException as error:
            self._break(meeting, _told(self._name, error))
            raise
        finally:
            self._end(meeting)

    def _end(self, meeting: Meeting) -> None:
        meeting.waiting.end()
        with self._peers.change:
            self.heard.current = None
            self.heard.broken.pop(meeting.key, None)
            for stream in meeting.streams.values():
                stream.landing = None
            self._peers.change.notify_all()

    # -- all describe -------------------------------------------------------------------------------------

    def _gather(self, call: Call, meeting: Meeting) -> None:
        self._open_ways(meeting)
        mine = self._describe(call, meeting)
        for place, way in meeting.ways.items():
            start, size = wanted(mine, meeting.place, place) if is_inline(mine, meeting.place) else (0, 0)
            with contextlib.suppress(ConnectionLost):  # found where it is waited for, with its last words
                way.send(mine, [buffer_of(call.data[start : start + size])] if size else (), size)
        meeting.said = [mine] * len(meeting.members)
        for place, way in meeting.ways.items():
            meeting.said[place], meeting.payloads[place] = self._hear(way, meeting, mine)
        reason = disagreement(meeting.names, meeting.said)
        if reason:
            raise _Told(reason)
        hosts = hosts_of(meeting.said)
        if hosts is None:
            raise _Told("some ranks of a host share memory and some do not; use --transport tcp")
        meeting.hosts = hosts

    def _open_ways(self, meeting: Meeting) -> None:
        waiting = meeting.waiting
        for place, member in enumerate(meeting.members):
            if place != meeting.place:
                way = self.way(member) or waiting.until_any(lambda m=member: self.way(m), [member.name])  # type: ignore[misc]
                meeting.ways[place], meeting.streams[place] = way, self.heard.stream(way)
        waiting.ways = list(meeting.ways.values())

    def way(self, member: Member) -> Way | None:
        """The way to this worker; None: it is on its way."""
        if member.incarnation not in self._peers.live:
            raise CollectiveError(f"{member.name} is gone: it is no member of the job any more")
        try:
            return self._peers.way(member)
        except ConnectionLost as error:
            raise CollectiveError(f"{member.name} cannot be reached: {error}") from None

    def _describe(self, call: Call, meeting: Meeting) -> Describe:
        """My call, with where the data lie: large ones in memory that those on this host know."""
        sharing = sorted([meeting.place, *(place for place, way in meeting.ways.items() if way.shares_memory)])
        group = meeting.group
        said = msgspec.structs.replace(
            call.said, group=group, number=meeting.key[1], host=group[sharing[0]], sharing=len(sharing)
        )
        meeting.data, meeting.is_own = call.data, call.is_own
        if len(sharing) == 1 or is_inline(said, meeting.place):
            return said
        found = None if call.is_own else self._memories.find(call.data)
        if found is None:
            number, meeting.data = self._memories.kept("staging", len(call.data))
            meeting.data[...] = call.data
            meeting.is_own, meeting.is_staged, found = False, True, (number, 0)
        for place in sharing:
            if place != meeting.place:
                self.share(meeting.ways[place], found[0])
        return msgspec.structs.replace(said, memory=found[0], offset=found[1])

    def share(self, way: Way, number: int) -> None:
        """Another worker on this host knows this memory."""
        stream = self.heard.stream(way)
        if number not in stream.shared:
            memory, num_bytes = self._memories.attachment(number)
            with contextlib.suppress(ConnectionLost):
                way.send(Share(number, num_bytes), attachment=memory)
            stream.shared.add(number)

    def tidy(self) -> None:
        """Between two calls: what is gone is forgotten here, and what is dropped is forgotten by the others."""
        self._peers.sweep()
        self.heard.forget()
        dropped, self._memories.dropped = self._memories.dropped, []
        for way, stream in self.heard.known() if dropped else ():
            for number in stream.shared.intersection(dropped):
                stream.shared.discard(number)
                _mention(way, Unshare(number))

    def _hear(self, way: Way, meeting: Meeting, mine: Describe) -> tuple[Describe, Sequence[Buffer]]:
        stream = self.heard.stream(way)
        try:
            return meeting.waiting.until(way, lambda: self._next(way, stream, meeting, mine))
        except Gone:
            if way.has_left and mine.generation:
                raise Again from None
            raise

    def _next(
        self, way: Way, stream: Stream, meeting: Meeting, mine: Describe
    ) -> tuple[Describe, Sequence[Buffer]] | None:
        """What it has said of this call, if it has; under the lock."""
        self.check(meeting)
        while stream.said:
            said, payload = stream.said[0]
            if said.key == meeting.key:
                stream.said.popleft()
                stream.heard = said.key
                stream.through &= {said.key}
                return said, payload
            if self.heard.is_over(said.key) or 0 < said.generation < mine.generation:
                stream.said.popleft()  # said before, or to be said anew
            elif 0 < mine.generation < said.generation:
                raise Again
            else:
                raise _Crossed(way, said)
        if way.has_left and mine.generation:
            raise Again
        return None

    def check(self, meeting: Meeting) -> None:
        """Raises why it has failed at another rank, if it has."""
        broken = self.heard.broken.get(meeting.key)
        if broken is not None:
            if broken.other_group:
                self.heard.skip(broken.other_group, broken.other_number)
            raise _Told(broken.reason)

    # -- all are through ----------------------------------------------------------------------------------

    def leave_memory(self, meeting: Meeting) -> None:
        """Returns when every rank of this host is through with the memory of the others, if it was used."""
        host = meeting.host
        if all(is_inline(meeting.said[place], place) for place in host):
            return
        places = [place for place in host if place != meeting.place]
        for place in places:
            self.send(meeting, place, Through(*meeting.key))
        for place in places:
            stream = meeting.streams[place]
            meeting.waiting.until(
                meeting.ways[place],
                lambda s=stream: self._is_through(meeting, s),  # type: ignore[misc]
            )

    def _is_through(self, meeting: Meeting, stream: Stream) -> bool | None:
        if meeting.key in stream.through:
            return True
        self.check(meeting)
        return None

    def send(self, meeting: Meeting, place: int, message: Message, buffer: Buffer | None = None) -> None:
        """To one rank; all chunks of a collective go through here."""
        way = meeting.ways[place]
        try:
            way.send(message, () if buffer is None else [buffer], 0 if buffer is None else len(buffer))
        except ConnectionLost as error:
            raise Gone(way, way.lost or str(error)) from None

    # -- when it fails ------------------------------------------------------------------------------------

    def _break(self, meeting: Meeting, reason: str) -> CollectiveError:
        for way in meeting.ways.values():
            _mention(way, Broken(*meeting.key, reason))
        return CollectiveError(reason)

    def _cross(self, meeting: Meeting, mine: Describe, crossed: _Crossed) -> CollectiveError:
        """Both calls fail, at all members of both groups."""
        theirs = crossed.said
        with self._peers.change:
            self.heard.skip(*theirs.key)
        names = {member.incarnation: member.name for member in ranked(self._peers.rosters.newest)}
        names.update({member.incarnation: member.name for member in meeting.members})
        mine = msgspec.structs.replace(mine, group=meeting.group)
        reason = other_groups((self._name, mine), (crossed.way.name, theirs), names)
        for key, other in ((meeting.key, theirs.key), (theirs.key, meeting.key)):
            self.tell_broken(Broken(*key, reason, *other), {*meeting.group, *theirs.group})
        return CollectiveError(reason)

    def tell_broken(self, broken: Broken, incarnations: Iterable[int] = ()) -> None:
        """A call fails, at all who are in it; `incarnations`: and at these."""
        for incarnation in {*broken.group, *incarnations}:
            way = self._peers.known(incarnation)
            if way is not None:
                _mention(way, broken)


def _mention(way: Way, message: Message) -> None:
    with contextlib.suppress(ConnectionLost):
        way.send(message)


def _told(name: str, error: BaseException) -> str:
    """To the other ranks, of what has kept this one from it."""
    if isinstance(error, CollectiveError):
        return str(error)
    if isinstance(error, SynclineError) and not isinstance(error, JobFailed | FencedError):
        return f"{name} has given up: {error}"
    return f"{name} has given up: {type(error).__name__}: {error}".removesuffix(": ")
