"""Bytes between ranks: from each to each, and all-reduce.

Ranks of one host read and write each other's shared memory. Between hosts, chunks go over sockets; an all-reduce goes
around a ring of hosts.
"""

from __future__ import annotations

import numpy as np

from syncline.core.collectives import is_inline, share, wanted
from syncline.core.units import size
from syncline.core.wire.collectives import Chunk, Describe
from syncline.errors import CollectiveError, FrameError
from syncline.net import shm
from syncline.net.memory import aligned_zeros
from syncline.net.transport import Buffer, buffer_of
from syncline.reduce.kernels import Reducer
from syncline.worker.arrays import Bytes
from syncline.worker.collectives.incoming import CHUNK_BYTES
from syncline.worker.collectives.rendezvous import JointCall, Rendezvous

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


def exchange(rendezvous: Rendezvous, joint: JointCall, places: dict[int, Bytes] | None = None) -> list[Bytes]:
    """What every rank has for this one, in their order; over sockets straight into `places`, where there is one.

    What lies in others' memory may be read until `leave_memory`.
    """
    me = joint.place
    if joint.is_inline:
        return [_inline(joint, source, said) for source, said in enumerate(joint.said)]
    host = joint.host
    found: list[Bytes] = []
    receivers: dict[int, _InOrder] = {}
    for source, said in enumerate(joint.said):
        start, num_bytes = wanted(said, source, me)
        if source == me or not num_bytes:
            found.append(joint.data[start : start + num_bytes])
        elif is_inline(said, source):
            found.append(_inline(joint, source, said))
        elif source in host:
            found.append(joint.memory_of(source)[start : start + num_bytes])
        else:
            place = (places or {}).get(source)
            found.append(make_room(num_bytes) if place is None else place)
            receivers[source] = _InOrder(found[source])
    _expect(rendezvous, joint, receivers)
    if not is_inline(joint.mine, me):
        for step in range(1, len(joint.group_links)):
            reader = (me + step) % len(joint.group_links)
            if reader not in host:
                start, num_bytes = wanted(joint.mine, me, reader)
                send_chunks(rendezvous, joint, reader, joint.data[start : start + num_bytes])
    for source, receiver in receivers.items():
        joint.waiting.until(
            joint.links[source],
            lambda one=receiver: _whole(rendezvous, joint, one),  # type: ignore[misc]
        )
    return found


def _inline(joint: JointCall, source: int, said: Describe) -> Bytes:
    if source == joint.place:
        start, num_bytes = wanted(said, source, source)
        return joint.data[start : start + num_bytes]
    payload = joint.payloads[source]
    return np.frombuffer(payload[0], np.uint8) if payload else joint.data[:0]


def _expect(rendezvous: Rendezvous, joint: JointCall, receivers: dict[int, _InOrder]) -> None:
    with rendezvous.change:
        for source, receiver in receivers.items():
            joint.streams[source].receiver = receiver
        rendezvous.change.notify_all()


def _whole(rendezvous: Rendezvous, joint: JointCall, receiver: _InOrder) -> bool | None:
    if receiver.is_whole:
        return True
    rendezvous.check(joint)
    return None


def send_chunks(rendezvous: Rendezvous, joint: JointCall, reader: int, data: Bytes) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        rendezvous.send(joint, reader, Chunk(start), buffer_of(data[start : start + CHUNK_BYTES]))


def all_reduce(rendezvous: Rendezvous, joint: JointCall, reducer: Reducer) -> None:
    """Of `joint.data` of all ranks, in place."""
    host, hosts = joint.host, joint.hosts
    columns = min(len(places) for places in hosts)
    column = host.index(joint.place)
    if column < columns:
        start, end = share(column, columns, len(joint.data))
        mine = [joint.memory_of(place)[start:end] for place in host]
        if len(hosts) == 1:
            reducer.reduce(mine, mine)
        else:
            own = mine[column]
            reducer.reduce(mine, [own], is_all=False)
            ring = [places[column] for places in hosts]
            _Ring(rendezvous, joint, reducer, own, ring).run()
            for other in mine:
                if other is not own:
                    other[...] = own
    rendezvous.leave_memory(joint)


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

    def __init__(
        self, rendezvous: Rendezvous, joint: JointCall, reducer: Reducer, data: Bytes, ring: list[int]
    ) -> None:
        self._rendezvous, self._joint, self._reducer = rendezvous, joint, reducer
        self._size, self._at = len(ring), ring.index(joint.place)
        self._left, self._right = (ring[(self._at + link) % self._size] for link in (-1, 1))
        bounds = [share(k, self._size, len(data)) for k in range(self._size)]
        most = max(end - start for start, end in bounds)
        self._num_chunks = max(1, -(-most // CHUNK_BYTES))
        pieces = [data[start:end] for start, end in bounds]
        self._chunks = [self._cut(piece) for piece in pieces]  # by piece
        scratch = rendezvous.scratch(sum(len(pieces[self._piece(s) - 1]) for s in range(self._size - 1)))
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
        receiver = _Expected([target for target in self._targets if len(target)])
        stream = self._joint.streams[self._left]
        with self._rendezvous.change:
            stream.receiver = receiver
            self._rendezvous.change.notify_all()
        num_came = num_sent = 0
        for k in range(last + count):
            before = k - count  # what came in the step before goes on in this one
            if before >= 0 and len(self._targets[before]):
                num_came += 1
                self._await(receiver, num_came)
                self._take(before)
            if k < last:
                chunk = self._chunks[self._piece(k // count)][k % count]
                if len(chunk):
                    self._rendezvous.send(self._joint, self._right, Chunk(num_sent), buffer_of(chunk))
                    num_sent += 1

    def _take(self, number: int) -> None:
        step, k = divmod(number, self._num_chunks)
        if step < self._size - 1:
            chunk = self._chunks[self._piece(step) - 1][k]
            self._reducer.merge(chunk, self._targets[number])
            if step == self._size - 2:
                self._reducer.finish(chunk)

    def _await(self, receiver: _Expected, count: int) -> None:
        if receiver.count < count:
            self._joint.waiting.until(self._joint.links[self._left], lambda: self._has(receiver, count))

    def _has(self, receiver: _Expected, count: int) -> bool | None:
        if receiver.count >= count:
            return True
        self._rendezvous.check(self._joint)
        return None
