"""What other workers say of collectives: kept until the call that it belongs to; and how a call waits for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from syncline.config import JobConfig
from syncline.core.collectives import check_heard, described, is_inline, wanted
from syncline.core.units import listed
from syncline.core.wire.collectives import Broken, Chunk, Describe, Goodbye, Share, Through, Unshare
from syncline.core.wire.message import Message
from syncline.errors import FrameError, WaitTimeout
from syncline.net import shm
from syncline.net.rpc import Request
from syncline.net.transport import Buffer
from syncline.worker.checkpoint.boundary import Boundary
from syncline.worker.collectives.groups import Attempt
from syncline.worker.collectives.peers import MOST_MEMORIES, Key, PeerLink, Peers, PeerStream
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.session import CoordinatorHandlers
from syncline.worker.waits import ValidationCalled

#: The most that comes in one chunk.
CHUNK_BYTES = 512 << 10
#: Failures of calls that this worker has not made yet, and may never make.
_MOST_BROKEN = 256


class PeerMessages:
    """Handles what other workers say on all links. Everything in it is changed under their lock."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._change = peers, peers.change
        self._streams: dict[PeerLink, PeerStream] = {}
        self.numbers: dict[tuple[int, ...], int] = {}  # of each group: its next collective
        self.attempt = Attempt(peers.incarnation)
        self._num_uncounted = 0  # calls of an earlier attempt, or that were made again
        self.broken: dict[Key, Broken] = {}
        self.current: Key | None = None  # the call that this worker is in
        peers.handlers.update(dict.fromkeys((Describe, Chunk, Through, Broken, Share, Unshare, Goodbye), self))

    def stream(self, link: PeerLink) -> PeerStream:
        found = self._streams.get(link)
        if found is None:
            with self._change:
                found = self._streams.setdefault(link, PeerStream())
        return found

    def known(self) -> list[tuple[PeerLink, PeerStream]]:
        return list(self._streams.items())

    def forget(self) -> None:
        """What was said by those who are gone."""
        with self._change:
            gone = [link for link in self._streams if link.lost and link.incarnation not in self._peers.live]
            found = [self._streams.pop(link) for link in gone]
        for stream in found:
            for memory in stream.memories.values():
                memory.close()

    def is_over(self, key: Key) -> bool:
        """Whether this worker is through with this call, or will never make it."""
        return key != self.current and key[1] < self.numbers.get(key[0], 0)

    def skip(self, group: tuple[int, ...], number: int, failed: tuple[int, ...] = ()) -> None:
        """This worker has called something else in place of this: it will not be called any more. `failed`: the group
        of what it called."""
        before = self.numbers.get(group, 0)
        self.numbers[group] = max(before, number + 1)
        self.broken.pop((group, number), None)
        if group != failed:  # else it counts as failed already
            self.attempt.fail(group, self.numbers[group] - before)

    @property
    def num_calls(self) -> int:
        """Calls that this worker has made in this attempt."""
        return sum(self.numbers.values()) - self._num_uncounted

    def retry(self) -> None:
        """The last call did not take place: the same one is made with other members."""
        self._num_uncounted += 1

    def restart(self, number: int, group: tuple[int, ...]) -> None:
        """All members of this group begin again together, in the attempt of this number."""
        with self._change:
            self._num_uncounted = sum(self.numbers.values())
            self.attempt.restart(number, group)

    # -- what links call ----------------------------------------------------------------------------------

    def buffers_for(self, link: PeerLink, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if isinstance(message, Describe):
            if payload_bytes != self._inline_bytes(link, self.stream(link), message):
                raise FrameError(f"{payload_bytes} bytes with a {message.verb} of other sizes")
            return [memoryview(bytearray(payload_bytes))]
        if isinstance(message, Chunk):
            return [self._place(link, message, payload_bytes)]
        raise FrameError(f"{type(message).__name__} has no payload")

    def _inline_bytes(self, link: PeerLink, stream: PeerStream, said: Describe) -> int:
        """How many bytes come with it for this worker; most calls are like the one before."""
        kind = (said.group, said.verb, said.dtype, said.shape, said.parts, said.root, said.failures)
        if stream.checked[0] == kind and said.number >= 0 <= said.offset:
            return stream.checked[1]
        check_heard(said, link.incarnation, self._peers.incarnation)
        source, reader = said.group.index(link.incarnation), said.group.index(self._peers.incarnation)
        num_bytes = wanted(said, source, reader)[1] if is_inline(said, source) else 0
        stream.checked = (kind, num_bytes)
        return num_bytes

    def _place(self, link: PeerLink, chunk: Chunk, num_bytes: int) -> Buffer:
        """Waits until it is known: all must have described it, and some may come sooner than others."""
        if not 0 < num_bytes <= CHUNK_BYTES:
            raise FrameError(f"a chunk of {num_bytes} bytes; at most {CHUNK_BYTES}")
        stream = self.stream(link)
        with self._change:
            key = stream.last
            if key is None:
                raise FrameError("a chunk of nothing that was described")
            while not self.is_over(key) and not link.lost:
                if stream.receiver is not None and stream.heard == key:
                    return stream.receiver.place(chunk.offset, num_bytes)
                self._change.wait(1.0)
        return memoryview(bytearray(num_bytes))  # of a call that this worker has given up

    def hear(self, link: PeerLink, request: Request) -> None:
        message, stream = request.message, self.stream(link)
        if isinstance(message, Describe):
            if not request.payload and self._inline_bytes(link, stream, message):
                raise FrameError(f"a {message.verb} without its bytes")
            with self._change:
                stream.last = message.key
                stream.said.append((message, request.payload))
                self._change.notify_all()
        elif isinstance(message, Share):
            self._map(stream, message, request)
        elif isinstance(message, Unshare):
            memory = stream.memories.pop(message.memory, None)
            if memory is not None:
                memory.close()
        else:
            with self._change:
                self._note(link, stream, message)
                self._change.notify_all()

    def _note(self, link: PeerLink, stream: PeerStream, message: Message) -> None:
        if isinstance(message, Chunk):
            if stream.receiver is not None and stream.heard == stream.last:
                stream.receiver.came()
        elif isinstance(message, Through):
            stream.through.add((message.group, message.number))
        elif isinstance(message, Broken):
            key = (message.group, message.number)
            if not self.is_over(key) and len(self.broken) < _MOST_BROKEN:
                self.broken.setdefault(key, message)
        elif isinstance(message, Goodbye):
            link.has_left = True

    def _map(self, stream: PeerStream, message: Share, request: Request) -> None:
        memory = request.attachment
        if memory is None or message.memory in stream.memories or len(stream.memories) >= MOST_MEMORIES:
            raise FrameError("memory that did not come, or that is known, or too many of them")
        if isinstance(memory, shm.SharedMemory):
            read_only, memory = memory, shm.writable(memory)
            read_only.close()
        stream.memories[message.memory] = memory


T = TypeVar("T")
#: How often a wait looks at everything that may end it.
LOOK_SECONDS = 0.05
#: What a worker that is gone has sent may still be on its way.
_LAST_WORDS_SECONDS = 0.5


class PeerGone(Exception):
    """A worker that is waited for has left, or died."""

    def __init__(self, link: PeerLink, reason: str) -> None:
        super().__init__(reason)
        self.link, self.reason = link, reason


class CallingJob(Protocol):
    """What collectives need of a job."""

    name: str
    config: JobConfig
    exchange: ServersExchange
    boundary: Boundary

    def leave_if_asked(self) -> None: ...
    def look_for_validation(self) -> None: ...


class PeerWait:
    """The waits of one call, in the thread that makes it: the script's own, or that of what is not waited for."""

    def __init__(
        self, job: CallingJob, handlers: CoordinatorHandlers, peers: Peers, what: str, *, is_script: bool
    ) -> None:
        self._job, self._handlers, self._peers = job, handlers, peers
        self._what, self._is_script = what, is_script
        self._said: Describe | None = None
        self._links: Iterable[PeerLink] = ()
        self._told: contextlib.ExitStack | None = None
        self._for: list[str] = []
        self._gone_since: dict[PeerLink, float] = {}

    def begin(self, links: Iterable[PeerLink], said: Describe | None = None) -> None:
        """These take part, in this."""
        self._links, self._said = links, said

    @property
    def what(self) -> str:
        return described(self._said) if self._said is not None else self._what

    def until(self, link: PeerLink, ready: Callable[[], T | None]) -> T:
        """What `ready` returns, once it is not None; looked at under the lock, when something was heard."""
        change, began, looked = self._peers.change, 0.0, 0.0
        while True:
            with change:
                found = ready()
                if found is not None:
                    return found
                if link.lost:
                    raise PeerGone(link, link.lost)
                if not link.waiter_reads:
                    change.wait(LOOK_SECONDS)
            is_quiet = link.waiter_reads and not link.read(LOOK_SECONDS)
            now = time.monotonic()
            began, looked = began or now, looked or now - LOOK_SECONDS / 2
            if is_quiet or now - looked >= LOOK_SECONDS:
                looked = now
                self._look_for(link, now)
                self.look([link.name], now - began > self._job.config.wait_seconds)

    def until_any(self, ready: Callable[[], T | None], names: list[str]) -> T:
        """The same for something that no link brings, such as a new link."""
        change, deadline = self._peers.change, time.monotonic() + self._job.config.wait_seconds
        while True:
            found = ready()
            if found is not None:
                return found
            with change:
                change.wait(LOOK_SECONDS)
            self.look(names, time.monotonic() > deadline)

    def _look_for(self, link: PeerLink, now: float) -> None:
        """A worker that the roster has no more: its last words count, if they are here soon."""
        if link.incarnation in self._peers.live:
            return
        if now - self._gone_since.setdefault(link, now) > (0.0 if link.waiter_reads else _LAST_WORDS_SECONDS):
            raise PeerGone(link, "it is no longer a member of the job")

    def look(self, names: list[str], is_late: bool) -> None:
        """Now and then: how it has ended for this worker, what others say, a validation that waits for this one."""
        self._handlers.check()
        self._for = names
        if is_late:
            seconds = self._job.config.wait_seconds
            raise WaitTimeout(f"{self._job.name}: {self.what} has waited {seconds:g} s for {listed(names)}")
        for link in self._links:
            while link.waiter_reads and not link.lost and link.read(0.0):
                pass
        if self._is_script:
            self._tell()

    def _tell(self) -> None:
        try:
            self._job.look_for_validation()
        except ValidationCalled as called:
            self.end()
            called.answer()
        if self._told is None:
            self._told = contextlib.ExitStack()
            self._told.enter_context(self._job.exchange.waits.of(self.what, why=lambda: f"for {listed(self._for)}"))
            self._told.enter_context(self._job.boundary.standing())

    def end(self) -> None:
        """The call is over, or does something else."""
        if self._told is not None:
            told, self._told = self._told, None
            told.close()
