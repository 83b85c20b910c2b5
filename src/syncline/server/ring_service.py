"""A server's ring: its votes, its reducer, and the messages between its servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from syncline.config import JobConfig
from syncline.core.ring import Spread
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import GroupStoreKey, HostSum, ShareSums, Vote, WholeSum
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer
from syncline.reduce.hierarchical import HierarchicalReducers
from syncline.reduce.reducer import ReducerFactory
from syncline.server.commits import Commits
from syncline.server.hosting import Hosting
from syncline.server.pool import Pool
from syncline.server.ring import Spreading, Voting
from syncline.server.ring_sums import RingParticipant, RingReducer

if TYPE_CHECKING:
    from syncline.reduce.process_group import ProcessGroupReducers


class Ring:
    """One server's part in its ring."""

    def __init__(self, config: JobConfig, commits: Commits, hosting: Hosting, pool: Pool, spread: Spread) -> None:
        flow = commits.flow
        spreading = Spreading(spread, commits.staging.copies, hosting, fail=flow.fail)
        self.voting = voting = Voting(
            hosting.name, flow.state_lock, hosting.backups, pool,
            partners=hosting.partners_named, run=flow.drain_all, waits=flow.waits,
            resumes=flow.resumes, may_apply=lambda work: commits.admission_queue.may_apply(work.commits),
            spreading=spreading,
        )  # fmt: skip
        flow.enter_ring(voting)
        commits.admission_queue.enter_ring(voting)
        self.group_reducers: ProcessGroupReducers | None = None  #: sums by torch.distributed
        self.host_reducers: HierarchicalReducers | None = None  #: sums by host
        participant = RingParticipant(config, hosting, pool)
        factory: ReducerFactory
        if config.has_process_group:
            # Imports torch.distributed, which some builds of torch lack.
            from syncline.reduce.process_group import ProcessGroupReducers

            factory = self.group_reducers = ProcessGroupReducers(config, participant)
        else:
            factory = self.host_reducers = HierarchicalReducers(participant)
        voting.summing = RingReducer(factory, commits, voting, hosting)


def ring_handlers(ring: Callable[[], Ring | None]) -> dict[type[Message], Callable[[Request, Any], None]]:
    """Handlers for messages between servers of a ring."""

    def vote(request: Request, message: Vote) -> None:
        known = ring()
        if known is None or request.peer.role != "server":
            raise ProtocolError(f"{request.peer} votes; only servers of a ring do")
        known.voting.hear(request, message)

    def store_key(request: Request, message: GroupStoreKey) -> None:
        known = ring()
        if known is None or known.group_reducers is None or request.peer.role != "server":
            raise ProtocolError(f"{request.peer} sends a key of a process group; only servers with one do")
        known.group_reducers.receive(request, message)

    return {
        Vote: vote,
        GroupStoreKey: store_key,
        ShareSums: lambda request, message: _hierarchical(ring(), request.peer).share(request, message),
        HostSum: lambda request, message: _hierarchical(ring(), request.peer).receive(request, message),
        WholeSum: lambda request, message: _hierarchical(ring(), request.peer).receive(request, message),
    }


def buffers_for_sum(ring: Ring | None, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
    return _hierarchical(ring, peer).buffers_for(peer, message)


def _hierarchical(ring: Ring | None, peer: Peer) -> HierarchicalReducers:
    if ring is None or ring.host_reducers is None or peer.role != "server":
        raise ProtocolError(f"{peer} gives sums; only servers of a ring do, that add up themselves")
    return ring.host_reducers
