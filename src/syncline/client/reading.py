"""Reading one server's parameters: from its shared memory, never torn, or over the socket.

In shared memory a copy is optimistic: it counts if the server says afterwards that nothing was written meanwhile.
After two such copies of a slice have been overtaken, the slice is pinned for the third.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from syncline.client.arrays import Bytes
from syncline.client.copying import copy
from syncline.client.sinks import Sink, scattered
from syncline.core.layout import Segment, Slice
from syncline.core.messages import Map, Pin, Pull, Pulled, Unpin, Verified, Verify
from syncline.errors import ProtocolError
from syncline.net.rpc import Endpoint
from syncline.net.transport import Memory, buffer_of

OPTIMISTIC_COPIES = 2


class ServerReader:
    """What a worker can see of one server's parameters."""

    def __init__(self, endpoint: Endpoint, wait_seconds: float) -> None:
        self._endpoint, self._wait_seconds = endpoint, wait_seconds
        self._mapped: dict[int, Memory] = {}
        self._landing: dict[tuple[int, int], Bytes] = {}  # slot, slice
        self.change = threading.Condition()  # a part of an answer has come

    def map(self, segment: Segment) -> None:
        """Maps the server's parameters of a segment, if it is on this host and can share them."""
        if not self._endpoint.shares_memory:
            return
        call = self._endpoint.call(Map(segment.index))
        try:
            call.wait(self._wait_seconds)
        except ProtocolError:
            return  # it could not get shared memory, and has said so: the socket it is
        if call.attachment is None:
            raise ProtocolError(f"{self._endpoint.peer} gave no memory for segment {segment.index}")
        self._mapped[segment.index] = call.attachment

    def maps(self, part: Slice) -> bool:
        return part.segment in self._mapped

    def source(self, part: Slice) -> Bytes:
        """The slice in the server's own memory."""
        array: Bytes = self._mapped[part.segment].array
        return array[part.host_offset : part.host_offset + part.num_bytes]

    def mapped(self) -> list[Bytes]:
        """All of the server's memory that is mapped here."""
        return [memory.array for memory in self._mapped.values()]

    # -- shared memory ------------------------------------------------------------------------------------

    def _copy(self, parts: Sequence[Slice], sink: Sink) -> None:
        copy([pair for part in parts for pair in scattered(self.source(part), sink.views(part))])

    def copy_verified(self, parts: Sequence[Slice], versions: Sequence[int], sink: Sink) -> list[int]:
        """Copies slices that had these versions, while others may write them; what was torn is copied again."""
        if not parts:
            return []
        self._copy(parts, sink)
        known = dict(zip((part.id for part in parts), versions, strict=True))
        by_id = {part.id: part for part in parts}
        stale = list(by_id)
        for attempt in range(OPTIMISTIC_COPIES):
            if attempt:
                self._copy([by_id[number] for number in stale], sink)
            answer = self._ask(Verify(stale, [known[number] for number in stale]))
            assert isinstance(answer, Verified)
            stale = answer.stale
            known.update(zip(stale, answer.versions, strict=True))
            if not stale:
                break
        for number in stale:
            known[number] = self._copy_pinned(by_id[number], sink)
        sink.filled(parts)
        return [known[part.id] for part in parts]

    def _copy_pinned(self, part: Slice, sink: Sink) -> int:
        answer = self._ask(Pin([part.id]))
        assert isinstance(answer, Pulled)
        self._copy([part], sink)
        self._ask(Unpin([part.id]))
        return answer.versions[0]

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
            found = self.copy_verified(shared, answer.versions, sink)
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
        into = [buffer_of(a) for a in beside] or [buffer_of(view) for part in parts for view in sink.views(part)]
        answer = self._endpoint.call(message, into=into).wait(self._wait_seconds)
        assert isinstance(answer, Pulled)
        for part, array in zip(parts, beside, strict=False):
            copy(scattered(array, sink.views(part)))
        sink.filled(parts)
        return answer.versions

    def buffer(self, slot: int, part: Slice) -> Bytes:
        """Where a slice lands over the socket while the model computes on."""
        key = (slot, part.id)
        if key not in self._landing:
            self._landing[key] = np.empty(part.num_bytes, np.uint8)
        return self._landing[key]

    def close(self) -> None:
        for memory in self._mapped.values():
            memory.close()
        self._mapped.clear()
