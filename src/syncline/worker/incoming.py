"""Encoded slices of an answer, between the wire and their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from syncline.core.codecs.pieces import Encoded, SliceCoder
from syncline.core.layout import Layout, Slice
from syncline.core.wire.traffic import Committed
from syncline.errors import FrameError
from syncline.net.transport import Buffer, buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.copying import copy
from syncline.worker.sinks import scattered


def sizes_of(answer: Committed, incoming: Incoming | None) -> Sequence[Sequence[int]]:
    """Of the pieces of each slice in this answer; none: it comes as it lies. Checked as far as the message goes."""
    if not answer.codec:
        return [()] * len(answer.slices)
    if incoming is None or answer.codec != incoming.codec:
        raise FrameError(f"an answer encoded by {answer.codec[:40]!r}, which was not asked for")
    if len(answer.sizes) != len(answer.slices):
        raise FrameError(f"sizes of {len(answer.sizes)} slices, and {len(answer.slices)} slices")
    return answer.sizes


class Incoming:
    """Of one commit, from one server."""

    def __init__(self, coder: SliceCoder, layout: Layout) -> None:
        self._coder, self._layout = coder, layout
        self._encoded: dict[int, Encoded] = {}

    @property
    def codec(self) -> str:
        return self._coder.codec.name

    def room(self, part: Slice, sizes: Sequence[int]) -> list[Buffer]:
        """Where the bytes of a slice go until they are decoded; nothing is allocated for sizes that cannot be."""
        buffers = self._coder.room(self._layout.segments[part.segment], part, sizes)
        self._encoded[part.id] = Encoded(list(sizes), buffers)
        return [buffer_of(buffer) for buffer in buffers]

    def heard(self, answer: Committed, parts: Mapping[int, Slice]) -> None:
        """The answer is here: of these slices, those without a single byte have come, too."""
        for number, sizes in zip(answer.slices, sizes_of(answer, self), strict=True):
            part = parts.get(number)
            if sizes and part is not None and part.id not in self._encoded:
                if any(size > 0 for size in sizes):
                    raise FrameError(f"slice {number} is announced, and did not come")
                self.room(part, sizes)

    def has(self, part: Slice) -> bool:
        """Whether this slice has come encoded; if not, it lies in its place already."""
        return part.id in self._encoded

    def unpack(self, part: Slice, targets: Sequence[Bytes]) -> None:
        """Into buffers that together take the slice's bytes."""
        encoded = self._encoded.pop(part.id)
        whole = targets[0] if len(targets) == 1 else np.empty(part.num_bytes, np.uint8)
        self._coder.decode(self._layout.segments[part.segment], part, encoded, whole)
        if len(targets) != 1:
            copy(scattered(whole, targets))
