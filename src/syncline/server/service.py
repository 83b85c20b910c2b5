"""A server: hosts slices and serves workers. The core decides; the rules compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from syncline.core.codecs.named import codecs_of
from syncline.core.codecs.pieces import coder_of
from syncline.core.conditions import parse_average
from syncline.core.layout import Segment
from syncline.core.members import Member
from syncline.core.policy import policy_of
from syncline.core.ring import Spread
from syncline.core.rounds import Rounds
from syncline.core.tracing import SpanBuffer
from syncline.core.wire.checkpoints import Resume
from syncline.core.wire.control import (
    AskServerStats,
    AskWhy,
    Ending,
    GivenServerStats,
    GivenWhy,
    Heartbeat,
    Host,
    Install,
    Joined,
    Leave,
    LetGo,
    Over,
    Prepare,
    Retire,
    Roster,
    SeedTo,
)
from syncline.core.wire.message import Done, Message
from syncline.core.wire.traffic import (
    AskHosted,
    AskState,
    Attach,
    AttachDevice,
    AttachedDevice,
    CommitStaged,
    DetachDevice,
    GiveClip,
    HostSum,
    LoadState,
    Map,
    Pin,
    Pull,
    Replicate,
    Restore,
    Seed,
    ShareRegion,
    Stage,
    Unpin,
    Upload,
    Verify,
    WholeSum,
)
from syncline.errors import ConnectionLost, FrameError, ProtocolError, Refresh, SynclineError
from syncline.extensions import load
from syncline.net.device_memory import DeviceMemoryError
from syncline.net.rpc import Endpoint, Request
from syncline.net.stalls import BROKEN_OFF
from syncline.net.transport import Buffer, Memory, Peer
from syncline.server.commits import Commits, commit_handlers
from syncline.server.cuts import MarkedCuts
from syncline.server.executor import RoundExecutor
from syncline.server.hosting import Dial, Hosting, stats_of
from syncline.server.lease_acks import ack_handlers
from syncline.server.numbers import why_slower
from syncline.server.pool import Pool
from syncline.server.pulls import Pulls
from syncline.server.reconfigure import HOLD_SECONDS, ServerReconfiguration
from syncline.server.restore import Loading, Values
from syncline.server.ring_service import Ring, buffers_for_sum, ring_handlers
from syncline.server.saving import Saving, saving_handlers
from syncline.server.seeding import Seeding
from syncline.server.slices import HostedSlice
from syncline.server.snapshot_barrier import SnapshotBarrierService
from syncline.server.staging import Staging
from syncline.server.state_transfer import StateTransfer
from syncline.server.storage import SliceStorage
from syncline.server.tasks import StagedCommit
from syncline.server.waits import beat_of
from syncline.stats import ServerDebugState, ServerStats, WireStats, thread_names
from syncline.usage import TellsStats

#: Messages that need no current replica sets.
_ALWAYS = (Leave, AskWhy)


def _no_way(member: Member) -> Endpoint:
    raise ConnectionLost(f"there is no way to {member.name}")


class Server:
    """The service for workers, other servers and the coordinator."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        *,
        create_memory: Callable[[int], Memory],
        log: Callable[[str], None],
        over: Callable[[Over], None],
        storage: SliceStorage | None = None,
        dial: Dial = _no_way,
        retire: Callable[[], None] = lambda: None,
        ending: Callable[[float], None] = lambda seconds: None,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self._pool, self._log, self._over, self._retire = pool, log, over, retire
        self._hold_seconds, self._ending = hold_seconds, ending
        self._storage = storage or SliceStorage()
        self._lock, self._host_lock = threading.Lock(), threading.Lock()
        self._commits: Commits | None = None
        self._generations: ServerReconfiguration | None = None
        self._heard = 0  # the generation of the newest roster
        self.ring: Ring | None = None
        self._senders = ThreadPoolExecutor(max_workers=64, thread_name_prefix="send")
        self.hosting = Hosting(pool, self._storage, create_memory=create_memory, dial=dial, log=log)
        self.name = name
        self.slices = self.hosting.slices
        self.staging = Staging(self._storage.release, self._storage.device_channel)
        self._pulls = Pulls(
            self.slices, pool, self._senders, moved=self._moved, device_arenas=self.staging.device_arenas
        )
        self._states = StateTransfer(self.slices, find=lambda number: self.hosting.find(number)[1])
        self._seeding = Seeding(self.slices)
        self._values = Values(self.hosting)
        self._endpoints: set[Endpoint] = set()
        self._leaving: set[Endpoint] = set()  # of workers that have sent Leave
        self._wire = WireStats()
        self._tells_stats = TellsStats(WireStats, self._peers)
        self.saving, self._loading = Saving(log), Loading(self.hosting)
        self._barrier: SnapshotBarrierService | None = None
        self.cuts = MarkedCuts(self._slot_of, self._primaries, self.snapshot_barrier)
        self._speaks = False  # for all servers of the job
        self.spans: SpanBuffer | None = None  #: with --trace
        self._rare = self._rare_handlers()

    @property
    def name(self) -> str:
        return self.hosting.name

    @name.setter
    def name(self, name: str) -> None:
        self.hosting.name = name

    def form(self, joined: Joined) -> None:
        """The job is formed: commits are accepted from now on."""
        config = joined.config
        servers = [member.name for member in joined.members if member.role == "server"]
        self._speaks = not joined.late and servers[:1] == [self.name]
        # A server that joins late learns the clocks with its first slices.
        workers = [(m.name, m.incarnation) for m in joined.members if m.role == "worker" and not joined.late]
        rounds: Rounds[StagedCommit] = Rounds(policy_of(config), workers)
        flow = RoundExecutor(rounds, self.slices, self._pool, self._pulls, len(servers), self._log)
        flow.spans = self.spans = SpanBuffer() if config.trace else None
        commits = Commits(
            rounds, self.slices, flow, self._pulls, self.staging,
            segments=self.hosting.segments, find=self.hosting.find,
        )  # fmt: skip
        self.hosting.hear(joined.members, ())
        commits.ranks.hear(joined.members)
        codecs = codecs_of(config, load)
        if config.is_ring:
            self.ring = Ring(config, commits, self.hosting, self._pool, Spread(config, codecs))
        flow.count_workers(config.replicas)
        self._generations = ServerReconfiguration(
            self.name,
            commits,
            self.hosting,
            self._pulls,
            generation=joined.generation,
            is_late=joined.late,
            replicas=config.replicas,
            log=self._log,
            hold_seconds=self._hold_seconds,
            cut_off=self._cut_off,
            voting=self.ring.voting if self.ring is not None else None,
        )
        self.saving.most_bytes = config.save_memory
        self._storage.decay = parse_average(config.average).decay if config.average else 0.0
        self._barrier = SnapshotBarrierService(self.name, commits, mark=self.saving.mark, log=self._log)
        commits.decoding.coder, down = (coder_of(codec, codecs) for codec in (codecs.push, codecs.pull))
        self._pulls.coder, self.hosting.backups.sums.coder = (None, down) if config.is_ring else (down, None)
        self._pulls.backups = self.hosting.backups if config.is_ring else None
        self._commits = commits
        self.hosting.backups.form(commits.learn)
        self._pulls.outgoing.window = config.window

    def hear(self, roster: Roster) -> None:
        """Applies a roster. Of two concurrent ones the older may arrive last."""
        with self._pulls.state_lock:  # none may arrive during a reconfiguration
            if roster.generation < max(self._heard, self._generations.installed if self._generations else 0):
                return
            self._heard = roster.generation
            self.hosting.hear(roster.members, roster.replica_sets)
        if self._commits is not None and roster.generation >= self._commits.moved:
            self.hosting.backups.are_all_told()
        if self._commits is not None and self._generations is not None:
            self._generations.hear(roster)
            self._commits.ranks.hear(roster.members)

    def _cut_off(self, name: str, incarnation: int) -> None:
        with self._lock:
            known = [e for e in self._endpoints if (e.peer.name, e.peer.incarnation) == (name, incarnation)]
            evicted = [endpoint for endpoint in known if endpoint not in self._leaving]
        for endpoint in known:
            endpoint.close("this worker was evicted" if endpoint in evicted else "closed")

    def greet(self, endpoint: Endpoint) -> None:
        """A connection was made."""
        with self._lock:
            self._endpoints.add(endpoint)

    @property
    def commits(self) -> Commits:
        if self._commits is None:
            raise ProtocolError(f"{self.name} is not part of a whole job yet")
        return self._commits

    def _moved(self, number: int) -> SynclineError | None:
        """Why an existing slice is not here."""
        moved = self._commits.moved if self._commits is not None else 0
        if not moved or not self.hosting.knows(number):
            return None
        return Refresh(f"slice {number} is elsewhere since generation {moved}")

    # -- what the endpoint calls --------------------------------------------------------------------------

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if isinstance(message, Stage):
            return self.commits.buffers_for(peer, message)
        if isinstance(message, Replicate | Seed):
            return self.hosting.backups.buffers_for(peer, message)
        if isinstance(message, HostSum | WholeSum):
            return buffers_for_sum(self.ring, peer, message)
        if isinstance(message, Upload | Restore):
            return self._values.buffers_for(peer, message, self.commits)
        if isinstance(message, LoadState):
            return self._states.buffers_for(message)
        raise FrameError(f"{type(message).__name__} has no payload")

    def handle(self, request: Request) -> None:
        message = request.message
        if isinstance(message, Stage):
            self.commits.stage(request, message)
        elif isinstance(message, CommitStaged):
            self.commits.commit(request, message)
        elif isinstance(message, GiveClip):
            self.commits.give_clip(request, message)
        elif isinstance(message, Replicate | Seed):
            self.hosting.backups.handle(request, message)
        else:
            if request.peer.role == "worker" and not isinstance(message, _ALWAYS):
                self.commits.check_generation(request)
            if isinstance(message, Pull):
                self._pulls.pull(request, message)
            elif isinstance(message, Verify):
                self._pulls.verify(request, message)
            elif isinstance(message, Pin):
                self._pulls.pin(request, message)
            elif isinstance(message, Unpin):
                self._pulls.unpin(request, message)
            else:
                handler = self._rare.get(type(message))
                if handler is None:
                    raise ProtocolError(f"a server does not answer {type(message).__name__}")
                handler(request, message)

    def _rare_handlers(self) -> dict[type[Message], Callable[[Request, Any], None]]:
        return {
            Leave: self._leave,
            **commit_handlers(lambda: self.commits),
            AskWhy: self._why,
            **ack_handlers(lambda: self.commits, self.slices, self.hosting.backups),
            Upload: lambda request, message: self._values.uploaded(request, message, self.commits),
            Restore: lambda request, message: self._values.restore(request, message, self.commits),
            Attach: self._attach,
            AttachDevice: self._attach_device,
            DetachDevice: self._detach_device,
            AskHosted: lambda request, message: self.hosting.blocks.tell(request, message, self._pulls.numbers()),
            Map: lambda request, message: self.hosting.blocks.give(request, message, self.name),
            AskState: self._states.give,
            LoadState: self._load_state,
            ShareRegion: self.hosting.backups.shared_regions.share,
            **ring_handlers(lambda: self.ring),
            Host: self._host,
            Prepare: lambda request, message: self.reconfiguration().prepare(request, message),
            Install: lambda request, message: self.reconfiguration().install(request, message),
            LetGo: lambda request, message: self.reconfiguration().let_go(message),
            SeedTo: self._seed_to,
            Roster: lambda request, message: self.hear(message),
            AskServerStats: lambda request, message: request.reply(GivenServerStats(self.stats())),
            Over: lambda request, message: self._over(message),
            Retire: self._asked_to_retire,
            Ending: lambda request, message: self._ending(message.seconds),
            **saving_handlers(self.snapshot_barrier, self.saving),
            **self.cuts.handlers,
            Resume: lambda request, message: self._loading.resume(request, message, self.commits),
        }

    def _leave(self, request: Request, message: Leave) -> None:
        with self._lock:
            self._leaving.add(request.endpoint)
        self.commits.leave(request)

    def _primaries(self) -> list[HostedSlice]:
        return self.commits.hosted()

    def _slot_of(self, number: int) -> HostedSlice | None:
        """A slice that is here, as primary or backup."""
        slot = self.slices.get(number)
        return slot if slot is not None else self.hosting.backups.slot_of(number)

    def snapshot_barrier(self) -> SnapshotBarrierService:
        if self._barrier is None:
            raise ProtocolError(f"{self.name} is not part of a whole job yet")
        return self._barrier

    def reconfiguration(self) -> ServerReconfiguration:
        if self._generations is None:
            raise ProtocolError(f"{self.name} is not part of a whole job yet")
        return self._generations

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self._pulls.forget(endpoint)
        with self._lock:
            if endpoint in self._endpoints:
                self._endpoints.discard(endpoint)
                self._wire += endpoint.stats()
            self._leaving.discard(endpoint)
            left = {other.peer for other in self._endpoints}
        if endpoint.peer.role == "worker" and endpoint.peer not in left and self._commits is not None:
            self._commits.lost((endpoint.peer.name, endpoint.peer.incarnation))
        if reason == BROKEN_OFF:
            if endpoint.peer not in left:
                self._log(f"{endpoint.peer} is gone: {reason}")  # logged once for all its connections
        elif reason not in ("closed", "the other side closed the connection"):
            self._log(f"{endpoint.peer}: {reason}")

    # -- hosting ------------------------------------------------------------------------------------------

    def _host(self, request: Request, message: Host) -> None:
        with self._host_lock:  # a repeated request finds the slices made by the first
            made = self.hosting.make_room(message)
            with self.commits.state_lock:
                # Between two commits: new slices begin at every worker's current clock. Workers that have not
                # committed here since there were slices are accepted at any clock. In a ring they always have.
                is_told = bool(self.slices) or self.ring is not None
                known = {worker: clock for worker, clock in self.commits.clocks().items() if clock and is_told}
                if self.hosting.host(message.segment, made):
                    for slot in made.values():
                        slot.state.level(known)
                    self.commits.flow.hosts_others()
        self._tell_cost(message.segment)
        request.reply(Done())

    def _tell_cost(self, segment: Segment) -> None:
        """Once in a job: what rules without torch cost."""
        if self._speaks and (why := why_slower({rule.name for rule in segment.rules})):
            self._speaks = False
            self._log(why)

    def _attach(self, request: Request, message: Attach) -> None:
        segment = self.hosting.segments.get(message.segment)
        if segment is None or request.attachment is None or not 0 <= message.slot < 1 << 10:
            raise ProtocolError(f"an arena for segment {message.segment}, slot {message.slot}, which is not here")
        if request.attachment.array.nbytes < segment.num_bytes:
            raise ProtocolError(f"an arena of {request.attachment.array.nbytes} bytes; {segment.num_bytes} needed")
        self._storage.adopt(request.attachment.array)
        self.commits.attach(request.peer, message.segment, message.slot, request.attachment)
        request.reply(Done())

    def _attach_device(self, request: Request, message: AttachDevice) -> None:
        segment = self.hosting.segments.get(message.segment)
        if segment is None or not 0 <= message.slot < 1 << 10 or message.num_bytes != segment.num_bytes:
            raise ProtocolError(f"an arena for segment {message.segment}, slot {message.slot}, which is not here")
        try:
            arena = self._storage.open_arena(message)
        except DeviceMemoryError as error:
            request.reply(AttachedDevice(str(error)))
            return
        worker = (request.peer.name, request.peer.incarnation)
        self.staging.attach_device(worker, message.segment, message.slot, arena)
        request.reply(AttachedDevice())

    def _detach_device(self, request: Request, message: DetachDevice) -> None:
        self.staging.detach_device((request.peer.name, request.peer.incarnation), message.segment)
        request.reply(Done())

    def _seed_to(self, request: Request, message: SeedTo) -> None:
        self._seeding.begin(request, message, self.hosting.partner(message.target))

    def _load_state(self, request: Request, message: LoadState) -> None:
        self.commits.ranks.check_chief(request.peer, "loads state")
        if message.about:
            self.commits.about_to_load(request, message)
        else:
            self._states.load(request, message)

    def _why(self, request: Request, message: AskWhy) -> None:
        reason, is_awaited = self.commits.why(request.peer.name)
        request.reply(GivenWhy(f"{self.name}: {reason}", is_awaited))

    def _asked_to_retire(self, request: Request, message: Retire) -> None:
        request.reply(Done())
        self._retire()

    # -- numbers ------------------------------------------------------------------------------------------

    def beat(self) -> Heartbeat:
        """A heartbeat with current waits."""
        if self._commits is None:
            return Heartbeat()
        beat = beat_of(self._commits, list(self.slices.values()))
        stats = self._tells_stats.due(self.stats)
        return beat if stats is None else msgspec.structs.replace(beat, stats=stats)

    def _peers(self) -> dict[str, WireStats]:
        """What went over the connections to each member."""
        with self._lock:
            endpoints = list(self._endpoints)
        found: dict[str, WireStats] = {}
        for endpoint in endpoints:
            if endpoint.peer.role in ("worker", "server"):
                found[endpoint.peer.name] = found.get(endpoint.peer.name, WireStats()) + endpoint.stats()
        return found

    def stats(self) -> ServerStats:
        with self._lock:
            wire = self._wire
            for endpoint in self._endpoints:
                wire += endpoint.stats()
        return stats_of(self.name, list(self.slices.values()), self._commits, self._pulls, wire)

    def debug_state(self) -> ServerDebugState:
        """What this server is at, for tests and bug reports; `held` has what must go when workers go."""
        held, clocks, generation = dict[str, int](), dict[str, int](), 0
        with self._lock:
            held["endpoints"] = len(self._endpoints)
        if self._commits is not None and self._generations is not None:
            generation = self._generations.installed
            clocks = {name: clock for (name, _), clock in self._commits.clocks().items()}
            held |= self._commits.held()
        held |= self.staging.held()
        slices = dict(self.slices)
        for number, slot in slices.items():
            held |= {f"{what} of slice {number}": count for what, count in slot.held().items()}
        arena_bytes, buffer_bytes = self.staging.num_bytes()
        return ServerDebugState(
            name=self.name,
            generation=generation,
            versions={number: slot.state.version for number, slot in slices.items()},
            backups=tuple(sorted(self.hosting.backups.backups)),
            clocks=clocks,
            held=held,
            arena_bytes=arena_bytes,
            buffer_bytes=buffer_bytes,
            threads=thread_names(),
        )

    def close(self) -> None:
        with self._lock:
            endpoints = list(self._endpoints)
        for endpoint in endpoints:
            endpoint.close()
        if self._generations is not None:
            self._generations.close()
        if self._barrier is not None:
            self._barrier.end()
        self.saving.close()
        self.cuts.close()
        self._pool.close()
        self._senders.shutdown(wait=True, cancel_futures=True)
        self.hosting.close_ways()
        self._storage.close()
        self.staging.close()
        self.hosting.close()
