"""Bytes from each rank to each: read where they lie on one host, in chunks over sockets."""

from __future__ import annotations

import numpy as np

from syncline.core.collectives import is_inline, wanted
from syncline.core.units import size
from syncline.core.wire.collectives import Chunk, Describe
from syncline.errors import CollectiveError, FrameError
from syncline.net import shm
from syncline.net.memory import aligned_zeros
from syncline.net.transport import Buffer, buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.collectives.hearing import CHUNK_BYTES
from syncline.worker.collectives.meeting import Meeting
from syncline.worker.collectives.meetings import Meetings

#: From this size on, it is looked whether there is so much memory.
_LARGE_BYTES = 64 << 20


def make_room(num_bytes: int) -> Bytes:
    """New memory for what others have announced; a CollectiveError when there is not so much."""
    available = shm.available_bytes() if num_bytes > _LARGE_BYTES else None
    if available is not None and num_bytes > available:
        raise CollectiveError(f"{size(num_bytes)} are announced, and {size(available)} of memory are there")
    return np.empty(num_bytes, np.uint8) if num_bytes > _LARGE_BYTES else aligned_zeros(num_bytes)[:num_bytes]


class _InOrder:
    """Chunks of one rank go into one array, one behind the other."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._next, self.count = data, 0, 0

    def place(self, offset: int, num_bytes: int) -> Buffer:
        if offset != self._next or offset + num_bytes > len(self._data):
            raise FrameError(f"a chunk of {num_bytes} bytes at {offset}, of {len(self._data)} from {self._next} on")
        self._next += num_bytes
        return buffer_of(self._data[offset : offset + num_bytes])

    def came(self) -> None:
        self.count = self._next

    @property
    def is_whole(self) -> bool:
        return self.count == len(self._data)


def exchange(meetings: Meetings, meeting: Meeting, places: dict[int, Bytes] | None = None) -> list[Bytes]:
    """What every rank has for this one, in their order; over sockets straight into `places`, where there is one.

    What lies in others' memory may be read until `leave_memory`.
    """
    me = meeting.place
    if meeting.is_inline:
        return [_inline(meeting, source, said) for source, said in enumerate(meeting.said)]
    host = meeting.host
    found: list[Bytes] = []
    landings: dict[int, _InOrder] = {}
    for source, said in enumerate(meeting.said):
        start, num_bytes = wanted(said, source, me)
        if source == me or not num_bytes:
            found.append(meeting.data[start : start + num_bytes])
        elif is_inline(said, source):
            found.append(_inline(meeting, source, said))
        elif source in host:
            found.append(meeting.memory_of(source)[start : start + num_bytes])
        else:
            place = (places or {}).get(source)
            found.append(make_room(num_bytes) if place is None else place)
            landings[source] = _InOrder(found[source])
    _expect(meetings, meeting, landings)
    if not is_inline(meeting.mine, me):
        for step in range(1, len(meeting.party)):
            reader = (me + step) % len(meeting.party)
            if reader not in host:
                start, num_bytes = wanted(meeting.mine, me, reader)
                send_chunks(meetings, meeting, reader, meeting.data[start : start + num_bytes])
    for source, landing in landings.items():
        meeting.waiting.until(
            meeting.ways[source],
            lambda one=landing: _whole(meetings, meeting, one),  # type: ignore[misc]
        )
    return found


def _inline(meeting: Meeting, source: int, said: Describe) -> Bytes:
    if source == meeting.place:
        start, num_bytes = wanted(said, source, source)
        return meeting.data[start : start + num_bytes]
    payload = meeting.payloads[source]
    return np.frombuffer(payload[0], np.uint8) if payload else meeting.data[:0]


def _expect(meetings: Meetings, meeting: Meeting, landings: dict[int, _InOrder]) -> None:
    with meetings.change:
        for source, landing in landings.items():
            meeting.streams[source].landing = landing
        meetings.change.notify_all()


def _whole(meetings: Meetings, meeting: Meeting, landing: _InOrder) -> bool | None:
    if landing.is_whole:
        return True
    meetings.check(meeting)
    return None


def send_chunks(meetings: Meetings, meeting: Meeting, reader: int, data: Bytes) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        meetings.send(meeting, reader, Chunk(start), buffer_of(data[start : start + CHUNK_BYTES]))
