"""Where ranks meet: each describes its call to all others, and all check that the descriptions agree.

Each worker makes its calls in one order and describes them in that order. So a description of another group that
arrives first is a mistake in the script, and no wait would end it.

`repeat` is the short way for a cached call: the frames are the same, but they are compared as bytes and not decoded.
Any other frame stays unread, and `Rendezvous` goes on from there: a rank is late, made another call, or is gone.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from syncline.core.collectives import described, disagreement, given, hosts_of, is_inline, other_groups, wanted
from syncline.core.members import Member
from syncline.core.wire.collectives import STRANGER, Broken, Describe, Share, Through, Unshare
from syncline.core.wire.message import Message
from syncline.errors import CollectiveError, ConnectionLost, FencedError, JobFailed, SynclineError
from syncline.net.transport import Buffer, buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.collectives.groups import CachedCall, GroupLinks
from syncline.worker.collectives.incoming import PeerGone, PeerMessages, PeerWait
from syncline.worker.collectives.peers import Key, PeerLink, Peers, PeerStream
from syncline.worker.collectives.shared_memory import SharedMemories
from syncline.worker.session import ranked

NOTHING: Bytes = np.empty(0, np.uint8)


class RetryCall(Exception):
    """Members have joined, or left between two calls: all describe the call again, with the present members."""


class AgreedError(Exception):
    """An error that all other ranks have, or find by themselves."""


class LocalCall(NamedTuple):
    """What this rank has called."""

    said: Describe  # but for where the data lie
    data: Bytes  # that it gives, and where the result of a reduction comes to be
    is_own: bool = False  # the data are the caller's, and must not be written


#: Makes the call, given who takes part, and its number.
Make = Callable[[GroupLinks, int], LocalCall]


class StartedCall:
    """A call that this rank has described, with the data of the ranks that have described the same."""

    __slots__ = ("group_links", "number", "payloads")

    def __init__(self, group_links: GroupLinks, number: int) -> None:
        self.group_links, self.number = group_links, number
        self.payloads: dict[int, Buffer] = {}  # by place

    @property
    def is_whole(self) -> bool:
        return len(self.payloads) == len(self.group_links) - 1


class JointCall:
    """One call, with all members that take part: their descriptions, and where the data lie."""

    def __init__(self, group_links: GroupLinks, number: int, waiting: PeerWait) -> None:
        self.group_links, self.waiting = group_links, waiting
        self.place, self.group, self.links, self.streams = (
            group_links.place,
            group_links.group,
            group_links.links,
            group_links.streams,
        )
        self.key: Key = (group_links.group, number)
        self.data = NOTHING
        self.is_own = self.is_staged = False  # the data: the caller's, not to be written; in memory that is kept
        self.is_retried = False  # with other members: this one neither succeeded nor failed
        self.is_in_memory = False  # they lie where others of this host read and write them
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
                raise AgreedError("some ranks of a host share memory and some do not; use --transport tcp")
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
            self.links[place].close(f"{self.group_links.names[place]} has described memory that it has not shared")
            raise PeerGone(self.links[place], "it has described memory that it has not shared")
        return memory.array[said.offset : said.offset + size]


#: For those who may still write into the memory of a worker for which a call has failed.
_RETREAT_SECONDS, _LOOK_SECONDS = 30.0, 0.005


class _CrossedGroups(Exception):
    """Another worker is in a call of another group."""

    def __init__(self, link: PeerLink, said: Describe) -> None:
        super().__init__(link.name)
        self.link, self.said = link, said


class Rendezvous:
    """All rendezvous of one worker, one after the other."""

    def __init__(self, peers: Peers, memories: SharedMemories, name: str) -> None:
        self._peers, self._memories, self._name = peers, memories, name
        self.heard = PeerMessages(peers)
        self.change = peers.change
        self._scratch = NOTHING
        self._tidied = 0

    def scratch(self, num_bytes: int) -> Bytes:
        """Memory for what comes, until the end of this call."""
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        return self._scratch[:num_bytes]

    def begin(self, group_links: GroupLinks) -> int:
        """This worker is in a call of this group: its number."""
        heard = self.heard
        with self._peers.lock:
            number = heard.numbers.get(group_links.group, 0)
            heard.numbers[group_links.group], heard.current = number + 1, (group_links.group, number)
        return number

    def prepare(self, group_links: GroupLinks) -> None:
        """What every description by this group says of the attempt."""
        heard = self.heard
        with self._peers.lock:
            group_links.attempt, group_links.failures = (
                heard.attempt.number,
                heard.attempt.failures(group_links.group),
            )
            group_links.num_calls = heard.num_calls if STRANGER in group_links.failures else 0

    def end(self, group_links: GroupLinks, *, has_failed: bool = False) -> None:
        """The script goes on after a call of this group."""
        with self._peers.lock:
            self.heard.attempt.end(group_links.there)
            if has_failed:
                self.heard.attempt.fail(group_links.group)

    def finish(self, key: Key) -> None:
        """It is through with it."""
        with self._peers.lock:
            self.heard.current = None
            self.heard.broken.pop(key, None)

    def give_up(self, group_links: GroupLinks, number: int, error: BaseException) -> None:
        """Likewise of a call without data in memory: it fails, for all."""
        self.tell_broken(Broken(group_links.group, number, _told(self._name, error)))
        for place in group_links.sharing:
            if place != group_links.place:
                _mention(group_links.links[place], Through(group_links.group, number))
        self.end(group_links, has_failed=True)
        self.finish((group_links.group, number))

    @contextlib.contextmanager
    def meet(
        self, make: Make, group_links: GroupLinks, waiting: PeerWait, started: StartedCall | None = None
    ) -> Iterator[JointCall]:
        """All have called the same; inside, bytes may go. What is raised inside is raised at all ranks."""
        number = self.begin(group_links) if started is None else started.number
        try:
            if started is None and not group_links.is_open:
                self._open(group_links, waiting)
            call = make(group_links, number)
        except BaseException as error:
            self._leave_out(group_links, number, error)
            raise
        joint, has_failed = JointCall(group_links, number, waiting), True
        waiting.begin(group_links.links.values(), call.said)
        try:
            self._gather(call, joint, started)
            yield joint
            has_failed = False
        except RetryCall:
            joint.is_retried = True
            raise
        except AgreedError as told:
            self._retreat(joint)
            raise CollectiveError(str(told)) from None
        except _CrossedGroups as crossed:
            raise self._cross(joint, call.said, crossed) from None
        except PeerGone as gone:
            reason = f"{gone.link.name} is gone while {described(call.said)} was under way: {gone.reason}"
            self.tell_broken(Broken(*joint.key, reason))
            self._retreat(joint)
            raise CollectiveError(reason) from None
        except BaseException as error:
            self.tell_broken(Broken(*joint.key, _told(self._name, error)))
            self._retreat(joint)
            raise
        finally:
            self._end(joint, has_failed=has_failed)

    def _leave_out(self, group_links: GroupLinks, number: int, error: BaseException) -> None:
        """Nothing was said of it yet. Without links to all members it fails for all of them; a call that cannot be
        made is not made."""
        is_open = group_links.is_open
        with self.change:
            self.heard.current = None
            if is_open:
                self.heard.numbers[group_links.group] = number
        if not is_open:
            self.end(group_links, has_failed=True)
            self.tell_broken(Broken(group_links.group, number, _told(self._name, error)))

    def _end(self, joint: JointCall, *, has_failed: bool) -> None:
        joint.waiting.end()
        if joint.is_retried:
            self.heard.retry()
        else:
            self.end(joint.group_links, has_failed=has_failed)
        if sys.exc_info()[0] is not None:
            self._scratch = NOTHING  # a chunk may still be on its way into it
        with self.change:
            self.heard.current = None
            self.heard.broken.pop(joint.key, None)
            for stream in joint.streams.values():
                stream.receiver = None
            self.change.notify_all()

    # -- all describe -------------------------------------------------------------------------------------

    def _gather(self, call: LocalCall, joint: JointCall, started: StartedCall | None) -> None:
        mine = self._locate(call, joint)
        if started is None:
            self._describe(mine, call.data, joint)
        said = joint.said = [mine] * len(joint.group_links)
        for other, link in joint.links.items():
            if started is not None and other in started.payloads:
                joint.payloads[other] = [started.payloads[other]] if len(call.data) else ()
            else:
                said[other], joint.payloads[other] = self._hear(link, joint, mine)
        reason = disagreement(joint.group_links.names, said)
        if reason:
            raise AgreedError(reason)
        if len(joint.group_links.sharing) > 1 and not joint.is_inline:
            # A rank that has given up has said so, or will find this description: its memory is not touched any more.
            self._drain(joint)
            with self.change:
                self.check(joint)

    def _describe(self, mine: Describe, data: Bytes, joint: JointCall) -> None:
        place = joint.place
        inline = is_inline(mine, place)
        for other, link in joint.links.items():
            start, size = wanted(mine, place, other) if inline else (0, 0)
            with contextlib.suppress(ConnectionLost):  # found where it is waited for, with its last words
                link.send(mine, [buffer_of(data[start : start + size])] if size else (), size)

    def _drain(self, joint: JointCall) -> None:
        for place in joint.group_links.sharing:
            if place != joint.place:
                link = joint.links[place]
                while link.waiter_reads and not link.lost and link.read(0.0):
                    pass

    def _open(self, group_links: GroupLinks, waiting: PeerWait) -> None:
        links: dict[int, PeerLink] = {}
        for place, member in enumerate(group_links.members):
            if place != group_links.place:
                links[place] = self.wait_for_link(member, waiting)
        group_links.open(links, {place: self.heard.stream(link) for place, link in links.items()})

    def wait_for_link(self, member: Member, waiting: PeerWait) -> PeerLink:
        """The link to this worker, once there is one."""
        return self._link(member) or waiting.until_any(lambda: self._link(member), [member.name])

    def _link(self, member: Member) -> PeerLink | None:
        if member.incarnation not in self._peers.live:
            raise CollectiveError(f"{member.name} is gone: it is no longer a member of the job")
        try:
            return self._peers.link(member)
        except ConnectionLost as error:
            raise CollectiveError(f"{member.name} cannot be reached: {error}") from None

    def _locate(self, call: LocalCall, joint: JointCall) -> Describe:
        """My call, with where the data lie: large ones in memory that those on this host know."""
        said, group_links = call.said, joint.group_links
        joint.data, joint.is_own = call.data, call.is_own
        if len(group_links.sharing) == 1 or is_inline(said, joint.place):
            return said
        found = None if call.is_own else self._memories.find(call.data)
        if found is None:
            number, joint.data = self._memories.kept("staging", len(call.data))
            joint.data[...] = call.data
            joint.is_own, joint.is_staged, found = False, True, (number, 0)
        for place in group_links.sharing:
            if place != joint.place:
                self.share(joint.links[place], found[0])
        joint.is_in_memory = True
        return msgspec.structs.replace(said, memory=found[0], offset=found[1])

    def share(self, link: PeerLink, number: int) -> None:
        """Another worker on this host knows this memory."""
        stream = self.heard.stream(link)
        if number not in stream.shared:
            memory, num_bytes = self._memories.attachment(number)
            with contextlib.suppress(ConnectionLost):
                link.send(Share(number, num_bytes), attachment=memory)
            stream.shared.add(number)

    def tidy(self) -> None:
        """Between two calls: what is gone is forgotten here, and what is dropped is forgotten by the others."""
        if self._tidied != self._peers.num_changes:
            self._tidied = self._peers.num_changes
            self._peers.forget_gone()
            self.heard.forget()
        if not self._memories.dropped:
            return
        dropped, self._memories.dropped = self._memories.dropped, []
        for link, stream in self.heard.known():
            for number in stream.shared.intersection(dropped):
                stream.shared.discard(number)
                _mention(link, Unshare(number))

    def _hear(self, link: PeerLink, joint: JointCall, mine: Describe) -> tuple[Describe, Sequence[Buffer]]:
        stream = self.heard.stream(link)
        try:
            return joint.waiting.until(link, lambda: self._next(link, stream, joint, mine))
        except PeerGone:
            if link.has_left and mine.generation:
                raise RetryCall from None
            raise

    def _next(
        self, link: PeerLink, stream: PeerStream, joint: JointCall, mine: Describe
    ) -> tuple[Describe, Sequence[Buffer]] | None:
        """What it has said of this call, if it has; under the lock."""
        if self.heard.broken:
            self.check(joint)
        while stream.said:
            said, payload = stream.said[0]
            if said.key == joint.key:
                stream.said.popleft()
                stream.heard = said.key
                if stream.through:
                    stream.through &= {said.key}
                return said, payload
            if self.heard.is_over(said.key) or 0 < said.generation < mine.generation:
                stream.said.popleft()  # said before, or to be said again
            elif 0 < mine.generation < said.generation:
                raise RetryCall
            else:
                raise _CrossedGroups(link, said)
        if link.has_left and mine.generation:
            raise RetryCall
        return None

    def check(self, joint: JointCall) -> None:
        """Raises why it has failed at another rank, if it has."""
        broken = self.heard.broken.get(joint.key)
        if broken is not None:
            if broken.other_group:
                self.heard.skip(broken.other_group, broken.other_number, joint.group)
            raise AgreedError(broken.reason)

    # -- all are through ----------------------------------------------------------------------------------

    def leave_memory(self, joint: JointCall) -> None:
        """Returns when every rank of this host is through with the memory of the others, if it was used."""
        if joint.is_inline:
            return
        host = joint.host
        if all(is_inline(joint.said[place], place) for place in host):
            return
        places = [place for place in host if place != joint.place]
        for place in places:
            self.send(joint, place, Through(*joint.key))
        for place in places:
            stream = joint.streams[place]
            joint.waiting.until(
                joint.links[place],
                lambda s=stream: self._is_through(joint, s),  # type: ignore[misc]
            )

    def _is_through(self, joint: JointCall, stream: PeerStream) -> bool | None:
        self.check(joint)  # first: who fails says so, and is through as well
        return True if joint.key in stream.through else None

    def send(self, joint: JointCall, place: int, message: Message, buffer: Buffer | None = None) -> None:
        """To one rank; all chunks of a collective go through here."""
        link = joint.links[place]
        try:
            link.send(message, () if buffer is None else [buffer], 0 if buffer is None else len(buffer))
        except ConnectionLost as error:
            raise PeerGone(link, link.lost or str(error)) from None

    def _retreat(self, joint: JointCall) -> None:
        """It has failed here. Returns when no rank of this host touches this worker's memory for it any more: each
        rank that has described the call is through, or is gone."""
        places = [place for place in joint.group_links.sharing if place != joint.place]
        for place in places:
            _mention(joint.links[place], Through(*joint.key))
        if not places or not joint.is_in_memory:
            return
        until, waits_for = time.monotonic() + _RETREAT_SECONDS, places
        while waits_for and time.monotonic() < until:
            self._drain(joint)
            with self.change:
                waits_for = [place for place in waits_for if self._may_write(joint, place)]
                if waits_for:
                    self.change.wait(_LOOK_SECONDS)
        with self.change:
            if any(self._has_it(joint, place) for place in places):  # who is out may only have been stopped
                self._memories.forget("staging")

    def _may_write(self, joint: JointCall, place: int) -> bool:
        link = joint.links[place]
        return not link.lost and link.incarnation in self._peers.live and self._has_it(joint, place)

    @staticmethod
    def _has_it(joint: JointCall, place: int) -> bool:
        """Whether it has described this call, and not said that it is through."""
        stream, key = joint.streams[place], joint.key
        is_described = stream.heard == key or any(said.key == key for said, _ in stream.said)
        return is_described and key not in stream.through

    # -- when it fails ------------------------------------------------------------------------------------

    def _cross(self, joint: JointCall, mine: Describe, crossed: _CrossedGroups) -> CollectiveError:
        """Both calls fail, at all members of both groups."""
        theirs = crossed.said
        with self._peers.change:
            self.heard.skip(*theirs.key, joint.group)
        names = {member.incarnation: member.name for member in ranked(self._peers.rosters.newest)}
        names.update({member.incarnation: member.name for member in joint.group_links.members})
        reason = other_groups((self._name, mine), (crossed.link.name, theirs), names)
        for key, other in ((joint.key, theirs.key), (theirs.key, joint.key)):
            self.tell_broken(Broken(*key, reason, *other), {*joint.group, *theirs.group})
        return CollectiveError(reason)

    def tell_broken(self, broken: Broken, incarnations: Iterable[int] = ()) -> None:
        """A call fails, at all who are in it; `incarnations`: and at these."""
        for incarnation in {*broken.group, *incarnations}:
            link = self._peers.known(incarnation)
            if link is not None:
                _mention(link, broken)


def _mention(link: PeerLink, message: Message) -> None:
    with contextlib.suppress(ConnectionLost):
        link.send(message)


def _told(name: str, error: BaseException) -> str:
    """To the other ranks, of what has kept this one from it."""
    if isinstance(error, CollectiveError):
        return str(error)
    if isinstance(error, SynclineError) and not isinstance(error, JobFailed | FencedError):
        return f"{name} has given up: {error}"
    return f"{name} has given up: {type(error).__name__}: {error}".removesuffix(": ")


#: Others are waited for here for a moment, before it is looked what else there may be.
MOMENT_SECONDS = 0.005


def repeat(
    rendezvous: Rendezvous, group_links: GroupLinks, cached: CachedCall, numbers: np.ndarray[Any, Any]
) -> StartedCall | None:
    """Begins the call, and hears who says the same; None: it is not begun."""
    local_peers, heard = group_links.local_peers, rendezvous.heard
    if not group_links.is_open or (
        heard.broken and (group_links.group, heard.numbers.get(group_links.group, 0)) in heard.broken
    ):
        return None
    number = rendezvous.begin(group_links)
    started, key, size = StartedCall(group_links, number), (group_links.group, number), numbers.nbytes
    try:
        head = local_peers[0][1].head(Describe, cached.body(number), size)
        packed = head + numbers.tobytes()
        for _, endpoint, _ in local_peers:
            try:
                endpoint.post(packed)
            except ConnectionLost:  # found where it is waited for, with its last words
                continue
        for place, endpoint, stream in local_peers:
            payload = endpoint.take_like(head, size, MOMENT_SECONDS) if not stream.said else None
            if payload is None:
                return started
            started.payloads[place] = payload
            stream.last = stream.heard = key
            if stream.through:
                stream.through &= {key}
    except BaseException as error:
        rendezvous.give_up(group_links, number, error)
        raise
    rendezvous.finish(key)
    return started


def gathered(started: StartedCall, flat: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """What all ranks have given, in their order; `flat`: this one."""
    found, dtype = [flat] * len(started.group_links), flat.dtype
    for place, payload in started.payloads.items():
        found[place] = np.frombuffer(payload, dtype)
    return found
