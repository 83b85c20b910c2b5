"""Where ranks meet: each describes to all others what it has called, and all see whether that is the same.

Of every pair of workers, each makes its calls in one order, and describes them in that order. So a description of
another group that comes first is a mistake in the script, and no wait would end it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from syncline.core.collectives import described, disagreement, is_inline, other_groups, wanted
from syncline.core.members import Member
from syncline.core.wire.collectives import STRANGER, Broken, Describe, Share, Through, Unshare
from syncline.core.wire.message import Message
from syncline.errors import CollectiveError, ConnectionLost, FencedError, JobFailed, SynclineError
from syncline.net.transport import Buffer, buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.collectives.hearing import Heard
from syncline.worker.collectives.meeting import NOTHING, Again, Begun, Call, Make, Meeting, Told
from syncline.worker.collectives.memories import Memories
from syncline.worker.collectives.party import Party
from syncline.worker.collectives.streams import Key, Stream
from syncline.worker.collectives.waiting import Gone, Waiting
from syncline.worker.peers import Peers, Way
from syncline.worker.rosters import ranked

#: For those who may still write into the memory of a worker for which a call has failed.
_RETREAT_SECONDS, _LOOK_SECONDS = 30.0, 0.005


class _Crossed(Exception):
    """Another worker is in a call of another group."""

    def __init__(self, way: Way, said: Describe) -> None:
        super().__init__(way.name)
        self.way, self.said = way, said


class Meetings:
    """Of one worker, one after the other."""

    def __init__(self, peers: Peers, memories: Memories, name: str) -> None:
        self._peers, self._memories, self._name = peers, memories, name
        self.heard = Heard(peers)
        self.change = peers.change
        self._scratch = NOTHING
        self._tidied = 0

    def scratch(self, num_bytes: int) -> Bytes:
        """Memory for what comes, until the end of this call."""
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        return self._scratch[:num_bytes]

    def begin(self, party: Party) -> int:
        """This worker is in a call of this group: its number."""
        heard = self.heard
        with self._peers.lock:
            number = heard.numbers.get(party.group, 0)
            heard.numbers[party.group], heard.current = number + 1, (party.group, number)
        return number

    def prepare(self, party: Party) -> None:
        """What every description of this party says of the attempt."""
        heard = self.heard
        with self._peers.lock:
            party.attempt, party.failures = heard.attempt.number, heard.attempt.failures(party.group)
            party.num_calls = heard.num_calls if STRANGER in party.failures else 0

    def end(self, party: Party, *, has_failed: bool = False) -> None:
        """The script goes on after a call of this party."""
        with self._peers.lock:
            self.heard.attempt.end(party.there)
            if has_failed:
                self.heard.attempt.fail(party.group)

    def finish(self, key: Key) -> None:
        """It is through with it."""
        with self._peers.lock:
            self.heard.current = None
            self.heard.broken.pop(key, None)

    def give_up(self, party: Party, number: int, error: BaseException) -> None:
        """Likewise of a call without data in memory: it fails, for all."""
        self.tell_broken(Broken(party.group, number, _told(self._name, error)))
        for place in party.sharing:
            if place != party.place:
                _mention(party.ways[place], Through(party.group, number))
        self.end(party, has_failed=True)
        self.finish((party.group, number))

    @contextlib.contextmanager
    def meet(self, make: Make, party: Party, waiting: Waiting, begun: Begun | None = None) -> Iterator[Meeting]:
        """All have called the same; inside, bytes may go. What is raised inside is raised at all ranks."""
        number = self.begin(party) if begun is None else begun.number
        try:
            if begun is None and not party.is_open:
                self._open(party, waiting)
            call = make(party, number)
        except BaseException as error:
            self._leave_out(party, number, error)
            raise
        meeting, has_failed = Meeting(party, number, waiting), True
        waiting.begin(party.ways.values(), call.said)
        try:
            self._gather(call, meeting, begun)
            yield meeting
            has_failed = False
        except Again:
            meeting.is_made_again = True
            raise
        except Told as told:
            self._retreat(meeting)
            raise CollectiveError(str(told)) from None
        except _Crossed as crossed:
            raise self._cross(meeting, call.said, crossed) from None
        except Gone as gone:
            reason = f"{gone.way.name} is gone while {described(call.said)} was under way: {gone.reason}"
            self.tell_broken(Broken(*meeting.key, reason))
            self._retreat(meeting)
            raise CollectiveError(reason) from None
        except BaseException as error:
            self.tell_broken(Broken(*meeting.key, _told(self._name, error)))
            self._retreat(meeting)
            raise
        finally:
            self._end(meeting, has_failed=has_failed)

    def _leave_out(self, party: Party, number: int, error: BaseException) -> None:
        """Nothing was said of it yet. Without ways to all it fails for all; what cannot be called is not called."""
        is_open = party.is_open
        with self.change:
            self.heard.current = None
            if is_open:
                self.heard.numbers[party.group] = number
        if not is_open:
            self.end(party, has_failed=True)
            self.tell_broken(Broken(party.group, number, _told(self._name, error)))

    def _end(self, meeting: Meeting, *, has_failed: bool) -> None:
        meeting.waiting.end()
        if meeting.is_made_again:
            self.heard.make_again()
        else:
            self.end(meeting.party, has_failed=has_failed)
        if sys.exc_info()[0] is not None:
            self._scratch = NOTHING  # a chunk may still be on its way into it
        with self.change:
            self.heard.current = None
            self.heard.broken.pop(meeting.key, None)
            for stream in meeting.streams.values():
                stream.landing = None
            self.change.notify_all()

    # -- all describe -------------------------------------------------------------------------------------

    def _gather(self, call: Call, meeting: Meeting, begun: Begun | None) -> None:
        mine = self._locate(call, meeting)
        if begun is None:
            self._describe(mine, call.data, meeting)
        said = meeting.said = [mine] * len(meeting.party)
        for other, way in meeting.ways.items():
            if begun is not None and other in begun.payloads:
                meeting.payloads[other] = [begun.payloads[other]] if len(call.data) else ()
            else:
                said[other], meeting.payloads[other] = self._hear(way, meeting, mine)
        reason = disagreement(meeting.party.names, said)
        if reason:
            raise Told(reason)
        if len(meeting.party.sharing) > 1 and not meeting.is_inline:
            # Who has given up has said so, or will find this description: its memory is not touched any more.
            self._drain(meeting)
            with self.change:
                self.check(meeting)

    def _describe(self, mine: Describe, data: Bytes, meeting: Meeting) -> None:
        place = meeting.place
        inline = is_inline(mine, place)
        for other, way in meeting.ways.items():
            start, size = wanted(mine, place, other) if inline else (0, 0)
            with contextlib.suppress(ConnectionLost):  # found where it is waited for, with its last words
                way.send(mine, [buffer_of(data[start : start + size])] if size else (), size)

    def _drain(self, meeting: Meeting) -> None:
        for place in meeting.party.sharing:
            if place != meeting.place:
                way = meeting.ways[place]
                while way.waiter_reads and not way.lost and way.read(0.0):
                    pass

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
        meeting.is_in_memory = True
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
                stream.said.popleft()  # said before, or to be said again
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
                self.heard.skip(broken.other_group, broken.other_number, meeting.group)
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
        self.check(meeting)  # first: who fails says so, and is through as well
        return True if meeting.key in stream.through else None

    def send(self, meeting: Meeting, place: int, message: Message, buffer: Buffer | None = None) -> None:
        """To one rank; all chunks of a collective go through here."""
        way = meeting.ways[place]
        try:
            way.send(message, () if buffer is None else [buffer], 0 if buffer is None else len(buffer))
        except ConnectionLost as error:
            raise Gone(way, way.lost or str(error)) from None

    def _retreat(self, meeting: Meeting) -> None:
        """It has failed here. Returns when nobody on this host touches this worker's memory for it any more: who has
        described it is through, or is gone."""
        places = [place for place in meeting.party.sharing if place != meeting.place]
        for place in places:
            _mention(meeting.ways[place], Through(*meeting.key))
        if not places or not meeting.is_in_memory:
            return
        until, waits_for = time.monotonic() + _RETREAT_SECONDS, places
        while waits_for and time.monotonic() < until:
            self._drain(meeting)
            with self.change:
                waits_for = [place for place in waits_for if self._may_write(meeting, place)]
                if waits_for:
                    self.change.wait(_LOOK_SECONDS)
        with self.change:
            if any(self._has_it(meeting, place) for place in places):  # who is out may only have been stopped
                self._memories.forget("staging")

    def _may_write(self, meeting: Meeting, place: int) -> bool:
        way = meeting.ways[place]
        return not way.lost and way.incarnation in self._peers.live and self._has_it(meeting, place)

    @staticmethod
    def _has_it(meeting: Meeting, place: int) -> bool:
        """Whether it has described this call, and not said that it is through."""
        stream, key = meeting.streams[place], meeting.key
        is_described = stream.heard == key or any(said.key == key for said, _ in stream.said)
        return is_described and key not in stream.through

    # -- when it fails ------------------------------------------------------------------------------------

    def _cross(self, meeting: Meeting, mine: Describe, crossed: _Crossed) -> CollectiveError:
        """Both calls fail, at all members of both groups."""
        theirs = crossed.said
        with self._peers.change:
            self.heard.skip(*theirs.key, meeting.group)
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
