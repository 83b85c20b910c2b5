"""Reducers without servers: participants that connect to each other inside one process, and stage plain arrays."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from tests.patience import PATIENCE

from syncline.core.layout import Parameter, Segment, Slice, arrange, place
from syncline.core.members import Member
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import HostLeaders
from syncline.core.rule import Rule
from syncline.core.wire.traffic import ShareSums
from syncline.net.memory import HeapMemory, pair
from syncline.net.reliable_send import Partner
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Peer
from syncline.reduce.hierarchical import HierarchicalReducer, HierarchicalReducers
from syncline.reduce.rounds import Round
from syncline.reduce.slices import Contribution, SliceReduction

DTYPES = ("float32", "float64", "int64", "int16")
PUSHED = ((0, len(DTYPES)),)


class Group:
    """Servers on these hosts, all with all slices of one segment."""

    def __init__(self, on: Sequence[str], num_items: int = 40, slice_bytes: int = 256) -> None:
        self.hosts = {f"server-{rank}": host for rank, host in enumerate(on)}
        parameters = [Parameter(dtype, dtype, (num_items,)) for dtype in DTYPES]
        segment, primaries = place(arrange(parameters, [Rule("Add")], "mean"), list(self.hosts), {}, slice_bytes, 0)
        self.segment: Segment = segment
        replica_sets = {
            each.slice: ReplicaSet(each.slice, each.primary, tuple(n for n in self.hosts if n != each.primary))
            for each in primaries
        }
        self.host_leaders = HostLeaders(replica_sets, self.hosts)
        self.servers = {name: PlainServer(self, name) for name in self.hosts}

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self.servers.values():
            server.close()

    def begin(self, generation: int) -> list[HierarchicalReducer]:
        found = []
        for server in self.servers.values():
            reducer = server.reducers.begin(generation, list(self.hosts))
            assert reducer is not None
            reducer.supplied()
            found.append(reducer)
        return found

    def gradients(self, rank: int, clock: int) -> dict[int, Any]:
        """Of one worker, by slice."""
        found = {}
        for part in self.segment.slices:
            random = np.random.default_rng([rank, clock, part.id])
            size = part.num_bytes // np.dtype(part.dtype).itemsize
            found[part.id] = random.integers(0, 9, size).astype(part.dtype)
        return found

    def round_of(self, clock: int, weights: Sequence[float]) -> Round:
        contributions = []
        for rank, weight in enumerate(weights):
            gradients = self.gradients(rank, clock)

            def numbers(part: Slice, gradients: dict[int, Any] = gradients) -> Any:
                return gradients[part.id]

            contributions.append(Contribution(f"worker-{rank}", 1, clock, weight, PUSHED, numbers))
        return Round(
            contributions=tuple(contributions), skip=False, is_early=False, is_edited=False,
            summed=lambda sums: None, failed=fail,
        )  # fmt: skip

    def mean(self, clock: int, weights: Sequence[float]) -> dict[int, Any]:
        """What the sums must come to, by slice."""
        found = {}
        for part in self.segment.slices:
            each = [w * self.gradients(rank, clock)[part.id].astype(np.float64) for rank, w in enumerate(weights)]
            exact = sum(each) / sum(weights)
            found[part.id] = exact if part.dtype.startswith("float") else np.rint(exact).astype(part.dtype)
        return found


def fail(error: Exception) -> None:
    raise AssertionError(f"the round failed: {error!r}")


class PlainServer:
    """A participant, and the service that its messages go to."""

    device = "cpu"

    def __init__(self, group: Group, name: str) -> None:
        self._group, self.name = group, name
        self.num_slices, self.num_servers = len(group.segment.slices), len(group.hosts)
        self._slices = {part.id: SliceReduction(group.segment, part) for part in group.segment.slices}
        self._partners: dict[str, Partner] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"pool of {name}", daemon=True)
        self._thread.start()
        self.reducers = HierarchicalReducers(self)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def close(self) -> None:
        if self.reducers.current is not None:
            self.reducers.current.close()
        self.reducers.close()
        for partner in self._partners.values():
            partner.close()
        self._tasks.put(None)
        self._thread.join(PATIENCE)

    # -- as a participant ---------------------------------------------------------------------------------

    def find(self, number: int) -> SliceReduction:
        return self._slices[number]

    def slices(self) -> list[SliceReduction]:
        return list(self._slices.values())

    def has_all(self) -> bool:
        return True

    def members(self, names: Collection[str]) -> list[Member]:
        return [Member(name, "server", 1, self._group.hosts[name]) for name in names]

    def partners(self, names: Collection[str]) -> list[Partner]:
        for member in self.members([name for name in names if name != self.name and name not in self._partners]):
            self._partners[member.name] = Partner(
                member, self._dial, is_of_our_kind=True, submit=self.submit, log=lambda line: None
            )
        return [self._partners[name] for name in names if name != self.name]

    def _dial(self, member: Member) -> Endpoint:
        near, far = pair(Peer("server", self.name, 0), Peer("server", member.name, 0))
        near.shares_memory = far.shares_memory = self._group.hosts[self.name] == member.host
        Endpoint(far, Stamp("job"), self._group.servers[member.name])
        return Endpoint(near, Stamp("job"))

    def host_leaders(self) -> HostLeaders:
        return self._group.host_leaders

    def create_memory(self, num_bytes: int) -> HeapMemory:
        return HeapMemory(num_bytes)

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def at_work(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def settle(self) -> None:
        pass

    # -- as a service -------------------------------------------------------------------------------------

    def buffers_for(self, peer: Peer, message: Any, payload_bytes: int) -> Any:
        return self.reducers.buffers_for(peer, message)

    def handle(self, request: Request) -> None:
        message: Any = request.message
        if isinstance(message, ShareSums):
            self.reducers.share(request, message)
        else:
            self.reducers.receive(request, message)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        pass
