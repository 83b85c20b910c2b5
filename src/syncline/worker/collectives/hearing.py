"""What other workers say of collectives, as it comes in: kept until the call that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.core.collectives import check_heard, is_inline, wanted
from syncline.core.wire.collectives import Broken, Chunk, Describe, Goodbye, Share, Through, Unshare
from syncline.core.wire.message import Message
from syncline.errors import FrameError
from syncline.net import shm
from syncline.net.rpc import Request
from syncline.net.transport import Buffer
from syncline.worker.collectives.attempts import Attempt
from syncline.worker.collectives.streams import MOST_MEMORIES, Key, Stream
from syncline.worker.peers import Peers, Way

#: The most that comes in one chunk.
CHUNK_BYTES = 512 << 10
#: Failures of calls that this worker has not made yet, and may never make.
_MOST_BROKEN = 256


class Heard:
    """An ear for all ways. Everything in it is changed under their lock."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._change = peers, peers.change
        self._streams: dict[Way, Stream] = {}
        self.numbers: dict[tuple[int, ...], int] = {}  # of each group: its next collective
        self.attempt = Attempt(peers.incarnation)
        self._num_uncounted = 0  # calls of an earlier attempt, or that were made again
        self.broken: dict[Key, Broken] = {}
        self.current: Key | None = None  # the call that this worker is in
        peers.ears.update(dict.fromkeys((Describe, Chunk, Through, Broken, Share, Unshare, Goodbye), self))

    def stream(self, way: Way) -> Stream:
        found = self._streams.get(way)
        if found is None:
            with self._change:
                found = self._streams.setdefault(way, Stream())
        return found

    def known(self) -> list[tuple[Way, Stream]]:
        return list(self._streams.items())

    def forget(self) -> None:
        """What was said by those who are gone."""
        with self._change:
            gone = [way for way in self._streams if way.lost and way.incarnation not in self._peers.live]
            found = [self._streams.pop(way) for way in gone]
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

    def make_again(self) -> None:
        """The last call did not take place: the same one is made with other members."""
        self._num_uncounted += 1

    def restart(self, number: int, group: tuple[int, ...]) -> None:
        """All members of this group begin again together, in the attempt of this number."""
        with self._change:
            self._num_uncounted = sum(self.numbers.values())
            self.attempt.restart(number, group)

    # -- what ways call -----------------------------------------------------------------------------------

    def landing(self, way: Way, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if isinstance(message, Describe):
            if payload_bytes != self._inline_bytes(way, self.stream(way), message):
                raise FrameError(f"{payload_bytes} bytes with a {message.verb} of other sizes")
            return [memoryview(bytearray(payload_bytes))]
        if isinstance(message, Chunk):
            return [self._place(way, message, payload_bytes)]
        raise FrameError(f"{type(message).__name__} has no payload")

    def _inline_bytes(self, way: Way, stream: Stream, said: Describe) -> int:
        """How many bytes come with it for this worker; most calls are like the one before."""
        kind = (said.group, said.verb, said.dtype, said.shape, said.parts, said.root, said.failures)
        if stream.checked[0] == kind and said.number >= 0 <= said.offset:
            return stream.checked[1]
        check_heard(said, way.incarnation, self._peers.incarnation)
        source, reader = said.group.index(way.incarnation), said.group.index(self._peers.incarnation)
        num_bytes = wanted(said, source, reader)[1] if is_inline(said, source) else 0
        stream.checked = (kind, num_bytes)
        return num_bytes

    def _place(self, way: Way, chunk: Chunk, num_bytes: int) -> Buffer:
        """Waits until it is known: all must have described it, and some may come sooner than others."""
        if not 0 < num_bytes <= CHUNK_BYTES:
            raise FrameError(f"a chunk of {num_bytes} bytes; at most {CHUNK_BYTES}")
        stream = self.stream(way)
        with self._change:
            key = stream.last
            if key is None:
                raise FrameError("a chunk of nothing that was described")
            while not self.is_over(key) and not way.lost:
                if stream.landing is not None and stream.heard == key:
                    return stream.landing.place(chunk.offset, num_bytes)
                self._change.wait(1.0)
        return memoryview(bytearray(num_bytes))  # of a call that this worker has given up

    def hear(self, way: Way, request: Request) -> None:
        message, stream = request.message, self.stream(way)
        if isinstance(message, Describe):
            if not request.payload and self._inline_bytes(way, stream, message):
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
                self._note(way, stream, message)
                self._change.notify_all()

    def _note(self, way: Way, stream: Stream, message: Message) -> None:
        if isinstance(message, Chunk):
            if stream.landing is not None and stream.heard == stream.last:
                stream.landing.came()
        elif isinstance(message, Through):
            stream.through.add((message.group, message.number))
        elif isinstance(message, Broken):
            key = (message.group, message.number)
            if not self.is_over(key) and len(self.broken) < _MOST_BROKEN:
                self.broken.setdefault(key, message)
        elif isinstance(message, Goodbye):
            way.has_left = True

    def _map(self, stream: Stream, message: Share, request: Request) -> None:
        memory = request.attachment
        if memory is None or message.memory in stream.memories or len(stream.memories) >= MOST_MEMORIES:
            raise FrameError("memory that did not come, or that is known, or too many of them")
        if isinstance(memory, shm.SharedMemory):
            read_only, memory = memory, shm.writable(memory)
            read_only.close()
        stream.memories[message.memory] = memory
