"""Where staged bytes are read. Those that come encoded are checked first, and decoded into the staging memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from syncline.core.codecs.pieces import Encoded, SliceCoder
from syncline.core.layout import Segment, Slice
from syncline.core.rule import Option, RuleSpec, check_rule
from syncline.core.wire.traffic import Stage
from syncline.errors import FrameError, ProtocolError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.server.hosted import HostedSlice
from syncline.server.staging import Staging


class Decoding:
    """Of all workers' pushes. What is not for here, or not to be taken, is read all the same and goes nowhere."""

    def __init__(
        self,
        slices: Mapping[int, HostedSlice],
        staging: Staging,
        find: Callable[[int], tuple[Segment, Slice]],
        is_taken: Callable[[Peer], bool],
    ) -> None:
        self._slices, self._staging, self._find, self._is_taken = slices, staging, find, is_taken
        self.coder: SliceCoder | None = None  # with --codec
        self.takes_all = (
            False  # with a circle, or a relay in this generation: also for slices whose primaries are elsewhere
        )

    def landing(self, peer: Peer, message: Stage) -> Sequence[Buffer]:
        """Memory for the bytes behind this message; none is allocated for sizes that cannot be."""
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
        """Of the pieces of each slice; none: it comes as it lies."""
        if not message.codec:
            return [()] * len(message.slices)
        if self.coder is None or message.codec != self.coder.codec.name:
            has = self.coder.codec.name if self.coder is not None else "none"
            raise FrameError(f"{peer} encodes by {message.codec[:40]!r}; the codec of this job: {has}")
        if len(message.sizes) != len(message.slices):
            raise FrameError(f"{peer} gives sizes of {len(message.sizes)} slices, and {len(message.slices)} slices")
        return message.sizes

    def decode(self, request: Request, message: Stage) -> bool:
        """What has come encoded. False, and the connection is closed, where it is none."""
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
                next(buffers)  # it lies where it belongs
                continue
            assert self.coder is not None
            came = [np.frombuffer(next(buffers), np.uint8) for size in sizes if size > 0]
            target = self._target(request.peer, message, number)
            if target is not None:
                out = np.frombuffer(target, np.uint8)
                self.coder.decode(*self._find(number), Encoded(list(sizes), came), out)


def check_stage(peer: Peer, message: Stage, segments: Mapping[int, Segment]) -> None:
    """What a worker says of a commit, before anything is made of it."""
    if not (math.isfinite(message.weight) and message.weight >= 0):
        raise ProtocolError(f"{peer} pushes with weight {message.weight}; it must be a number from 0 on")
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
    """Hyperparameters that travel with a commit are held to the same rules as registered ones."""
    if known is not None:
        if not 0 <= group < len(known.rules):
            raise ProtocolError(f"{peer} names rule {group} of segment {segment}")
        check_rule(RuleSpec(known.rules[group].name, options))
