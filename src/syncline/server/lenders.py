"""What primaries on this host lend their backups here: the memory that updates lie in."""

from __future__ import annotations

import threading
from collections.abc import Container
from typing import NamedTuple

from syncline.core.layout import Slice
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import Seed, ShareRegion
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.net.transport import Memory, Peer
from syncline.server.blocks import Blocks
from syncline.server.replication import Region


class Lent(NamedTuple):
    """One primary's memory, by its number, and the block of ours for the slices that it will seed."""

    number: int
    memory: Memory
    block: int


class Lenders:
    """By primary."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._lent: dict[str, Lent] = {}
        self._lock = threading.Lock()

    def lend(self, request: Request, message: ShareRegion) -> None:
        """The primary's memory, and as much of ours for the slices that are to come."""
        memory = request.attachment
        if memory is None or memory.array.nbytes < message.num_bytes:
            raise ProtocolError(f"{request.peer} lends memory that did not come")
        block = self._blocks.make(message.num_bytes)
        with self._lock:
            before = self._lent.get(request.peer.name)
            self._lent[request.peer.name] = Lent(message.number, memory, block)
        if before is not None:
            self._blocks.let_go(before.block)
        request.reply(Done())

    def find(self, peer: Peer, number: int) -> Lent:
        with self._lock:
            known = self._lent.get(peer.name)
        if known is None or known.number != number:
            raise ProtocolError(f"{peer} names memory {number}, which it has not lent")
        return known

    def region(self, peer: Peer, message: Seed, part: Slice) -> Region:
        """Where this slice's updates will lie."""
        assert message.lent is not None
        memory = self.find(peer, message.lent).memory
        view = memory.array[message.offset : message.offset + part.num_bytes]
        if view.nbytes != part.num_bytes or message.offset < 0:
            raise ProtocolError(f"{peer} names a place outside of what it has lent")
        return Region(view, part.dtype, memory)

    def forget_but(self, there: Container[str]) -> None:
        with self._lock:
            gone = [self._lent.pop(name) for name in list(self._lent) if name not in there]
        for lent in gone:
            self._blocks.let_go(lent.block)
