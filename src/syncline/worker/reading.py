"""Reading one server's parameters: from its shared memory, never torn, or over the socket.

In shared memory a copy is optimistic: it counts if the server says afterwards that nothing was written meanwhile.
After two such copies of a slice have been overtaken, the slice is pinned for the third; in a ring, where a worker
reads its own server's copies, that sends it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from syncline.core.layout import Slice
from syncline.core.wire.traffic import AskHosted, Hosted, Map, Pin, Pull, Pulled, Unpin, Verified, Verify
from syncline.errors import ProtocolError
from syncline.net.rpc import Endpoint
from syncline.net.transport import Memory, buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.copying import copy
from syncline.worker.sinks import Clocks, Sink, landed, scattered

OPTIMISTIC_COPIES = 2


class ServerReader:
    """What a worker can see of one server's parameters."""

    def __init__(self, endpoint: Endpoint, wait_seconds: float, *, pins: bool = True) -> None:
        """`pins`: whether slices there can be pinned; else bytes are asked for in the place of that."""
        self._endpoint, self._wait_seconds, self._pins = endpoint, wait_seconds, pins
        self._blocks: dict[int, Memory] = {}
        self._sources: dict[int, Bytes] = {}  # slices in the server's own memory
        self._landing: dict[tuple[int, int], Bytes] = {}  # slot, slice
        self.change = threading.Condition()  # a part of an answer has come

    def look(self, hosted: Sequence[Slice]) -> None:
        """Where these slices lie at this server, as far as it is on this host and shares them."""
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
            return None  # it could not get shared memory, and has said so: the socket it is
        if call.attachment is None or call.attachment.array.nbytes < num_bytes:
            raise ProtocolError(f"{self._endpoint.peer} gave no memory for block {number}")
        return call.attachment

    def maps(self, part: Slice) -> bool:
        return part.id in self._sources

    def source(self, part: Slice) -> Bytes:
        """The slice in the server's own memory."""
        return self._sources[part.id]

    def mapped(self) -> list[Bytes]:
        """All of the server's memory that is mapped here."""
        return [memory.array for memory in list(self._blocks.values())]

    # -- shared memory ------------------------------------------------------------------------------------

    def _copy(self, parts: Sequence[Slice], sink: Sink) -> None:
        copy([pair for part in parts for pair in scattered(self.source(part), sink.views(part))])

    def copy_verified(self, parts: Sequence[Slice], versions: Sequence[int], clocks: Clocks, sink: Sink) -> list[int]:
        """Copies slices that had these versions, while others may write them; what was torn is copied again."""
        if not parts:
            return []
        found = {part.id: (version, clocks) for part, version in zip(parts, versions, strict=True)}
        sink.kept.update(dict.fromkeys(found))
        self._copy(parts, sink)
        by_id = {part.id: part for part in parts}
        stale = list(by_id)
        for attempt in range(OPTIMISTIC_COPIES):
            if attempt:
                self._copy([by_id[number] for number in stale], sink)
            answer = self._ask(Verify(stale, [found[number][0] for number in stale]))
            assert isinstance(answer, Verified)
            stale = answer.stale
            found.update((n, (v, answer.clocks)) for n, v in zip(stale, answer.versions, strict=True))
            if not stale:
                break
        for number in stale:
            found[number] = (self._copy_pinned if self._pins else self._copy_sent)(by_id[number], sink)
        sink.filled(parts)
        sink.kept.update((number, landed(version, known)) for number, (version, known) in found.items())
        return [found[part.id][0] for part in parts]

    def _copy_sent(self, part: Slice, sink: Sink) -> tuple[int, Clocks]:
        into = [buffer_of(view) for view in sink.views(part)]
        answer = self._endpoint.call(Pull([part.id], None, True), into=into).wait(self._wait_seconds)
        assert isinstance(answer, Pulled)
        return answer.versions[0], answer.clocks

    def _copy_pinned(self, part: Slice, sink: Sink) -> tuple[int, Clocks]:
        answer = self._ask(Pin([part.id]))
        assert isinstance(answer, Pulled)
        self._copy([part], sink)
        self._ask(Unpin([part.id]))
        return answer.versions[0], answer.clocks

    def _ask(self, message: Verify | Pin | Unpin | Pull) -> object:
        return self._endpoint.call(message).wait(self._wait_seconds)

    # -- either way ---------------------------------------------------------------------------------------

    def pull(self, parts: Sequence[Slice], sink: Sink, min_version: int | None) -> list[int]:
        """Parameters now, or once they are new enough; their versions."""
        shared = [part for part in parts if self.maps(part)]
        remote = [part for part in parts if not self.maps(part)]
        versions: dict[int, int] = {}
        if shared:
            answer = self._ask(Pull([part.id for part in shared], min_version, False))
            assert isinstance(answer, Pulled)
            found = self.copy_verified(shared, answer.versions, answer.clocks, sink)
            versions.update(zip((part.id for part in shared), found, strict=True))
        if remote:
            found = self._pull_bytes(remote, sink, min_version)
            versions.update(zip((part.id for part in remote), found, strict=True))
        return [versions[part.id] for part in parts]

    # -- over the socket ----------------------------------------------------------------------------------

    def _pull_bytes(self, parts: Sequence[Slice], sink: Sink, min_version: int | None) -> list[int]:
        message = Pull([part.id for part in parts], min_version, True)
        # A pull that may be given up must not write into the caller's arrays later: it lands beside them.
        beside = [np.empty(part.num_bytes, np.uint8) for part in parts] if min_version is not None else []
        sink.kept.update((part.id, None) for part in parts)
        into = [buffer_of(a) for a in beside] or [buffer_of(view) for part in parts for view in sink.views(part)]
        answer = self._endpoint.call(message, into=into).wait(self._wait_seconds)
        assert isinstance(answer, Pulled)
        for part, array in zip(parts, beside, strict=False):
            copy(scattered(array, sink.views(part)))
        sink.filled(parts)
        for part, version in zip(parts, answer.versions, strict=True):
            sink.kept[part.id] = landed(version, answer.clocks)
        return answer.versions

    def buffer(self, slot: int, part: Slice) -> Bytes:
        """Where a slice lands over the socket while the model computes on."""
        key = (slot, part.id)
        if key not in self._landing:
            self._landing[key] = np.empty(part.num_bytes, np.uint8)
        return self._landing[key]

    def close(self) -> None:
        for memory in self._blocks.values():
            memory.close()
        self._blocks.clear()
