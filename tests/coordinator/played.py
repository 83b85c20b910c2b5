"""A coordinator by itself: servers and workers are played by the test, the journal is a list in memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from tests.patience import PATIENCE

from syncline.coordinator.service import Coordinator
from syncline.core.checkpoint.manifest import SavedScript, SavedSlice
from syncline.core.layout import Parameter, Slice
from syncline.core.members import Standing
from syncline.core.membership import JobState
from syncline.core.rule import Rule
from syncline.core.slice_state import Copy
from syncline.core.versions import InstalledVersions
from syncline.core.wire.checkpoints import (
    CloseSnapshotBarrier,
    Expect,
    Mark,
    Resume,
    SnapshotBarrierClosed,
    WriteMarked,
    WriteScript,
    WrittenMarked,
    WrittenScript,
)
from syncline.core.wire.control import (
    AskCopies,
    GiveCopies,
    GivenCopies,
    Heartbeat,
    Host,
    Install,
    Join,
    Joined,
    Prepare,
    Prepared,
    Register,
    Registered,
    SeedTo,
    Uploaded,
    Watch,
)
from syncline.core.wire.following import MarkCut, MarkedCut
from syncline.core.wire.leases import AskLeaseAcks, GaveBack, GivenLeaseAcks, Recall
from syncline.core.wire.message import Done, Message
from syncline.errors import ProtocolError, StoreError
from syncline.net.memory import pair
from syncline.net.rpc import Call, Endpoint, Request, Stamp
from syncline.net.transport import Buffer, Peer
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorWriter

SECONDS = PATIENCE


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Disk:
    """A journal in memory, which notes what was said to the members when something was kept."""

    def __init__(self) -> None:
        self.states: list[bytes] = []
        self.segments: dict[int, bytes] = {}
        self.full = False

    def load(self) -> tuple[bytes | None, list[bytes]]:
        return (self.states[-1] if self.states else None), [self.segments[k] for k in sorted(self.segments)]

    def save(self, state: bytes, segments: Mapping[int, bytes] = {}, drop: Collection[int] = ()) -> None:
        if self.full:
            raise StoreError("the disk is full")
        self.states.append(state)
        for number in drop:
            self.segments.pop(number, None)
        self.segments.update(segments)

    def check(self) -> None:
        """Nobody takes it over."""

    @property
    def last(self) -> JobState:
        return msgspec.msgpack.decode(self.states[-1], type=JobState)


class Played:
    """A member played by the test: everything that it hears is kept, and answered as its role does."""

    def __init__(self, job: Job, role: str, name: str, host: str = "a") -> None:
        self.job, self.role, self.name, self.host = job, role, name, host
        self.versions: InstalledVersions | None = None
        self.heard: list[Message] = []
        self.held: list[Request] = []
        self.holds: set[type[Message]] = set()  # not answered until the test does
        self.standings: list[Standing] = []
        self.clocks: list[tuple[str, int, int]] = []
        self.reach: list[tuple[str, int, int, str]] = []
        self.copies: list[Copy] = []
        self.acks: list[tuple[int, int, int]] = []
        self.num_updates = 0
        self.num_versions = 0  # of slices that are behind the others in updates
        self.marked: dict[int, Slice] = {}
        self.gives_back: list[tuple[int, int]] = []
        self.process = f"process of {name} {id(self)}"
        self.incarnation = 0
        self.connect()

    def connect(self) -> None:
        left, right = pair(Peer(self.role, self.name, 0), Peer("coordinator", "coordinator", 0))
        Endpoint(right, Stamp("job"), self.job.coordinator)
        self.stamp = Stamp("job")
        self.stamp.incarnation = self.incarnation
        self.endpoint = Endpoint(left, self.stamp, self)

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        raise ProtocolError("no payload")

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        pass

    def handle(self, request: Request) -> None:
        message = request.message
        self.heard.append(message)
        if type(message) in self.holds:
            self.held.append(request)
        elif isinstance(message, Prepare):
            standings = [msgspec.structs.replace(s) for s in self.standings]
            request.reply(Prepared(standings, 0, self.clocks, self.reach))
        elif isinstance(message, AskCopies):
            request.reply(GivenCopies([c for c in self.copies if c.slice in message.slices]))
        elif isinstance(message, AskLeaseAcks):
            request.reply(GivenLeaseAcks(list(self.acks)))
        elif isinstance(message, Recall):
            request.reply(GaveBack(list(self.gives_back)))
        elif isinstance(message, Install | Host | SeedTo | GiveCopies | Expect | Mark | Resume):
            self.marked = self.slices() if isinstance(message, Mark) else self.marked
            request.reply(Done())
        elif isinstance(message, CloseSnapshotBarrier):
            request.reply(self.close_gate(message))
        elif isinstance(message, MarkCut):
            request.reply(self.mark_cut(message))
        elif isinstance(message, WriteMarked):
            request.reply(self.write_marked(message))
        elif isinstance(message, WriteScript):
            request.reply(self.write_script(message))

    # -- saves --------------------------------------------------------------------------------------------

    def close_gate(self, message: CloseSnapshotBarrier) -> SnapshotBarrierClosed:
        """What it has; what it is told that others have comes in."""
        known = {clock[:2]: clock for clock in self.clocks}
        for clock in message.through:
            known[clock[:2]] = max(clock, known.get(clock[:2], clock))
        self.clocks = list(known.values())
        acks = self.acks if 0 in self.slices() else []
        versions = self.num_updates * len(self.slices()) + self.num_versions
        return SnapshotBarrierClosed(self.clocks, acks, num_updates=self.num_updates, versions=versions)

    def mark_cut(self, message: MarkCut) -> MarkedCut:
        own = self.slices()
        versions = [self.num_updates + (0 if number in own else self.num_versions) for number in message.slices]
        return MarkedCut(versions, [(number, self.num_updates) for number in own] if message.has_barrier else [])

    def slices(self) -> dict[int, Slice]:
        """Of which it is the primary."""
        coordinator = self.job.coordinator
        replica_sets = coordinator.membership.state.replica_sets
        return {p.id: p for p in coordinator.job.registry.layout.slices() if replica_sets[p.id].primary == self.name}

    def write_marked(self, message: WriteMarked) -> WrittenMarked:
        slices = self.marked
        plan = [(f"slice-{n}", "float32", (part.num_bytes // 4,)) for n, part in slices.items()]
        writer = TensorWriter(open_folder(message.folder), message.file, plan)
        for number, part in slices.items():
            writer.write(f"slice-{number}", bytes(part.num_bytes))
        file = writer.finish()
        saved = [SavedSlice(n, message.file, f"slice-{n}", self.num_updates, tuple(self.clocks)) for n in slices]
        return WrittenMarked(file, saved)

    def write_script(self, message: WriteScript) -> WrittenScript:
        writer = TensorWriter(open_folder(message.folder), message.file, [("random", "uint8", (4,))])
        writer.write("random", b"abcd")
        return WrittenScript(SavedScript(self.name, message.clock, writer.finish()))

    def all(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def ask_to_join(self) -> Call:
        return self.endpoint.call(
            Join(self.role, self.name, self.host, 1, None, {}, self.process, "cpu", versions=self.versions)
        )

    def joined(self, call: Call) -> Joined:
        answer = call.wait(SECONDS)
        assert isinstance(answer, Joined)
        self.incarnation = self.stamp.incarnation = answer.incarnation
        return answer

    def ask(self, message: Message) -> Any:
        return self.endpoint.call(message).wait(SECONDS)


class Job:
    """A coordinator and the members that are played to it."""

    def __init__(self, workers: int = 2, servers: int = 2, disk: Disk | None = None, **settings: Any) -> None:
        self.disk = disk or Disk()
        self.log: list[str] = []
        given = {
            "workers": workers,
            "servers": servers,
            "deadline_seconds": 2 * SECONDS,
            "suspect_seconds": 0.05,
            **settings,
        }
        given.setdefault("longest_deadline_seconds", 2 * SECONDS)
        self.coordinator = Coordinator(given, log=self.log.append, journal=self.disk, job="job")
        self.coordinator.start_deadline()
        self.members: dict[str, Played] = {}

    def begin(self) -> Job:
        wanted = self.coordinator.membership.state.wanted
        asked = [
            (member, member.ask_to_join())
            for role in ("server", "worker")
            for member in [self.play(role, f"{role}-{k}") for k in range(wanted[role])]
        ]
        for member, call in asked:
            assert not member.joined(call).late
        for k, server in enumerate(m for m in self.members.values() if m.role == "server"):
            server.standings = [Standing(m.name, m.incarnation) for m in self.members.values() if m.role == "worker"]
            assert k >= 0
        return self

    def play(self, role: str, name: str, host: str = "a") -> Played:
        member = self.members[name] = Played(self, role, name, host)
        if self.coordinator.job.config.is_ring:  # a worker and a server of one number are one process
            member.process = f"process {name.rpartition('-')[2]} {id(self)}"
        return member

    def __getitem__(self, name: str) -> Played:
        return self.members[name]

    def register(self, num_items: int = 4096, slice_bytes: int = 4096) -> Registered:
        message = Register(0, [Parameter("w", "float32", (num_items,))], [Rule("Add").spec], "mean")
        answer = self["worker-0"].ask(message)
        assert isinstance(answer, Registered) and answer.upload == 0
        self["worker-0"].ask(Uploaded(0))
        return answer

    def replica_sets(self) -> dict[int, tuple[str, str]]:
        return {
            n: (s.primary, ",".join(s.backups)) for n, s in self.coordinator.membership.state.replica_sets.items()
        }

    def beat_before_looks(self, steps: Mapping[str, Iterator[int]]) -> None:
        """These workers beat before each look at who is stuck, with their next step: no beat is late then, however
        slow the machine is, and none comes from a worker that is out."""
        watch = self.coordinator.watch
        run_checks = watch.run_checks

        def beat_and_check(now: float) -> None:
            for name in steps.keys() & self.coordinator.membership.state.members.keys():
                self[name].ask(Heartbeat(step=next(steps[name])))
            run_checks(now)

        watch.run_checks = beat_and_check  # type: ignore[method-assign]

    def kill(self, name: str) -> None:
        self[name].endpoint.close("killed")


@pytest.fixture
def jobs() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*arguments: Any, **settings: Any) -> Job:
        made.append(Job(*arguments, **settings))
        return made[-1]

    yield make
    for job in made:
        job.coordinator.close()
        for member in job.members.values():
            member.endpoint.close()


def ask(job: Job, message: Message) -> Any:
    """By somebody outside, as `syncline pace` and `status` do."""
    with _outside(job) as endpoint:
        return endpoint.call(message).wait(SECONDS)


@contextlib.contextmanager
def watching(job: Job) -> Iterator[None]:
    """A launcher has looked at the job, and stays connected."""
    with _outside(job) as endpoint:
        endpoint.call(Watch()).wait(SECONDS)
        yield


@contextlib.contextmanager
def _outside(job: Job) -> Iterator[Endpoint]:
    left, right = pair(Peer("launcher", "launcher", 0), Peer("coordinator", "coordinator", 0))
    Endpoint(right, Stamp("job"), job.coordinator)
    endpoint = Endpoint(left, Stamp("job"))
    try:
        yield endpoint
    finally:
        endpoint.close()
