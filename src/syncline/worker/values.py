"""Parameters' values to and from the servers, outside of commits: the chief's first ones, and pulls."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from syncline.core.layout import Segment, Slice
from syncline.core.wire.traffic import Upload
from syncline.net.rpc import Call, wait_all
from syncline.net.transport import buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.placement import Placement
from syncline.worker.sinks import Sink

_MOST_OPEN = 16


def upload(placement: Placement, segment: Segment, values: Bytes, seconds: float, *, again: bool = False) -> None:
    """The chief's values of a whole segment."""
    # Few are open at a time: answers that nobody reads yet would fill the socket, and stop the server.
    calls: collections.deque[Call] = collections.deque()
    for part in segment.slices:
        view = values[part.offset : part.offset + part.num_bytes]
        endpoint = placement.endpoints[placement.primaries[part.id]]
        message = Upload(segment.index, [part.id], again)
        calls.append(endpoint.call(message, buffers=[buffer_of(view)], payload_bytes=view.nbytes))
        if len(calls) >= _MOST_OPEN:
            wait_all([calls.popleft()], seconds)
    wait_all(list(calls), seconds)


def pull(placement: Placement, slices: Sequence[Slice], sink: Sink, min_version: int | None) -> list[int]:
    """Slices into the sink; their versions."""
    versions: dict[int, int] = {}
    for server, reader in placement.readers.items():
        parts = [part for part in slices if placement.source(part.id) == server]
        if parts:
            found = reader.pull(parts, sink, min_version)
            versions.update(zip((part.id for part in parts), found, strict=True))
    return [versions[part.id] for part in slices]
