"""All-reduce: inside a host in shared memory, between hosts around a ring.

The ranks of a host split the data among them. Each reduces its own part of everyone's memory, block by block, and
writes the result into everyone's. With several hosts there are as many parts as the smallest host has ranks: the
ranks that have a part on their hosts are a ring, around which it goes twice, first to be added up, then whole.
"""

from __future__ import annotations

from syncline.core.collectives import share
from syncline.core.wire.collectives import Chunk
from syncline.errors import FrameError
from syncline.net.transport import Buffer, buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.collectives.hearing import CHUNK_BYTES
from syncline.worker.collectives.meeting import Meeting
from syncline.worker.collectives.meetings import Meetings
from syncline.worker.collectives.reducing import Reducer


def all_reduce(meetings: Meetings, meeting: Meeting, reducer: Reducer) -> None:
    """Of `meeting.data` of all ranks, in place."""
    host, hosts = meeting.host, meeting.hosts
    columns = min(len(places) for places in hosts)
    column = host.index(meeting.place)
    if column < columns:
        start, end = share(column, columns, len(meeting.data))
        mine = [meeting.memory_of(place)[start:end] for place in host]
        if len(hosts) == 1:
            reducer.reduce(mine, mine)
        else:
            own = mine[column]
            reducer.reduce(mine, [own], is_all=False)
            ring = [places[column] for places in hosts]
            _Ring(meetings, meeting, reducer, own, ring).run()
            for other in mine:
                if other is not own:
                    other[...] = own
    meetings.leave_memory(meeting)


class _Expected:
    """Chunks come one after the other, each to its own place."""

    def __init__(self, targets: list[Bytes]) -> None:
        self._targets, self._next, self.count = targets, 0, 0

    def place(self, offset: int, num_bytes: int) -> Buffer:
        if offset != self._next or offset >= len(self._targets) or num_bytes != len(self._targets[offset]):
            raise FrameError(f"chunk {offset} of {num_bytes} bytes, where number {self._next} is expected")
        self._next += 1
        return buffer_of(self._targets[offset])

    def came(self) -> None:
        self.count = self._next


class _Ring:
    """One part, around all hosts. Sent and received in the same order everywhere: by steps, and chunks within."""

    def __init__(self, meetings: Meetings, meeting: Meeting, reducer: Reducer, data: Bytes, ring: list[int]) -> None:
        self._meetings, self._meeting, self._reducer = meetings, meeting, reducer
        self._size, self._at = len(ring), ring.index(meeting.place)
        self._left, self._right = (ring[(self._at + way) % self._size] for way in (-1, 1))
        bounds = [share(k, self._size, len(data)) for k in range(self._size)]
        most = max(end - start for start, end in bounds)
        self._num_chunks = max(1, -(-most // CHUNK_BYTES))
        pieces = [data[start:end] for start, end in bounds]
        self._chunks = [self._cut(piece) for piece in pieces]  # by piece
        scratch = meetings.scratch(sum(len(pieces[self._piece(s) - 1]) for s in range(self._size - 1)))
        self._targets = self._place(scratch)

    def _cut(self, piece: Bytes) -> list[Bytes]:
        bounds = [share(k, self._num_chunks, len(piece)) for k in range(self._num_chunks)]
        return [piece[start:end] for start, end in bounds]

    def _piece(self, step: int) -> int:
        """That is sent in this step; the one before it is received."""
        return (self._at - step) % self._size

    def _place(self, scratch: Bytes) -> list[Bytes]:
        """Where the chunks go that come: beside mine while they are added up, then in their place."""
        targets, used = [], 0
        for step in range(2 * self._size - 2):
            for chunk in self._chunks[self._piece(step) - 1]:
                if step < self._size - 1:
                    chunk, used = scratch[used : used + len(chunk)], used + len(chunk)
                targets.append(chunk)
        return targets

    def run(self) -> None:
        count, last = self._num_chunks, 2 * (self._size - 1) * self._num_chunks
        landing = _Expected([target for target in self._targets if len(target)])
        stream = self._meeting.streams[self._left]
        with self._meetings.change:
            stream.landing = landing
            self._meetings.change.notify_all()
        num_came = num_sent = 0
        for k in range(last + count):
            before = k - count  # what came in the step before goes on in this one
            if before >= 0 and len(self._targets[before]):
                num_came += 1
                self._await(landing, num_came)
                self._take(before)
            if k < last:
                chunk = self._chunks[self._piece(k // count)][k % count]
                if len(chunk):
                    self._meetings.send(self._meeting, self._right, Chunk(num_sent), buffer_of(chunk))
                    num_sent += 1

    def _take(self, number: int) -> None:
        step, k = divmod(number, self._num_chunks)
        if step < self._size - 1:
            chunk = self._chunks[self._piece(step) - 1][k]
            self._reducer.merge(chunk, self._targets[number])
            if step == self._size - 2:
                self._reducer.finish(chunk)

    def _await(self, landing: _Expected, count: int) -> None:
        if landing.count < count:
            self._meeting.waiting.until(self._meeting.ways[self._left], lambda: self._has(landing, count))

    def _has(self, landing: _Expected, count: int) -> bool | None:
        if landing.count >= count:
            return True
        self._meetings.check(self._meeting)
        return None
