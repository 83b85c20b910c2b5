"""A server's ring: its votes, its reducer, and the messages between its servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from syncline.config import JobConfig
from syncline.core.ring import Spread, partner_of
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import GroupStoreKey, HostSum, ShareSums, Vote, WholeSum
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer
from syncline.server.commits import Commits
from syncline.server.hosting import Hosting
from syncline.server.pool import Pool
from syncline.server.reduce.hierarchical import HierarchicalReducers
from syncline.server.reduce.reducer import Reducers, RingReducer
from syncline.server.ring import Spreading, Voting

if TYPE_CHECKING:
    from syncline.server.reduce.hierarchical import HierarchicalReducers
    from syncline.server.reduce.process_group import ProcessGroupReducers
    from syncline.server.reduce.reducer import Reducers, RingReducer


class Ring:
    """One server's part in its ring."""

    def __init__(self, config: JobConfig, commits: Commits, hosting: Hosting, pool: Pool, spread: Spread) -> None:
        flow = commits.flow
        spreading = Spreading(spread, commits.staging.copies, hosting, fail=flow.fail)
        self.voting = voting = Voting(
            hosting.name, flow.state_lock, hosting.backups, pool,
            partners=hosting.partners_named, run=flow.drain_all, waits=flow.waits,
            resumes=flow.resumes, may_apply=lambda work: commits.holding.may_apply(work.commits),
            spreading=spreading,
        )  # fmt: skip
        flow.enter_ring(voting)
        commits.holding.enter_ring(voting)
        self.group_reducers: ProcessGroupReducers | None = None  #: sums by torch.distributed
        self.host_reducers: HierarchicalReducers | None = None  #: sums by host
        adders: Reducers
        if config.has_process_group:
            from syncline.server.reduce.process_group import (
                ProcessGroupReducers,  # imports torch.distributed, which not every build of torch has
            )

            adders = self.group_reducers = ProcessGroupReducers(config, hosting)
            own, departures = partner_of(hosting.name), commits.departures
            departures.stage_by(lambda worker: departures.staged_here(worker) if worker == own else ())
            commits.decoding.takes_all = True
        else:
            adders = self.host_reducers = HierarchicalReducers(config, commits, hosting, pool)
        voting.summing = RingReducer(adders, flow, voting, hosting.backups)


def ring_handlers(ring: Callable[[], Ring | None]) -> dict[type[Message], Callable[[Request, Any], None]]:
    """Handlers for messages between servers of a ring."""

    def vote(request: Request, message: Vote) -> None:
        known = ring()
        if known is None or request.peer.role != "server":
            raise ProtocolError(f"{request.peer} votes; only servers of a ring do")
        known.voting.hear(request, message)

    def introduction(request: Request, message: GroupStoreKey) -> None:
        known = ring()
        if known is None or known.group_reducers is None or request.peer.role != "server":
            raise ProtocolError(f"{request.peer} introduces itself; only servers of a process group do")
        known.group_reducers.hear(request, message)

    return {
        Vote: vote,
        GroupStoreKey: introduction,
        ShareSums: lambda request, message: _relays(ring(), request.peer).lend(request, message),
        HostSum: lambda request, message: _relays(ring(), request.peer).hear(request, message),
        WholeSum: lambda request, message: _relays(ring(), request.peer).hear(request, message),
    }


def buffers_for_sum(ring: Ring | None, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
    return _relays(ring, peer).buffers_for(peer, message)


def _relays(ring: Ring | None, peer: Peer) -> HierarchicalReducers:
    if ring is None or ring.host_reducers is None or peer.role != "server":
        raise ProtocolError(f"{peer} gives sums; only servers of a ring do, that add up themselves")
    return ring.host_reducers
