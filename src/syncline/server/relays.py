"""How a server comes to the relays of its ring, one for each generation in which sums go by host leaders."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import numpy as np

from syncline.config import JobConfig
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import HostSum, ShareSums, WholeSum
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.server.commits import Commits
from syncline.server.hosting import Hosting
from syncline.server.pool import Pool
from syncline.server.relay import Relay, wide_bytes
from syncline.server.rules import Bytes
from syncline.server.summing import Failed, Summed

#: Generations that others may be ahead of us, and of which something is kept.
_MOST_AHEAD = 4
Lent = dict[int, Bytes]


class Relays:
    """Of one server."""

    what = "the servers"

    def __init__(self, config: JobConfig, commits: Commits, hosting: Hosting, pool: Pool) -> None:
        self._config, self._commits, self._hosting, self._pool = config, commits, hosting, pool
        self._lock = threading.Lock()
        self._generation = 0
        self._relay: Relay | None = None
        self._lent: dict[int, dict[str, Lent]] = {}  # by generation and neighbour: where its sums lie
        self._early: list[tuple[int, Request]] = []  # of generations that others have begun before us

    def begin(self, generation: int, names: Sequence[str], summed: Summed, failed: Failed) -> Relay | None:
        host_leaders = self._hosting.deputies_by(self._config) if self._hosting.name in names else None
        relay: Relay | None = None
        for slot in self._hosting.copies():
            slot.rules.forget_staged()  # regions of the generation before
        with self._lock:
            self._generation = generation
            self._lent = {number: lent for number, lent in self._lent.items() if number >= generation}
            if host_leaders is not None:
                lent = self._lent.setdefault(generation, {})
                relay = Relay(
                    generation, names, host_leaders, self._hosting, self._pool,
                    lent=lambda sender: lent.get(sender, {}), summed=summed, failed=failed,
                )  # fmt: skip
            early = [request for number, request in self._early if number == generation]
            self._early = [(number, request) for number, request in self._early if number > generation]
            self._relay = relay
        if relay is not None:
            relay.keep(early)
        else:
            for request in early:
                self._pool.submit(functools.partial(request.reply, Done()))  # as for what comes from now on
        departures, self._commits.decoding.takes_all = self._commits.departures, relay is not None
        departures.staged_by = relay.staged_by if relay is not None else departures.staged_here
        return relay

    def lend(self, request: Request, message: ShareSums) -> None:
        """A neighbour's memory: kept for as long as its generation lasts."""
        memory = request.attachment
        if memory is None or memory.array.nbytes < message.num_bytes:
            raise ProtocolError(f"{request.peer} lends memory that did not come")
        found: Lent = {}
        for number, offset in message.places:
            size = self._hosting.find(number)[1].num_bytes
            view = memory.array[offset : offset + size]
            if offset < 0 or view.nbytes != size:
                raise ProtocolError(f"{request.peer} names a place outside of what it has lent")
            found[number] = view
        with self._lock:
            if self._is_near(message.generation):
                self._lent.setdefault(message.generation, {})[request.peer.name] = found
        request.reply(Done())

    def _is_near(self, generation: int) -> bool:
        return self._generation <= generation and len({*self._lent, generation}) <= _MOST_AHEAD

    def landing(self, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
        """Where the bytes of a sum go; what is of another generation goes nowhere, or waits."""
        relay = self._relay
        if relay is not None and relay.generation == message.generation:
            return relay.landing(peer, message)
        segment, part = self._hosting.find(message.slice)
        size = wide_bytes(segment, part) if isinstance(message, HostSum) else part.num_bytes
        return [buffer_of(np.empty(size, np.uint8))]

    def hear(self, request: Request, message: HostSum | WholeSum) -> None:
        generation = message.generation
        with self._lock:
            relay = self._relay
            is_early = generation > self._generation
            if is_early:
                if len(self._early) >= _MOST_AHEAD * (1 + self._hosting.num_slices) * len(self._hosting.servers()):
                    raise ProtocolError(f"{request.peer} gives sums of generations that nobody knows")
                self._early.append((generation, request))
        if is_early:
            return
        if relay is None or generation < relay.generation:
            request.reply(Done())
        else:
            relay.hear(request, message)

    def close(self) -> None:
        with self._lock:
            self._relay, self._early = None, []
