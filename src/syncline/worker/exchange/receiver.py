"""Receives new parameters from one server.

`ServerReader` reads a server's parameters from its shared memory, never torn, or over the socket. In shared memory a
copy is optimistic: it is valid if the server confirms afterwards that nothing was written meanwhile. After two failed
copies the slice is pinned for the third. In a ring, where a worker reads its own server's copies, the server sends it
instead.

`CommitReceiver` receives one commit's new parameters: slice by slice as they are applied, or all at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from syncline.core.codecs.pieces import Encoded, SliceCoder
from syncline.core.layout import Layout, Slice
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import AskHosted, Committed, Hosted, Map, Pin, Pull, Pulled, Unpin, Verified, Verify
from syncline.errors import FrameError, ProtocolError
from syncline.net.device_channel import WorkerChannel
from syncline.net.rpc import Endpoint
from syncline.net.transport import Buffer, Memory, buffer_of
from syncline.worker.arrays import Bytes, copy
from syncline.worker.exchange.targets import Clocks, Target, WantedSlices, landed, scattered

OPTIMISTIC_COPIES = 2


class ServerReader:
    """Reads the parameters of one server."""

    def __init__(self, endpoint: Endpoint, wait_seconds: float, *, pins: bool = True) -> None:
        """`pins`: whether slices there can be pinned; otherwise their bytes are requested."""
        self._endpoint, self._wait_seconds, self._pins = endpoint, wait_seconds, pins
        self._blocks: dict[int, Memory] = {}
        self._sources: dict[int, Bytes] = {}  # slices in the server's memory
        self._buffers: dict[tuple[int, int], Bytes] = {}  # slot, slice
        self.change = threading.Condition()  # notified when a part of an answer arrives

    def look(self, hosted: Sequence[Slice]) -> None:
        """Maps these slices, if the server is on this host and shares them."""
        if not self._endpoint.shares_memory or not (hosted or self._blocks):
            return
        answer = self._endpoint.call(AskHosted()).wait(self._wait_seconds)
        if not isinstance(answer, Hosted):
            raise ProtocolError(f"{self._endpoint.peer} says {type(answer).__name__} of what it hosts")
        parts = {part.id: part for part in hosted}
        places = [(parts[number], block, offset) for number, block, offset in answer.slices if number in parts]
        needed = {block for _, block, _ in places}
        blocks = {n: self._blocks.get(n) or self._map(n, size) for n, size in answer.blocks if n in needed}
        for number in self._blocks.keys() - blocks.keys():
            self._blocks[number].close()
        self._blocks = {number: memory for number, memory in blocks.items() if memory is not None}
        self._sources = {
            part.id: self._blocks[block].array[offset : offset + part.num_bytes]
            for part, block, offset in places
            if block in self._blocks
        }

    def _map(self, number: int, num_bytes: int) -> Memory | None:
        call = self._endpoint.call(Map(number))
        try:
            call.wait(self._wait_seconds)
        except ProtocolError:
            return None  # no shared memory available, as reported: use the socket
        if call.attachment is None or call.attachment.array.nbytes < num_bytes:
            raise ProtocolError(f"{self._endpoint.peer} gave no memory for block {number}")
        return call.attachment

    def maps(self, part: Slice) -> bool:
        return part.id in self._sources

    def source(self, part: Slice) -> Bytes:
        """The slice in the server's memory."""
        return self._sources[part.id]

    def mapped(self) -> list[Bytes]:
        """All memory of the server that is mapped here."""
        return [memory.array for memory in list(self._blocks.values())]

    # -- shared memory ------------------------------------------------------------------------------------

    def _copy(self, parts: Sequence[Slice], target: Target) -> None:
        copy([pair for part in parts for pair in scattered(self.source(part), target.views(part))])

    def copy_verified(
        self, parts: Sequence[Slice], versions: Sequence[int], clocks: Clocks, target: Target
    ) -> list[int]:
        """Copies slices of these versions while they may be written. Torn copies are repeated."""
        if not parts:
            return []
        found = {part.id: (version, clocks) for part, version in zip(parts, versions, strict=True)}
        target.kept.update(dict.fromkeys(found))
        self._copy(parts, target)
        by_id = {part.id: part for part in parts}
        stale = list(by_id)
        for attempt in range(OPTIMISTIC_COPIES):
            if attempt:
                self._copy([by_id[number] for number in stale], target)
            answer = self._ask(Verify(stale, [found[number][0] for number in stale]))
            assert isinstance(answer, Verified)
            stale = answer.stale
            found.update((n, (v, answer.clocks)) for n, v in zip(stale, answer.versions, strict=True))
            if not stale:
                break
        for number in stale:
            found[number] = (self._copy_pinned if self._pins else self._copy_sent)(by_id[number], target)
        target.filled(parts)
        target.kept.update((number, landed(version, known)) for number, (version, known) in found.items())
        return [found[part.id][0] for part in parts]

    def _copy_sent(self, part: Slice, target: Target) -> tuple[int, Clocks]:
        into = [buffer_of(view) for view in target.views(part)]
        answer = self._endpoint.call(Pull([part.id], None, True), into=into).wait(self._wait_seconds)
        assert isinstance(answer, Pulled)
        return answer.versions[0], answer.clocks

    def _copy_pinned(self, part: Slice, target: Target) -> tuple[int, Clocks]:
        answer = self._ask(Pin([part.id]))
        assert isinstance(answer, Pulled)
        self._copy([part], target)
        self._ask(Unpin([part.id]))
        return answer.versions[0], answer.clocks

    def _ask(self, message: Verify | Pin | Unpin | Pull) -> object:
        return self._endpoint.call(message).wait(self._wait_seconds)

    # -- either way ---------------------------------------------------------------------------------------

    def pull(self, parts: Sequence[Slice], target: Target, min_version: int | None) -> list[int]:
        """Reads parameters, now or once they are new enough. Returns their versions."""
        shared = [part for part in parts if self.maps(part)]
        remote = [part for part in parts if not self.maps(part)]
        versions: dict[int, int] = {}
        if shared:
            answer = self._ask(Pull([part.id for part in shared], min_version, False))
            assert isinstance(answer, Pulled)
            found = self.copy_verified(shared, answer.versions, answer.clocks, target)
            versions.update(zip((part.id for part in shared), found, strict=True))
        if remote:
            found = self._pull_bytes(remote, target, min_version)
            versions.update(zip((part.id for part in remote), found, strict=True))
        return [versions[part.id] for part in parts]

    def verify(self, numbers: list[int], versions: list[int]) -> Verified:
        """Whether these slices still have these versions, and how many commits each of them has."""
        answer = self._ask(Verify(numbers, versions, counted=True))
        assert isinstance(answer, Verified)
        return answer

    # -- over the socket ----------------------------------------------------------------------------------

    def _pull_bytes(self, parts: Sequence[Slice], target: Target, min_version: int | None) -> list[int]:
        message = Pull([part.id for part in parts], min_version, True)
        # A pull that may be abandoned must not write to the caller's arrays later: use separate buffers.
        beside = [np.empty(part.num_bytes, np.uint8) for part in parts] if min_version is not None else []
        target.kept.update((part.id, None) for part in parts)
        into = [buffer_of(a) for a in beside] or [buffer_of(view) for part in parts for view in target.views(part)]
        answer = self._endpoint.call(message, into=into).wait(self._wait_seconds)
        assert isinstance(answer, Pulled)
        for part, array in zip(parts, beside, strict=False):
            copy(scattered(array, target.views(part)))
        target.filled(parts)
        for part, version in zip(parts, answer.versions, strict=True):
            target.kept[part.id] = landed(version, answer.clocks)
        return answer.versions

    def buffer(self, slot: int, part: Slice) -> Bytes:
        """The receive buffer of a slice, while the model computes on."""
        key = (slot, part.id)
        if key not in self._buffers:
            self._buffers[key] = np.empty(part.num_bytes, np.uint8)
        return self._buffers[key]

    def close(self) -> None:
        for memory in self._blocks.values():
            memory.close()
        self._blocks.clear()


def sizes_of(answer: Committed, incoming: EncodedAnswer | None) -> Sequence[Sequence[int]]:
    """The validated sizes of the encoded pieces of each slice; empty for slices that are not encoded."""
    if not answer.codec:
        return [()] * len(answer.slices)
    if incoming is None or answer.codec != incoming.codec:
        raise FrameError(f"an answer encoded by {answer.codec[:40]!r}, which was not asked for")
    if len(answer.sizes) != len(answer.slices):
        raise FrameError(f"sizes of {len(answer.sizes)} slices, and {len(answer.slices)} slices")
    return answer.sizes


class EncodedAnswer:
    """The encoded part of one server's answer to a commit."""

    def __init__(self, coder: SliceCoder, layout: Layout) -> None:
        self._coder, self._layout = coder, layout
        self._encoded: dict[int, Encoded] = {}

    @property
    def codec(self) -> str:
        return self._coder.codec.name

    def room(self, part: Slice, sizes: Sequence[int]) -> list[Buffer]:
        """Receive buffers for an encoded slice. Invalid sizes are refused before anything is allocated."""
        buffers = self._coder.room(self._layout.segments[part.segment], part, sizes)
        self._encoded[part.id] = Encoded(list(sizes), buffers)
        return [buffer_of(buffer) for buffer in buffers]

    def heard(self, answer: Committed, parts: Mapping[int, Slice]) -> None:
        """The answer is complete, including slices whose encoding has no bytes."""
        for number, sizes in zip(answer.slices, sizes_of(answer, self), strict=True):
            part = parts.get(number)
            if sizes and part is not None and part.id not in self._encoded:
                if any(size > 0 for size in sizes):
                    raise FrameError(f"slice {number} is announced, and did not come")
                self.room(part, sizes)

    def has(self, part: Slice) -> bool:
        """Whether this slice came encoded; otherwise it is in its place already."""
        return part.id in self._encoded

    def unpack(self, part: Slice, targets: Sequence[Bytes]) -> None:
        """Decodes into buffers that together hold the slice."""
        encoded = self._encoded.pop(part.id)
        whole = targets[0] if len(targets) == 1 else np.empty(part.num_bytes, np.uint8)
        self._coder.decode(self._layout.segments[part.segment], part, encoded, whole)
        if len(targets) != 1:
            copy(scattered(whole, targets))


_NOTHING: Bytes = np.empty(0, np.uint8)


class CommitReceiver:
    """Receives one commit's parameters from one server.

    `settled`: the server's memory is not written before this worker's next commit. With a slot, received bytes stay
    in the slot's buffers until they are unloaded, while the model computes on.
    """

    def __init__(
        self,
        reader: ServerReader,
        wanted: WantedSlices,
        target: Target,
        *,
        settled: bool,
        slot: int | None,
        incoming: EncodedAnswer | None = None,
        device_channel: WorkerChannel | None = None,
        arena_slot: int = 0,
    ) -> None:
        """`incoming`: set if the server encodes its replies. `device_channel`: its segments are on the device.
        `arena_slot`: of the commit's arenas.
        """
        self._device_channel, self._arena_slot = device_channel, arena_slot
        self._reader, self._wanted, self._target, self._incoming = reader, wanted, target, incoming
        self._settled, self._slot = settled, slot
        self._landed: set[int] = set()
        self.versions: dict[int, int] = {}  # of slices that came in parts
        self._is_given_up = False

    @property
    def pull(self) -> list[int]:
        return self._wanted.pull

    @property
    def in_parts(self) -> bool:
        """Whether the target takes slices one by one while the server applies others."""
        return self._settled and self._target.in_parts and bool(self._wanted.mapped)

    def wants(self, numbers: Collection[int]) -> set[int]:
        """Those of these slices that come from here."""
        return {number for number in numbers if number in self._wanted.by_id}

    def buffers(self, answer: Message) -> Sequence[Buffer]:
        """Receive buffers for an answer."""
        if not isinstance(answer, Committed):
            raise ProtocolError(f"a commit was answered with {type(answer).__name__} and bytes")
        parts = self._parts(answer)
        found: list[Buffer] = []
        for part, sizes in zip(parts, sizes_of(answer, self._incoming), strict=True):
            if sizes:
                assert self._incoming is not None
                found += self._incoming.room(part, sizes)
            elif self._is_given_up:
                found.append(buffer_of(np.empty(part.num_bytes, np.uint8)))
            else:
                found += map(buffer_of, self._targets(part))
        return found

    def _targets(self, part: Slice) -> list[Bytes]:
        """Buffers for a slice from the socket, which will be written now."""
        if self._slot is not None:
            return [self._reader.buffer(self._slot, part)]
        self._target.kept[part.id] = None
        return self._target.views(part)

    def give_up(self) -> None:
        """The commit is replayed: whatever still arrives here is discarded.

        An answer being received ends before any server is told again to commit: first all servers acknowledge the
        staged bytes, each over the connection of its old answer.
        """
        self._is_given_up = True

    def _parts(self, answer: Committed) -> list[Slice]:
        try:
            return [self._wanted.by_id[number] for number in answer.slices]
        except KeyError as error:
            raise ProtocolError(f"slice {error} came, which was not asked for") from None

    def arrived(self, answer: Message) -> None:
        """A part of the answer: some slices are applied, and their bytes are here."""
        assert isinstance(answer, Committed)
        if self._is_given_up:
            return
        by_id = self._wanted.by_id  # without bytes, the server also names slices that this target does not want
        parts = [by_id[number] for number in answer.slices if number in by_id and number not in self._landed]
        remote = [part for part in parts if part.id in self._wanted.remote]
        if self._incoming is not None:
            self._incoming.heard(answer, {part.id: part for part in remote})
            for part in remote:
                if self._incoming.has(part):
                    self._incoming.unpack(part, self._targets(part))
        if remote and self._slot is None:
            self._target.filled(remote)
        mapped = [(part, self._source(part)) for part in parts if part.id not in self._wanted.remote]
        if mapped and self._settled:
            self._target.kept.update((part.id, None) for part, _ in mapped)
            self._target.take(mapped)
        if parts:
            self._keep(answer, parts if self._settled else remote)
        with self._reader.change:
            self._landed.update(part.id for part in remote)
            if self._settled:
                self._landed.update(part.id for part, _ in mapped)
            self._reader.change.notify_all()

    def _keep(self, answer: Committed, parts: Sequence[Slice]) -> None:
        """Records the versions of these slices; without clocks, the end of the answer brings them."""
        ids = {part.id for part in parts}
        found = {n: v for n, v in zip(answer.slices, answer.versions, strict=False) if n in ids}
        self.versions.update(found)
        if self._slot is None and answer.clocks:
            self._target.kept.update((n, landed(v, answer.clocks, answer.clock)) for n, v in found.items())

    def has(self, numbers: Collection[int]) -> bool:
        return self._landed.issuperset(numbers)

    def wait_for(self, numbers: Collection[int], seconds: float) -> None:
        """Waits until these slices are received, or until the timeout."""
        with self._reader.change:
            self._reader.change.wait_for(lambda: self.has(numbers), seconds)

    def finish(self, answer: Committed) -> None:
        """The commit is complete: receives what is still missing."""
        wanted, kept = self._wanted, self._target.kept
        wanted.answer = None  # until all of it is here
        if self._device_channel is not None:
            self._device_channel.arrived(self._arena_slot)
        if answer.slices:
            self.arrived(answer)
        if self._slot is not None and wanted.pull:
            self._unload()
        self._land_mapped(answer)
        if self.versions:
            kept.update((n, landed(v, answer.clocks, answer.clock)) for n, v in self.versions.items())
        elif self._settled:
            wanted.answer = answer
            if kept:
                for number in wanted.by_id:
                    kept.pop(number, None)

    def _land_mapped(self, answer: Committed) -> None:
        left = [(k, part) for k, part in self._wanted.mapped if part.id not in self._landed]
        if self._device_channel is not None and self._device_channel.segments:
            asked = [
                part
                for _, part in left
                if part.segment in self._device_channel.segments and not self._target.fetches(part)
            ]
            if asked:
                self._reader.pull(asked, self._target, None)
                left = [(k, part) for k, part in left if part not in asked]
        if not self._settled:
            left = self._fetch(answer, left)
        if not left:
            return
        if self._settled:
            if self._target.kept:
                self._target.kept.update((part.id, None) for _, part in left)
            self._target.take([(part, self._source(part)) for _, part in left])
        elif self.pull or len(answer.versions) < len(self._wanted.hosted):
            # Some segments came by socket, some by shared memory: ask for the versions of these.
            self._reader.pull([part for _, part in left], self._target, None)
        else:
            versions = [answer.versions[k] for k, _ in left]
            self._reader.copy_verified([part for _, part in left], versions, answer.clocks, self._target)

    def _fetch(self, answer: Committed, left: list[tuple[int, Slice]]) -> list[tuple[int, Slice]]:
        """Takes what the target fetches; it is not written before the next commit of this slot. Returns the rest."""
        fetched = [(k, part) for k, part in left if self._target.fetches(part)]
        if not fetched:
            return left
        self._target.kept.update((part.id, None) for _, part in fetched)
        self._target.take([(part, _NOTHING) for _, part in fetched])
        if len(answer.versions) == len(self._wanted.hosted):
            self.versions.update((part.id, answer.versions[k]) for k, part in fetched)
        return [pair for pair in left if pair not in fetched]

    def _source(self, part: Slice) -> Bytes:
        return _NOTHING if self._target.fetches(part) else self._reader.source(part)

    def _unload(self) -> None:
        assert self._slot is not None
        parts = list(self._wanted.remote.values())
        self._target.kept.update((part.id, None) for part in parts)
        buffers = [(part, self._reader.buffer(self._slot, part)) for part in parts]
        copy([pair for part, buffer in buffers for pair in scattered(buffer, self._target.views(part))])
        self._target.filled(parts)
