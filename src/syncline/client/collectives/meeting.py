"""Where ranks meet: each describes to all others what it has called, and all see whether that is the same.

Of every pair of workers, each makes its calls in one order, and describes them in that order. So a description of
another group that comes first is a mistake in the script, and no wait would end it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from syncline.client.arrays import Bytes
from syncline.client.collectives.hearing import Heard
from syncline.client.collectives.memories import Memories
from syncline.client.collectives.party import Party
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

_NOTHING: Bytes = np.empty(0, np.uint8)


class Again(Exception):
    """Members have come, or left between two calls: all describe it anew, with those who are there."""


class Told(Exception):
    """An error that all others have, or find by themselves."""


class _Crossed(Exception):
    """Another worker is in a call of another group."""

    def __init__(self, way: Way, said: Describe) -> None:
        super().__init__(way.name)
        self.way, self.said = way, said


class Call(NamedTuple):
    """What this rank has called."""

    said: Describe  # but for where the data lie
    data: Bytes  # that it gives, and where the result of a reduction comes to be
    is_own: bool = False  # the data are the caller's, and must not be written


#: Makes the call, given who takes part, and its number.
Make = Callable[[Party, int], Call]


class Meeting:
    """One call, with all who take part."""

    def __init__(self, party: Party, number: int, waiting: Waiting) -> None:
        self.party, self.waiting = party, waiting
        self.place, self.group, self.ways, self.streams = party.place, party.group, party.ways, party.streams
        self.key: Key = (party.group, number)
        self.data = _NOTHING
        self.is_own = self.is_staged = False  # the data: the caller's, not to be written; in memory that is kept
        self.said: list[Describe] = []
        self.payloads: dict[int, Sequence[Buffer]] = {}
        self._hosts: list[list[int]] | None = None
        self._is_inline: bool | None = None

    @property
    def hosts(self) -> list[list[int]]:
        """The places of all, host by host."""
        if self._hosts is None:
            self._hosts = hosts_of(self.said)
            if self._hosts is None:
                raise Told("some ranks of a host share memory and some do not; use --transport tcp")
        return self._hosts

    @property
    def mine(self) -> Describe:
        return self.said[self.place]

    @property
    def is_inline(self) -> bool:
        """Whether all data came with the descriptions."""
        if self._is_inline is None:
            self._is_inline = all(is_inline(said, place) for place, said in enumerate(self.said))
        return self._is_inline

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
            self.ways[place].close(f"{self.party.names[place]} has described memory that it has not shared")
            raise Gone(self.ways[place], "it has described memory that it has not shared")
        return memory.array[said.offset : said.offset + size]


class Meetings:
    """Of one worker, one after the other."""

    def __init__(self, peers: Peers, memories: Memories, name: str) -> None:
        self._peers, self._memories, self._name = peers, memories, name
        self.heard = Heard(peers)
        self.change = peers.change
        self._scratch = _NOTHING
        self._tidied = 0

    def scratch(self, num_bytes: int) -> Bytes:
        """Memory for what comes, until the end of this call."""
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        return self._scratch[:num_bytes]

    @contextlib.contextmanager
    def meet(self, make: Make, party: Party, waiting: Waiting) -> Iterator[Meeting]:
        """All have called the same; inside, bytes may go. What is raised inside is raised at all ranks."""
        heard = self.heard
        with self.change:
            number = heard.numbers.get(party.group, 0)
            heard.numbers[party.group], heard.current = number + 1, (party.group, number)
        try:
            if not party.is_open:
                self._open(party, waiting)
            call = make(party, number)
        except BaseException as error:
            self._leave_out(party, number, error)
            raise
        meeting = Meeting(party, number, waiting)
        waiting.begin(party.ways.values(), call.said)
        try:
            self._gather(call, meeting)
            yield meeting
        except Again:
            raise
        except Told as told:
            raise CollectiveError(str(told)) from None
        except _Crossed as crossed:
            raise self._cross(meeting, call.said, crossed) from None
        except Gone as gone:
            reason = f"{gone.way.name} is gone while {described(call.said)} was under way: {gone.reason}"
            self.tell_broken(Broken(*meeting.key, reason))
            raise CollectiveError(reason) from None
        except BaseException as error:
            self.tell_broken(Broken(*meeting.key, _told(self._name, error)))
            raise
        finally:
            self._end(meeting)

    def _leave_out(self, party: Party, number: int, error: BaseException) -> None:
        """Nothing was said of it yet. Without ways to all it fails for all; what cannot be called is not called."""
        is_open = party.is_open
        with self.change:
            self.heard.current = None
            if is_open:
                self.heard.numbers[party.group] = number
        if not is_open:
            self.tell_broken(Broken(party.group, number, _told(self._name, error)))

    def _end(self, meeting: Meeting) -> None:
        meeting.waiting.end()
        with self.change:
            self.heard.current = None
            self.heard.broken.pop(meeting.key, None)
            for stream in meeting.streams.values():
                stream.landing = None
            self.change.notify_all()

    # -- all describe -------------------------------------------------------------------------------------

    def _gather(self, call: Call, meeting: Meeting) -> None:
        mine, place = self._locate(call, meeting), meeting.place
        inline = is_inline(mine, place)
        for other, way in meeting.ways.items():
            start, size = wanted(mine, place, other) if inline else (0, 0)
            with contextlib.suppress(ConnectionLost):  # found where it is waited for, with its last words
                way.send(mine, [buffer_of(call.data[start : start + size])] if size else (), size)
        said = meeting.said = [mine] * len(meeting.party)
        for other, way in meeting.ways.items():
            said[other], meeting.payloads[other] = self._hear(way, meeting, mine)
        reason = disagreement(meeting.party.names, said)
        if reason:
            raise Told(reason)

    def _open(self, party: Party, waiting: Waiting) -> None:
        ways: dict[int, Way] = {}
        for place, member in enumerate(party.members):
            if place != party.place:
                ways[place] = self.wait_for_way(member, waiting)
        party.open(ways, {place: self.heard.stream(way) for place, way in ways.items()})

    def wait_for_way(self, member: Member, waiting: Waiting) -> Way:
        """The way to this worker, once there is one."""
        return self._way(member) or waiting.until_any(lambda: self._way(member), [member.name])

    def _way(self, member: Member) -> Way | None:
        if member.incarnation not in self._peers.live:
            raise CollectiveError(f"{member.name} is gone: it is no member of the job any more")
        try:
            return self._peers.way(member)
        except ConnectionLost as error:
            raise CollectiveError(f"{member.name} cannot be reached: {error}") from None

    def _locate(self, call: Call, meeting: Meeting) -> Describe:
        """My call, with where the data lie: large ones in memory that those on this host know."""
        said, party = call.said, meeting.party
        meeting.data, meeting.is_own = call.data, call.is_own
        if len(party.sharing) == 1 or is_inline(said, meeting.place):
            return said
        found = None if call.is_own else self._memories.find(call.data)
        if found is None:
            number, meeting.data = self._memories.kept("staging", len(call.data))
            meeting.data[...] = call.data
            meeting.is_own, meeting.is_staged, found = False, True, (number, 0)
        for place in party.sharing:
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
        if self._tidied != self._peers.num_changes:
            self._tidied = self._peers.num_changes
            self._peers.sweep()
            self.heard.forget()
        if not self._memories.dropped:
            return
        dropped, self._memories.dropped = self._memories.dropped, []
        for way, stream in self.heard.known():
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
        if self.heard.broken:
            self.check(meeting)
        while stream.said:
            said, payload = stream.said[0]
            if said.key == meeting.key:
                stream.said.popleft()
                stream.heard = said.key
                if stream.through:
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
            raise Told(broken.reason)

    # -- all are through ----------------------------------------------------------------------------------

    def leave_memory(self, meeting: Meeting) -> None:
        """Returns when every rank of this host is through with the memory of the others, if it was used."""
        if meeting.is_inline:
            return
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

    def _cross(self, meeting: Meeting, mine: Describe, crossed: _Crossed) -> CollectiveError:
        """Both calls fail, at all members of both groups."""
        theirs = crossed.said
        with self._peers.change:
            self.heard.skip(*theirs.key)
        names = {member.incarnation: member.name for member in ranked(self._peers.rosters.newest)}
        names.update({member.incarnation: member.name for member in meeting.party.members})
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
