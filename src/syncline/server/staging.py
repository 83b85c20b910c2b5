"""Staged gradients of workers, in shared arenas or in receive buffers, encoded or not."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from syncline.core.codecs.pieces import Encoded, SliceCoder
from syncline.core.layout import Segment, Slice
from syncline.core.rule import Option, RuleSpec, check_rule
from syncline.core.slice_state import Identity
from syncline.core.wire.traffic import Stage
from syncline.errors import FrameError, ProtocolError
from syncline.net.device_channel import DeviceChannel
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Memory, Peer, buffer_of
from syncline.reduce.kernels import Numbers
from syncline.server.numbers import Bytes, numbers_in
from syncline.server.ring_copies import Copies
from syncline.server.slices import HostedSlice
from syncline.server.storage import DeviceArena


class Decoding:
    """Receives and decodes pushes. Payloads that this server does not need are read and discarded."""

    def __init__(
        self,
        slices: Mapping[int, HostedSlice],
        staging: Staging,
        find: Callable[[int], tuple[Segment, Slice]],
        is_taken: Callable[[Peer], bool],
    ) -> None:
        self._slices, self._staging, self._find, self._is_taken = slices, staging, find, is_taken
        self.coder: SliceCoder | None = None  # with --codec
        # With a process group or a hierarchical reducer: also accept slices whose primary is on another server.
        self.takes_all = False

    def buffers_for(self, peer: Peer, message: Stage) -> Sequence[Buffer]:
        """Returns the receive buffers for a push. Invalid sizes are refused before anything is allocated."""
        found: list[Buffer] = []
        for number, sizes in zip(message.slices, self._sizes(peer, message), strict=True):
            if sizes:
                assert self.coder is not None
                found += map(buffer_of, self.coder.room(*self._find(number), sizes))
            else:
                target = self._target(peer, message, number)
                found.append(target or buffer_of(np.empty(self._find(number)[1].num_bytes, np.uint8)))
        return found

    def _target(self, peer: Peer, message: Stage, number: int) -> Buffer | None:
        is_here = number in self._slices or self._staging.copies.get(number) or self.takes_all
        if not is_here or not self._is_taken(peer):
            return None
        return self._staging.buffer((peer.name, peer.incarnation), message.slot, self._find(number)[1])

    def _sizes(self, peer: Peer, message: Stage) -> Sequence[Sequence[int]]:
        """The sizes of the pieces of each slice; empty for a slice that is not encoded."""
        if not message.codec:
            return [()] * len(message.slices)
        if self.coder is None or message.codec != self.coder.codec.name:
            has = self.coder.codec.name if self.coder is not None else "none"
            raise FrameError(f"{peer} encodes by {message.codec[:40]!r}; the codec of this job: {has}")
        if len(message.sizes) != len(message.slices):
            raise FrameError(f"{peer} gives sizes of {len(message.sizes)} slices, and {len(message.slices)} slices")
        return message.sizes

    def decode(self, request: Request, message: Stage) -> bool:
        """Decodes an encoded push. Closes the connection and returns False if the data is invalid."""
        try:
            self._decode(request, message)
        except FrameError as error:
            request.endpoint.close(f"refused what {request.peer} sent: {error}")
            return False
        return True

    def _decode(self, request: Request, message: Stage) -> None:
        all_sizes = self._sizes(request.peer, message)
        if len(request.payload) != sum(sum(size > 0 for size in sizes) if sizes else 1 for sizes in all_sizes):
            raise FrameError(f"{request.peer} announces encoded slices whose bytes did not come")
        buffers = iter(request.payload)
        for number, sizes in zip(message.slices, all_sizes, strict=True):
            if not sizes:
                next(buffers)  # already in its buffer
                continue
            assert self.coder is not None
            came = [np.frombuffer(next(buffers), np.uint8) for size in sizes if size > 0]
            target = self._target(request.peer, message, number)
            if target is not None:
                out = np.frombuffer(target, np.uint8)
                self.coder.decode(*self._find(number), Encoded(list(sizes), came), out)


def check_stage(peer: Peer, message: Stage, segments: Mapping[int, Segment]) -> None:
    """Validates a worker's commit message."""
    if not (math.isfinite(message.weight) and message.weight >= 0):
        raise ProtocolError(f"{peer} pushes with weight {message.weight}; it must be a number from 0 on")
    if not (math.isfinite(message.nominal) and message.nominal > 0):
        raise ProtocolError(f"{peer} pushes with the nominal weight {message.nominal}; it must be more than 0")
    if not (math.isfinite(message.squared_norm) and message.squared_norm >= 0):
        raise ProtocolError(f"{peer} pushes a gradient of squared norm {message.squared_norm}")
    if not 0 <= message.slot < 1 << 10:
        raise ProtocolError(f"{peer} names slot {message.slot}")
    for segment, group, options in message.overrides:
        _check_override(peer, segments.get(segment), segment, group, options)
    before = -1
    for start, stop in message.pushed:
        if not before <= start < stop:
            raise ProtocolError(f"{peer} pushes ranges that are empty or out of order")
        before = stop
    if message.rows is not None:
        raise ProtocolError(f"{peer} pushes rows; sparse gradients are not supported yet")


def _check_override(peer: Peer, known: Segment | None, segment: int, group: int, options: dict[str, Option]) -> None:
    """Validates hyperparameters that travel with a commit like registered ones."""
    if known is not None:
        if not 0 <= group < len(known.rules):
            raise ProtocolError(f"{peer} names rule {group} of segment {segment}")
        check_rule(RuleSpec(known.rules[group].name, options))


class Staging:
    """Staged bytes by worker, slot and slice. A restarted worker has a new identity.

    Workers attach their arenas from their own connection threads, while other threads add gradients up.
    """

    def __init__(
        self, release: Callable[[Bytes], None] = lambda array: None, device_channel: DeviceChannel | None = None
    ) -> None:
        """`device_channel`: connects to the worker in this process."""
        self._release, self._device_channel = release, device_channel
        self.copies = Copies()
        self._lock = threading.Lock()  # guards all tables except `_handed`; lookups of existing entries need no lock
        self._arenas: dict[tuple[Identity, int, int], Memory] = {}  # worker, segment, slot
        self._on_device: dict[tuple[Identity, int, int], DeviceArena] = {}  # those on this server's GPU
        self._buffers: dict[tuple[Identity, int, int], Bytes] = {}  # worker, slot, slice
        self._tensors: dict[tuple[Identity, int, int], Numbers] = {}
        # by slice: the source tensor and the view of it
        self._handed: dict[int, tuple[Numbers, Numbers]] = {}

    def attach(self, worker: Identity, segment: int, slot: int, arena: Memory) -> None:
        """Attaches a worker's arena. Replaces the earlier one when the worker has reconnected."""
        with self._lock:
            before = self._arenas.get((worker, segment, slot))
            self._arenas[worker, segment, slot] = arena
            for key in [k for k in self._tensors if k[0] == worker and k[1] == slot]:
                del self._tensors[key]
        if before is not None:
            self._let_go(before)

    def attach_device(self, worker: Identity, segment: int, slot: int, arena: DeviceArena) -> None:
        """Attaches a worker's arena on the GPU of this server."""
        with self._lock:
            before = self._on_device.get((worker, segment, slot))
            self._on_device[worker, segment, slot] = arena
        if before is not None:
            before.close()

    def detach_device(self, worker: Identity, segment: int) -> None:
        """Lets go of a worker's arenas of a segment."""
        with self._lock:
            places = [key for key in self._on_device if key[:2] == (worker, segment)]
            found = [self._on_device.pop(place) for place in places]
        for arena in found:
            arena.close()

    def device_arenas(self, worker: Identity, slot: int) -> Mapping[int, DeviceArena]:
        """A worker's arenas on the GPU of this server, by segment."""
        if not self._on_device:
            return {}
        with self._lock:
            return {key[1]: arena for key, arena in self._on_device.items() if key[0] == worker and key[2] == slot}

    def held(self) -> dict[str, int]:
        """How many there are of everything that workers bring."""
        with self._lock:
            num_arenas = len(self._arenas) + len(self._on_device)
            return {"arenas": num_arenas, "buffers": len(self._buffers), "tensors": len(self._tensors)}

    def num_bytes(self) -> tuple[int, int]:
        """Of the workers' arenas, and of buffers for what comes over sockets."""
        with self._lock:
            arenas = sum(arena.array.nbytes for arena in self._arenas.values())
            return arenas, sum(array.nbytes for array in self._buffers.values())

    def is_shared(self, worker: Identity, slot: int, part: Slice) -> bool:
        is_handed = self._device_channel is not None and part.segment in self._device_channel.segments
        key = (worker, part.segment, slot)
        return is_handed or key in self._arenas or key in self._on_device

    def buffer(self, worker: Identity, slot: int, part: Slice) -> Buffer:
        """The receive buffer of a slice, reused for every clock of this slot."""
        key = (worker, slot, part.id)
        with self._lock:
            array = self._buffers.get(key)
            if array is None:
                # zeros: an encoding may not write every byte
                array = self._buffers[key] = np.zeros(part.num_bytes, np.uint8)
        return buffer_of(array)

    def tensor(self, worker: Identity, slot: int, part: Slice) -> Numbers:
        """A tensor view of the staged bytes of one slice."""
        handed = self._device_channel.gradients(part.segment) if self._device_channel is not None else None
        if handed is not None:
            if handed.event is not None:
                handed.event.wait()  # orders the caller's stream; does not block
            return self._handed_slice(handed.data, part)
        on_device = self._on_device.get((worker, part.segment, slot))
        if on_device is not None:
            return on_device.gradients(part)
        key = (worker, slot, part.id)
        known = self._tensors.get(key)
        return known if known is not None else self._make_tensor(worker, slot, part)

    def _make_tensor(self, worker: Identity, slot: int, part: Slice) -> Numbers:
        key = (worker, slot, part.id)
        with self._lock:
            arena = self._arenas.get((worker, part.segment, slot))
            if arena is not None:
                array = arena.array[part.offset : part.offset + part.num_bytes]
            else:
                array = self._buffers[key]
            made = self._tensors[key] = numbers_in(array, part.dtype)
        return made

    def _handed_slice(self, data: Numbers, part: Slice) -> Numbers:
        """The view of a slice in a handed-over tensor; cached while the tensor stays the same."""
        known = self._handed.get(part.id)
        if known is None or known[0] is not data:
            view = data[part.offset : part.offset + part.num_bytes].view(getattr(sys.modules["torch"], part.dtype))
            known = self._handed[part.id] = (data, view)
        return known[1]

    def forget_worker(self, worker: Identity) -> None:
        """Frees everything of this worker."""
        with self._lock:
            for table in (self._tensors, self._buffers):
                for key in [k for k in table if k[0] == worker]:
                    del table[key]
            arenas = [self._arenas.pop(place) for place in [k for k in self._arenas if k[0] == worker]]
            on_device = [self._on_device.pop(place) for place in [k for k in self._on_device if k[0] == worker]]
        for arena in arenas:
            self._let_go(arena)
        for mapped in on_device:
            mapped.close()

    def keep_only(self, slices: Container[int]) -> None:
        """Drops the data of all other slices, except those that have copies here."""
        with self._lock:
            for table in (self._tensors, self._buffers):
                for key in [k for k in table if k[2] not in slices and k[2] not in self.copies.numbers]:
                    del table[key]

    def _let_go(self, arena: Memory) -> None:
        self._release(arena.array)
        arena.close()

    def close(self) -> None:
        with self._lock:
            self._tensors.clear()
            self._buffers.clear()
            arenas: list[Memory | DeviceArena] = [*self._arenas.values(), *self._on_device.values()]
            self._arenas.clear()
            self._on_device.clear()
        for arena in arenas:
            arena.close()
