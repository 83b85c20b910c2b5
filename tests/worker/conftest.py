"""Twins of the servers and the coordinator, as a worker sees them: every word they were told is kept, and they break
on command. One worker; gradients are subtracted, so that sums are exact."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.config import resolve
from syncline.core.layout import Segment, Slice, in_ranges
from syncline.core.members import Member
from syncline.core.registry import Registry
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import LOOP
from syncline.core.slice_state import life_of
from syncline.core.wire.checkpoints import AskResume, Finish, GivenResume
from syncline.core.wire.control import (
    AskLife,
    AskRoster,
    AskWhy,
    Barrier,
    Enter,
    Entered,
    GivenLife,
    GivenWhy,
    Heartbeat,
    Joined,
    Leave,
    Passed,
    Register,
    Registered,
    Rejoin,
    Report,
    Roster,
    Uploaded,
)  # fmt: skip
from syncline.core.wire.message import Done, Message
from syncline.core.wire.traffic import (
    AskHosted,
    AskPlace,
    AskState,
    Attach,
    CommitStaged,
    Committed,
    GivenPlace,
    GivenState,
    Hosted,
    LoadState,
    Map,
    Mapped,
    Prefer,
    Pull,
    Pulled,
    Rest,
    Restore,
    Stage,
    Upload,
    Verified,
    Verify,
)  # fmt: skip
from syncline.errors import ConnectionLost, ProtocolError, Refresh
from syncline.net import memory
from syncline.net.link import Link
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Peer, buffer_of
from syncline.worker.job import Job
from syncline.worker.session import CoordinatorHandlers


class TwinServer:
    """Hosts float64 slices. `values` and `clocks` outlive it: they are what a backup would have."""

    def __init__(self, house: House, name: str, incarnation: int) -> None:
        self.house, self.name, self.incarnation = house, name, incarnation
        self.generation = 0  # of the last move: who speaks with an older one must refresh
        self.endpoints: list[Endpoint] = []
        self.arenas: dict[tuple[int, int], Any] = {}
        self.staged: dict[int, tuple[Stage, dict[int, np.ndarray]]] = {}
        self.heard: list[Message] = []
        self.fail: Callable[[Message], None] = lambda message: None  # raises, closes, or waits
        self.restored: dict[int, tuple[Any, bytes]] = {}
        self._buffers: dict[int, list[np.ndarray]] = {}
        self._blocks: dict[int, HeapMemory] = {}

    def slices(self) -> list[Slice]:
        return [p for p in self.house.layout_slices() if self.house.replica_sets[p.id].primary == self.name]

    def die(self) -> None:
        self.house.servers.pop(self.name, None)
        for endpoint in self.endpoints:
            endpoint.close("killed")

    # -- what the endpoint calls ---

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[memoryview]:
        if isinstance(message, Stage | Upload):
            sizes = {p.id: p.num_bytes for p in self.house.layout_slices()}
            arrays = [np.empty(sizes[number], np.uint8) for number in message.slices]
        else:
            arrays = [np.empty(payload_bytes, np.uint8)]
        self._buffers[id(message)] = arrays
        return [buffer_of(array) for array in arrays]

    def handle(self, request: Request) -> None:
        message = request.message
        self.heard.append(message)
        self.fail(message)
        if self.name not in self.house.servers:
            return  # dead men tell no tales
        if request.generation < self.generation and not isinstance(message, Restore):
            raise Refresh(f"generation {request.generation}, this is {self.generation}")
        answer = self.answer(request, message)
        if isinstance(answer, tuple):
            request.reply(answer[0], [buffer_of(a) for a in answer[1]], sum(a.nbytes for a in answer[1]))
        elif answer is not None:
            request.reply(answer)

    def answer(self, request: Request, message: Message) -> Any:
        values = self.house.values
        if isinstance(message, Stage):
            bytes_ = dict(zip(message.slices, self._buffers.pop(id(message), []), strict=True))
            known = self.staged.get(message.clock)
            self.staged[message.clock] = (message, {**(known[1] if known else {}), **bytes_})
            return self._commit(message) if message.commit else Done()
        if isinstance(message, CommitStaged):
            return self._commit(message)
        if isinstance(message, Upload):
            for number, array in zip(message.slices, self._buffers.pop(id(message)), strict=True):
                values[number][:] = array.view(np.float64)
            return Done()
        if isinstance(message, Pull):
            for number in message.slices:
                self._check(number)
            versions = [self.house.versions[number] for number in message.slices]
            if message.bytes_wanted:
                copies = [values[number].view(np.uint8).copy() for number in message.slices]
                return Pulled(versions, self.house.told_clocks()), copies
            return Pulled(versions, self.house.told_clocks())
        if isinstance(message, Verify):
            return Verified([], [])
        if isinstance(message, Attach):
            self.arenas[message.segment, message.slot] = request.attachment
            return Done()
        if isinstance(message, AskHosted):
            return self._hosted()
        if isinstance(message, Map):
            block = self._blocks[message.block]
            request.reply(Mapped(block.array.nbytes), attachment=block)
            return None
        if isinstance(message, Rest | Prefer | Leave | LoadState):
            return Done()
        if isinstance(message, AskPlace):
            return GivenPlace(self.house.place)
        if isinstance(message, AskState):
            return GivenState([])
        if isinstance(message, AskWhy):
            return GivenWhy(f"{self.name}: the round waits for worker-7")
        if isinstance(message, Restore):
            self.restored[message.copy.slice] = (message.copy, self._buffers.pop(id(message))[0].tobytes())
            return Done()
        raise ProtocolError(f"a twin does not answer {type(message).__name__}")

    def _hosted(self) -> Hosted:
        """Values lie in a block per slice, which is the house's own memory."""
        places = []
        for part in self.slices():
            block = self._blocks.setdefault(part.id, HeapMemory(0))
            block.array = self.house.values[part.id].view(np.uint8)
            places.append((part.id, part.id, 0))
        return Hosted([(n, self._blocks[n].array.nbytes) for n, _, _ in places], places)

    def _check(self, number: int) -> None:
        if self.house.replica_sets[number].primary != self.name:
            raise ProtocolError(f"slice {number} is not hosted here")

    def _commit(self, message: Stage | CommitStaged) -> Any:
        clock = message.clock
        staged = self.staged.pop(clock, None)
        for part in self.slices():
            known = self.house.clocks[part.id]
            if clock <= known:
                continue
            if clock != known + 1 or staged is None:
                raise ProtocolError(f"clock {clock} on slice {part.id} at {known}, staged: {staged is not None}")
            self._apply(part, *staged)
            self.house.clocks[part.id] = clock
            self.house.ledger.append((self.name, part.id, clock))
        versions = [self.house.versions[part.id] for part in self.slices()]
        clocks = self.house.told_clocks()
        if not message.pull:
            return Committed(clock, versions, [], clocks)
        copies = [self.house.values[number].view(np.uint8).copy() for number in message.pull]
        wanted = [self.house.versions[number] for number in message.pull]
        return Committed(clock, wanted, list(message.pull), clocks), copies

    def _apply(self, part: Slice, stage: Stage, bytes_: dict[int, np.ndarray]) -> None:
        segment = self.house.registry.layout.segments[part.segment]
        pieces = [p for p in segment.pieces(part) if in_ranges(stage.pushed, segment.first_parameter + p.parameter)]
        if not pieces:
            return
        if part.id in bytes_:
            source = bytes_[part.id]
        else:
            source = self.arenas[part.segment, stage.slot].array[part.offset : part.offset + part.num_bytes]
        self.house.values[part.id] -= source.view(np.float64)
        self.house.versions[part.id] += 1

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        if endpoint in self.endpoints:
            self.endpoints.remove(endpoint)


class TwinCoordinator:
    """Answers what a worker asks of it; rosters are the house's."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.heard: list[Message] = []
        self.endpoints: list[Endpoint] = []
        self.answers: dict[type[Message], Callable[[Any], Message | None]] = {}

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[memoryview]:
        raise ProtocolError("no payload")

    def handle(self, request: Request) -> None:
        message = request.message
        self.heard.append(message)
        if type(message) in self.answers:
            answer = self.answers[type(message)](message)
        else:
            answer = self.answer(message)
        if answer is not None and request.number:
            request.reply(answer)

    def answer(self, message: Message) -> Message | None:
        house = self.house
        if isinstance(message, Register):
            found = house.registry.register(
                "worker-0", True, message.ordinal, message.parameters, message.rules, message.reduce
            )
            if found.segment is not None:
                house.host(found.segment)
            upload = found.segment.index if found.segment is not None else None
            return Registered(
                house.registry.layout.segments, list(house.replica_sets.values()), house.generation, upload
            )
        if isinstance(message, Uploaded):
            house.registry.ready.add(message.segment)
            return Done()
        if isinstance(message, AskRoster | Rejoin):
            return house.roster()
        if isinstance(message, AskLife):
            return GivenLife()
        if isinstance(message, AskResume):
            return GivenResume()
        if isinstance(message, Barrier):
            return Passed(message.phase + (1 << 32))
        if isinstance(message, Enter):
            return Entered(5 * LOOP, 17)
        if isinstance(message, AskWhy):
            return GivenWhy(f"step {message.step} has waited 1.2 s for worker-7 on host b (last heard of 1.1 s ago)")
        if isinstance(message, Finish | Leave | Report | Heartbeat):
            return Done()
        raise ProtocolError(f"a twin does not answer {type(message).__name__}")

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self.endpoints.remove(endpoint)

    def say(self, message: Message) -> None:
        for endpoint in list(self.endpoints):
            endpoint.tell(message)


class House:
    """A job of one worker with twins for all others."""

    def __init__(self, num_servers: int, *, shares_memory: bool = True, late: bool = False, **settings: Any) -> None:
        self.shares_memory = shares_memory
        self.config = resolve({"workers": 1, "servers": num_servers, "wait_seconds": PATIENCE, **settings})
        self.generation = 1
        self.incarnations = 10
        self.servers: dict[str, TwinServer] = {}
        self.members: dict[str, Member] = {}
        self.place = 0
        self.values: dict[int, np.ndarray] = {}
        self.versions: dict[int, int] = {}
        self.clocks: dict[int, int] = {}
        self.ledger: list[tuple[str, int, int]] = []  # server, slice, clock: every update that was applied
        self.said: list[str] = []
        for k in range(num_servers):
            self.add_server(f"server-{k}")
        self.registry = Registry([f"server-{k}" for k in range(num_servers)], self.config.slice_bytes)
        self.coordinator = TwinCoordinator(self)
        self.handlers = CoordinatorHandlers()
        self.stamp = Stamp("twin")
        me = self.members["worker-0"] = Member("worker-0", "worker", 3, "local")
        # Looked up at each call: a test may replace them.
        dial_coordinator = lambda: self.dial_coordinator()  # noqa: E731, PLW0108
        dial = lambda member: self.dial(member)  # noqa: E731, PLW0108
        self.link = Link(
            dial_coordinator, self.handlers, self.stamp, patience_seconds=PATIENCE, say=self.said.append,
            fenced=self.handlers.fenced, gone=self.handlers.gone,
        )  # fmt: skip
        joined = Joined(3, self.generation, list(self.members.values()), self.config, late)
        self.job = Job(
            joined, me, self.link, self.handlers, dial, self.stamp,
            folder=pathlib.Path("."), say=self.said.append, embedded=False, beats=False,
        )  # fmt: skip

    @property
    def replica_sets(self) -> dict[int, ReplicaSet]:
        return self.registry.replica_sets

    def layout_slices(self) -> list[Slice]:
        return list(self.registry.layout.slices())

    def host(self, segment: Segment) -> None:
        for part in segment.slices:
            self.values[part.id] = np.zeros(part.num_bytes // 8)
            self.versions[part.id] = 0
            self.clocks[part.id] = self.job.exchange.clock

    def told_clocks(self) -> dict[str, int]:
        return {life_of("worker-0", 3): max(self.clocks.values(), default=0), life_of("worker-1", 2): 41}

    def add_server(self, name: str) -> TwinServer:
        self.incarnations += 1
        server = self.servers[name] = TwinServer(self, name, self.incarnations)
        server.generation = self.generation
        self.members[name] = Member(name, "server", self.incarnations, "local")
        return server

    def roster(self) -> Roster:
        return Roster(self.generation, list(self.members.values()), list(self.replica_sets.values()))

    def change(self, moves: dict[int, str] | None = None, *, tell: bool = True) -> None:
        """The next generation: dead servers are out, these slices have other primaries, what is staged is dropped."""
        self.generation += 1
        for name in [n for n, m in self.members.items() if m.role == "server" and n not in self.servers]:
            del self.members[name]
        for number, name in (moves or {}).items():
            self.replica_sets[number] = ReplicaSet(number, name)
        if moves:
            for server in self.servers.values():
                server.generation = self.generation
                server.staged.clear()
        if tell:
            self.coordinator.say(self.roster())

    def fail_over(self, dead: str, to: str, *, tell: bool = True) -> None:
        """A server is gone, and another has become the primary of its slices."""
        moves = {number: to for number, replica_set in self.replica_sets.items() if replica_set.primary == dead}
        self.change(moves, tell=tell)

    def dial_coordinator(self) -> Any:
        left, right = memory.pair(Peer("worker", "worker-0", 0), Peer("coordinator", "coordinator", 0))
        self.coordinator.endpoints.append(Endpoint(right, Stamp("twin"), self.coordinator))
        return left

    def dial(self, member: Member) -> Endpoint:
        server = self.servers.get(member.name)
        if server is None or server.incarnation != member.incarnation:
            raise ConnectionLost(f"{member.name} cannot be reached")
        left, right = memory.pair(Peer("worker", "worker-0", 3), Peer("server", member.name, 0))
        left.shares_memory = right.shares_memory = self.shares_memory
        endpoint = Endpoint(right, Stamp("twin"), server)
        server.endpoints.append(endpoint)
        return Endpoint(left, self.stamp)

    def everything(self) -> dict[str, np.ndarray]:
        """The parameters as the servers have them."""
        found = {}
        for segment in self.registry.layout.segments:
            flat = np.zeros(segment.num_bytes, np.uint8)
            for part in segment.slices:
                flat[part.offset : part.offset + part.num_bytes] = self.values[part.id].view(np.uint8)
            for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
                found[parameter.name] = flat[offset : offset + parameter.num_bytes].view(np.float64)
        return found

    def close(self) -> None:
        self.job.abandon()
        for server in list(self.servers.values()):
            for endpoint in list(server.endpoints):
                endpoint.close()
        for endpoint in list(self.coordinator.endpoints):
            endpoint.close()


@pytest.fixture
def house() -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(*args: Any, **settings: Any) -> House:
        made.append(House(*args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
