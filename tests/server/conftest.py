"""Servers played directly: the test is their coordinator, their workers and, if it likes, one of the servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.config import JobConfig
from syncline.core.layout import ITEM_BYTES, Parameter, Segment, Slice, to_ranges
from syncline.core.members import Member, Standing
from syncline.core.reconfigure import Reconfiguration
from syncline.core.registry import Registry
from syncline.core.replica_sets import ReplicaSet, without
from syncline.core.rounds import RoundMembership
from syncline.core.rule import RuleSpec
from syncline.core.wire.control import Host, Joined, Prepared, SeedTo
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import CommitStaged, Stage, Upload
from syncline.errors import ConnectionLost
from syncline.net import memory
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Call, Endpoint, Stamp
from syncline.net.transport import Peer, buffer_of
from syncline.server.pool import InlinePool, ThreadPool
from syncline.server.service import Server
from syncline.server.storage import SliceStorage

WAIT = PATIENCE
Values = Mapping[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def process_groups_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To connect; less than a thread may outlast its test, since one that connects to the dead is not to be ended."""
    monkeypatch.setattr("syncline.reduce.process_group.CONNECT_SECONDS", 45.0)


def eventually(what: Callable[[], object], seconds: float = WAIT) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.001)


class Worker:
    """One incarnation of a worker, with a connection to every server."""

    def __init__(self, house: House, name: str, incarnation: int) -> None:
        self.house, self.name, self.incarnation = house, name, incarnation
        self.stamp = Stamp("job")
        self.stamp.incarnation, self.stamp.generation = incarnation, house.generation
        self.endpoints: dict[str, Endpoint] = {}
        self.phase = 0

    def to(self, server: str) -> Endpoint:
        known = self.endpoints.get(server)
        if known is None or not known.is_open:
            peers = Peer("worker", self.name, self.incarnation), Peer("server", server, 0)
            known = self.endpoints[server] = self.house.connect(*peers, self.stamp, server)
        return known

    def ask(self, server: str, message: Message, **rest: Any) -> Call:
        return self.to(server).call(message, **rest)

    def stage(self, server: str, clock: int, grads: Values, *, commit: bool = False, **rest: Any) -> Call:
        """Stages the gradient of all slices of which this server is the primary."""
        buffers, numbers = [], []
        for part in self.house.parts(server):
            numbers.append(part.id)
            buffers.append(
                buffer_of(self.house.flat(grads, part.segment)[part.offset : part.offset + part.num_bytes])
            )
        pushed = to_ranges(self.house.id_of(name) for name in grads)
        fields: dict[str, Any] = {
            "weight": 1.0, "skip": False, "clip_norm": None, "overrides": [], "back_at": None, "pull": [], **rest,
        }  # fmt: skip
        message = Stage(clock=clock, phase=self.phase, slot=0, pushed=pushed, slices=numbers, commit=commit, **fields)
        return self.ask(server, message, buffers=buffers, payload_bytes=sum(map(len, buffers)))

    def commit(self, server: str, clock: int, grads: Values, **rest: Any) -> Call:
        return self.stage(server, clock, grads, commit=True, **rest)

    def commit_staged(self, server: str, clock: int, round_membership: RoundMembership | None = None) -> Call:
        return self.ask(server, CommitStaged(clock, [], round_membership=round_membership))

    def commit_all(self, clock: int, grads: Values, **rest: Any) -> list[Call]:
        return [self.commit(server, clock, grads, **rest) for server in self.house.primaries()]

    def vanish(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close("killed")


class House:
    """Some servers, and everything around them."""

    def __init__(
        self,
        servers: int = 1,
        workers: int = 2,
        *,
        policy: str = "sync",
        replicas: int = 1,
        slice_bytes: int = 64,
        hold_seconds: float = PATIENCE,
        threads: int = 2,
        storage: SliceStorage | None = None,
        lends: bool = True,
    ) -> None:
        self.generation, self.incarnations = 1, 0
        self.lines: list[str] = []
        self.broken: list[Exception] = []
        self.config = JobConfig(workers=workers, servers=servers, policy=policy, replicas=replicas)
        self.members = [self.member("server", k) for k in range(servers)]
        self.members += [self.member("worker", k) for k in range(workers)]
        self.servers: dict[str, Server] = {}
        self._coordinators: dict[str, Endpoint] = {}
        self.registry = Registry([f"server-{k}" for k in range(servers)], slice_bytes)
        self.between: list[Endpoint] = []  # servers' connections to each other
        self.refuses_dials = False
        self.dial_instead: Callable[[Member], Endpoint | None] = lambda target: None  # None: the house dials
        self._hold_seconds, self._threads, self._storage, self._lends = hold_seconds, threads, storage, lends
        for member in [m for m in self.members if m.role == "server"]:
            self.start(member)
        self.workers = {m.name: Worker(self, m.name, m.incarnation) for m in self.members if m.role == "worker"}

    def member(self, role: str, number: int) -> Member:
        self.incarnations += 1
        return Member(f"{role}-{number}", role, self.incarnations, "here", None, self.generation, "kind")

    def start(self, member: Member, *, late: bool = False) -> Server:
        stamp = Stamp("job")
        stamp.incarnation = member.incarnation

        def dial(target: Member) -> Endpoint:
            if (given := self.dial_instead(target)) is not None:
                return given
            if self.refuses_dials or target.name not in self.servers:
                raise ConnectionLost(f"{target.name} does not answer")
            here, there = Peer("server", member.name, member.incarnation), Peer("server", target.name, 0)
            endpoint = self.connect(here, there, stamp, target.name)
            endpoint.shares_memory = self._lends
            self.between.append(endpoint)
            return endpoint

        pool = ThreadPool(self.broken.append, self._threads) if self._threads else InlinePool()
        server = Server(
            member.name, pool, create_memory=HeapMemory, log=self.lines.append, over=lambda over: None,
            dial=dial, hold_seconds=self._hold_seconds, storage=self._storage,
        )  # fmt: skip
        self.servers[member.name] = server
        server.form(Joined(member.incarnation, self.generation, self.members, self.config, late))
        server.snapshot_barrier().barrier_seconds = PATIENCE  # a test that waits it out sets its own
        peers = Peer("coordinator", "coordinator", 0), Peer("server", member.name, 0)
        self._coordinators[member.name] = self.connect(*peers, Stamp("job"), member.name)
        return server

    def connect(self, one: Peer, two: Peer, stamp: Stamp, server: str) -> Endpoint:
        left, right = memory.pair(one, two)
        theirs = Stamp("job")
        self.servers[server].greet(Endpoint(right, theirs, self.servers[server]))
        return Endpoint(left, stamp)

    # -- the layout ---------------------------------------------------------------------------------------

    def register(self, values: Values, rule: str = "SGD", reduce: str = "sum", **options: Any) -> Segment:
        """Registers, hosts and uploads these values."""
        parameters = [Parameter(n, str(v.dtype), v.shape) for n, v in values.items()]
        options = options or ({"lr": 1.0} if rule == "SGD" else {})
        ordinal = len(self.registry.layout.segments)
        decision = self.registry.register("worker-0", True, ordinal, parameters, [RuleSpec(rule, options)], reduce)
        segment = decision.segment
        assert segment is not None
        self.sync_replica_sets(segment)
        chief = self.workers["worker-0"]
        for part in segment.slices:
            data = self.flat(values, segment.index)[part.offset : part.offset + part.num_bytes]
            message = Upload(segment.index, [part.id])
            server = self.replica_sets[part.id].primary
            chief.ask(server, message, buffers=[buffer_of(data)], payload_bytes=part.num_bytes).wait(WAIT)
        return segment

    def sync_replica_sets(self, segment: Segment) -> None:
        for name in self.servers:
            mine = [part.id for part in segment.slices if self.replica_sets[part.id].primary == name]
            self.tell(name, Host(segment, mine)).wait(WAIT)

    @property
    def replica_sets(self) -> dict[int, ReplicaSet]:
        return self.registry.replica_sets

    def parts(self, server: str) -> list[Slice]:
        return [p for p in self.registry.layout.slices() if self.replica_sets[p.id].primary == server]

    def primaries(self) -> list[str]:
        return sorted({replica_set.primary for replica_set in self.replica_sets.values()})

    def id_of(self, name: str) -> int:
        return self.registry.layout.parameter_id(name)

    def flat(self, values: Values, segment: int) -> np.ndarray[Any, Any]:
        """Values as they lie in a segment."""
        known = self.registry.layout.segments[segment]
        flat = np.zeros(known.num_bytes, np.uint8)
        for parameter, offset in zip(known.parameters, known.offsets, strict=True):
            if parameter.name in values:
                data = np.ascontiguousarray(values[parameter.name]).reshape(-1).view(np.uint8)
                flat[offset : offset + data.nbytes] = data
        return flat

    # -- what the servers have ----------------------------------------------------------------------------

    def slot(self, server: str, number: int) -> Any:
        hosting = self.servers[server].hosting
        return hosting.slices.get(number) or hosting.backups.backups[number].slot

    def value(self, name: str) -> np.ndarray[Any, Any]:
        """A parameter, put together from the primaries."""
        segment, index = self.registry.layout.where[name]
        flat = np.zeros(segment.num_bytes, np.uint8)
        for part in segment.slices:
            memory_ = self.servers[self.replica_sets[part.id].primary].hosting.slices[part.id].memory
            flat[part.offset : part.offset + part.num_bytes] = memory_
        parameter, offset = segment.parameters[index], segment.offsets[index]
        size = parameter.num_items * ITEM_BYTES[parameter.dtype]
        return flat[offset : offset + size].view(parameter.dtype).reshape(parameter.shape)

    # -- the coordinator's part ---------------------------------------------------------------------------

    def tell(self, server: str, message: Message) -> Call:
        return self._coordinators[server].call(message)

    def holds(self, server: str, seconds: float = WAIT) -> None:
        """From now on what this server prepares is held for so long, if no Install comes; more where it moves."""
        self.servers[server].reconfiguration().hold_seconds = seconds

    def change(
        self,
        *,
        fenced: Mapping[str, int] | None = None,
        entering: Mapping[str, int] | None = None,
        replica_sets: Sequence[ReplicaSet] | None = None,
        moves: bool = False,
    ) -> Reconfiguration:
        self.generation += 1
        if replica_sets is not None:
            self.replica_sets.update((replica_set.slice, replica_set) for replica_set in replica_sets)
        fenced = fenced or {}
        staying = {
            m.name: m.incarnation
            for m in self.members
            if m.role == "worker" and fenced.get(m.name) != m.incarnation and m.name not in (entering or {})
        }
        servers = {m.name: m.incarnation for m in self.members if m.name in self.servers}
        return Reconfiguration(
            self.generation, servers, fenced=fenced, entering=entering or {},
            replica_sets=list(self.replica_sets.values()), moves=moves, staying=staying,
        )  # fmt: skip

    def prepare(self, change: Reconfiguration) -> None:
        calls = {name: self.tell(name, change.prepare()) for name in change.servers}
        for name, call in calls.items():
            answer = call.wait(WAIT)
            assert isinstance(answer, Prepared)
            change.prepared(name, answer)

    def install(self, change: Reconfiguration) -> None:
        message = change.install([m for m in self.members if m.name not in change.fenced])
        for call in [self.tell(name, message) for name in change.servers]:
            call.wait(WAIT)

    def carry_out(self, **what: Any) -> Reconfiguration:
        change = self.change(**what)
        self.prepare(change)
        self.install(change)
        if change.moves:
            for worker in self.workers.values():
                worker.stamp.generation = self.generation
        return change

    def fence(self, name: str) -> Reconfiguration:
        """A worker is dead."""
        worker = self.workers.pop(name)
        worker.vanish()
        self.members = [m for m in self.members if m.name != name]
        return self.carry_out(fenced={name: worker.incarnation})

    def enter(self, name: str) -> tuple[Worker, Standing]:
        """A worker that came late takes part from now on."""
        member = self.member("worker", int(name.rpartition("-")[2]))
        self.members.append(member)
        change = self.carry_out(entering={name: member.incarnation})
        worker = self.workers[name] = Worker(self, name, member.incarnation)
        (standing,) = [s for s in change.standings() if s.name == name]
        worker.phase = standing.phase
        return worker, standing

    def seed(self, source: str, target: str, slices: Sequence[int] | None = None) -> None:
        """Gives slices a backup, and has the replica sets say so."""
        numbers = [part.id for part in self.parts(source)] if slices is None else list(slices)
        member = next(m for m in self.members if m.name == target)
        self.tell(source, SeedTo(numbers, member)).wait(WAIT)
        self.carry_out(replica_sets=[ReplicaSet(number, source, (target,)) for number in numbers])

    def kill(self, server: str) -> None:
        """A server is gone: its connections break."""
        gone = self.servers.pop(server)
        gone.close()
        self._coordinators.pop(server).close()
        for worker in self.workers.values():
            if server in worker.endpoints:
                worker.endpoints.pop(server).close()
        self.members = [m for m in self.members if m.name != server]

    def promote(self) -> Reconfiguration:
        """The replica sets without the servers that are gone."""
        gone = {name for replica_set in self.replica_sets.values() for name in replica_set.names}
        replica_sets, lost = without(self.replica_sets.values(), gone - set(self.servers) - {""})
        assert not lost
        return self.carry_out(replica_sets=replica_sets, moves=True)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.vanish()
        for endpoint in self.between:
            endpoint.close()
        for server in self.servers.values():
            server.close()
        assert not self.broken, self.broken


@pytest.fixture
def make_house() -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(*arguments: Any, **settings: Any) -> House:
        made.append(House(*arguments, **settings))
        return made[-1]

    yield make
    for house in made:
        house.close()


class Waiting(threading.Thread):
    """Does something beside the test; what it raises is raised by `result`."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._action, self._found, self._error = action, None, None
        self.start()

    def run(self) -> None:
        try:
            self._found = self._action()
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        self.join(WAIT)
        assert not self.is_alive(), "it still waits"
        if self._error is not None:
            raise self._error
        return self._found
