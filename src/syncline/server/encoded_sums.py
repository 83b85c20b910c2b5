"""Sums that the primary of a ring sends to other servers, encoded (`--pull-codec`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from syncline.core.codecs.pieces import Encoded, SliceCoder
from syncline.core.layout import Segment, Slice
from syncline.core.wire.traffic import Replicate
from syncline.errors import FrameError
from syncline.net.transport import Buffer, buffer_of

if TYPE_CHECKING:
    pass


Bytes = npt.NDArray[np.uint8]
Find = Callable[[int], tuple[Segment, Slice]]


def encode_sum(coder: SliceCoder, segment: Segment, part: Slice, has: Sequence[int], data: Bytes) -> Encoded:
    """Encodes the pieces `has` of a sum in place: afterwards `data` holds what the receivers will decode."""
    pieces = segment.pieces(part)
    encoded = coder.encode(segment, part, data, {pieces[index].parameter for index in has})
    coder.decode(segment, part, encoded, data)
    return encoded


class SumDecoder:
    """Decodes sums at the receiving server."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self.coder: SliceCoder | None = None

    def room(self, message: Replicate) -> list[Buffer]:
        """Receive buffers for an encoded sum. Invalid sizes are refused before anything is allocated."""
        return [buffer_of(array) for array in self._checked(message).room(*self._find(message.slice), message.sizes)]

    def decode(self, message: Replicate, payload: Sequence[Buffer], out: Bytes) -> None:
        """Decodes into slice-shaped memory."""
        coder = self._checked(message)
        if len(payload) != sum(size > 0 for size in message.sizes):
            raise FrameError(f"an encoded sum of slice {message.slice} is announced, and its bytes did not come")
        came = [np.frombuffer(buffer, np.uint8) for buffer in payload]
        coder.decode(*self._find(message.slice), Encoded(list(message.sizes), came), out)

    def _checked(self, message: Replicate) -> SliceCoder:
        if self.coder is None or message.codec != self.coder.codec.name:
            has = self.coder.codec.name if self.coder is not None else "none"
            raise FrameError(f"a sum encoded by {message.codec[:40]!r}; the codec of this job's sums: {has}")
        return self.coder
