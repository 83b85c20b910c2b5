"""A server: hosts slices and answers the workers. Decisions are the core's; arithmetic is the rules'."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from syncline.core.layout import Segment
from syncline.core.messages import (
    AskPlace,
    AskServerStats,
    AskState,
    AskWhy,
    Attach,
    CommitStaged,
    Done,
    GiveClip,
    GivenPlace,
    GivenServerStats,
    GivenWhy,
    Host,
    Joined,
    Leave,
    LoadState,
    Map,
    Mapped,
    Message,
    Over,
    Pin,
    Prefer,
    Pull,
    Rest,
    Stage,
    Unpin,
    Upload,
    Verified,
    Verify,
)
from syncline.core.policy import policy_of
from syncline.core.rounds import Rounds
from syncline.errors import FrameError, ProtocolError
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, Memory, Peer, buffer_of
from syncline.roles.commits import Commits
from syncline.roles.homes import Home
from syncline.roles.hosted import Contribution, HostedSlice
from syncline.roles.pool import Pool
from syncline.roles.pulls import Pulls
from syncline.roles.states import StateTransfer
from syncline.stats import ServerStats, WireStats


class Server:
    """The service that workers and the coordinator speak to."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        *,
        create_memory: Callable[[int], Memory],
        log: Callable[[str], None],
        over: Callable[[Over], None],
        home: Home | None = None,
    ) -> None:
        self.name, self._pool, self._log, self._over = name, pool, log, over
        self._create_memory = create_memory
        self._segments: dict[int, Segment] = {}
        self._memories: dict[int, Memory] = {}
        self._slices: dict[int, HostedSlice] = {}
        self._lock = threading.Lock()
        self._commits: Commits | None = None
        self._senders = ThreadPoolExecutor(max_workers=64, thread_name_prefix="send")
        self._home = home or Home()
        self._pulls = Pulls(self._slices, pool, self._senders)
        self._states = StateTransfer(self._slices)
        self._endpoints: set[Endpoint] = set()
        self._wire = WireStats()

    def form(self, joined: Joined) -> None:
        """The job is whole: from now on commits can be taken."""
        workers = [(m.name, m.incarnation) for m in joined.members if m.role == "worker"]
        num_servers = sum(m.role == "server" for m in joined.members)
        rounds: Rounds[Contribution] = Rounds(policy_of(joined.config), workers)
        self._commits = Commits(rounds, self._slices, self._pool, self._pulls, num_servers)

    def greet(self, endpoint: Endpoint) -> None:
        """A connection was made."""
        with self._lock:
            self._endpoints.add(endpoint)

    @property
    def commits(self) -> Commits:
        if self._commits is None:
            raise ProtocolError(f"{self.name} is not part of a whole job yet")
        return self._commits

    # -- what the endpoint calls --------------------------------------------------------------------------

    def landing(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if isinstance(message, Upload):
            return [buffer_of(slot.memory) for slot in self._upload_slots(peer, message)]
        if isinstance(message, Stage):
            return self.commits.landing(peer, message)
        if isinstance(message, LoadState):
            return self._states.landing(message)
        raise FrameError(f"{type(message).__name__} has no payload")

    def handle(self, request: Request) -> None:
        message = request.message
        if isinstance(message, Stage):
            self.commits.stage(request, message)
        elif isinstance(message, CommitStaged):
            self.commits.commit(request, message)
        elif isinstance(message, GiveClip):
            self.commits.give_clip(request, message)
        elif isinstance(message, Pull):
            self._pulls.pull(request, message)
        elif isinstance(message, Verify):
            self._verify(request, message)
        elif isinstance(message, Pin):
            self._pulls.pin(request, message)
        elif isinstance(message, Unpin):
            self._pulls.unpin(request, message)
        else:
            self._handle_rare(request, message)

    def _handle_rare(self, request: Request, message: Message) -> None:
        if isinstance(message, Rest):
            self.commits.rest(request.peer, message)
            request.reply(Done())
        elif isinstance(message, Prefer):
            self.commits.prefer(message.slices)
            request.reply(Done())
        elif isinstance(message, AskPlace):
            request.reply(GivenPlace(self.commits.slowest()))
        elif isinstance(message, Leave):
            self.commits.leave(request.peer)
            request.reply(Done())
        elif isinstance(message, Upload):
            for slot in self._upload_slots(request.peer, message):
                slot.rules.uploaded()
                slot.uploaded = True
            request.reply(Done())
        elif isinstance(message, Attach):
            self._attach(request, message)
        elif isinstance(message, Map):
            memory = self._memories.get(message.segment)
            if memory is None or not request.endpoint.can_carry(memory):
                raise ProtocolError(f"{self.name} shares nothing of segment {message.segment}")
            request.reply(Mapped(self._segments[message.segment].server_bytes(self.name)), attachment=memory)
        elif isinstance(message, Host):
            self._host(message.segment)
            request.reply(Done())
        elif isinstance(message, AskState):
            self._states.give(request, message)
        elif isinstance(message, LoadState):
            self.commits.check_chief(request.peer, "loads state")
            self._states.load(request, message)
        elif isinstance(message, AskServerStats):
            request.reply(GivenServerStats(self.stats()))
        elif isinstance(message, AskWhy):
            request.reply(GivenWhy(f"{self.name}: {self.commits.why(request.peer.name)}"))
        elif isinstance(message, Over):
            self._over(message)
        else:
            raise ProtocolError(f"a server does not answer {type(message).__name__}")

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self._pulls.forget(endpoint)
        with self._lock:
            if endpoint in self._endpoints:
                self._endpoints.discard(endpoint)
                self._wire += endpoint.stats()
        if endpoint.peer.role == "coordinator":
            self._over(Over(True, "coordinator", f"{self.name} lost the coordinator: {reason}"))
        elif reason not in ("closed", "the other side closed the connection"):
            self._log(f"{endpoint.peer}: {reason}")

    # -- hosting ------------------------------------------------------------------------------------------

    def _host(self, segment: Segment) -> None:
        parts = [part for part in segment.slices if part.server == self.name]
        size = segment.server_bytes(self.name)
        memory = self._reserve(size)
        self._home.adopt(memory.array)
        made = {}
        for part in parts:
            view = memory.array[part.host_offset : part.host_offset + part.num_bytes]
            made[part.id] = HostedSlice(segment, part, view, self._home)
        with self.commits.order:
            # Between two commits: the new slices begin where every worker stands now.
            for slot in made.values():
                slot.state.clocks.update(self.commits.clocks())
            self._segments[segment.index], self._memories[segment.index] = segment, memory
            self.commits.segments[segment.index] = segment
            self._slices.update(made)
            self.commits.hosts_more()

    def _reserve(self, size: int) -> Memory:
        try:
            return self._create_memory(size)
        except OSError as error:
            self._log(
                f"too little memory to share {size} bytes of parameters: {error.strerror or error}; "
                "falls back to TCP: they go over the socket"
            )
            return HeapMemory(size)

    def _upload_slots(self, peer: Peer, message: Upload) -> list[HostedSlice]:
        self.commits.check_chief(peer, "uploads values")
        slots = [self._slice(number, message.segment) for number in message.slices]
        if any(slot.uploaded for slot in slots):
            raise ProtocolError(f"{peer} uploads values that the job has already")
        return slots

    def _slice(self, number: int, segment: int) -> HostedSlice:
        slot = self._slices.get(number)
        if slot is None or slot.part.segment != segment:
            raise ProtocolError(f"{self.name} does not host slice {number} of segment {segment}")
        return slot

    def _attach(self, request: Request, message: Attach) -> None:
        segment = self._segments.get(message.segment)
        if segment is None or request.attachment is None or not 0 <= message.slot < 1 << 10:
            raise ProtocolError(f"an arena for segment {message.segment}, slot {message.slot}, which is not here")
        if request.attachment.array.nbytes < segment.num_bytes:
            raise ProtocolError(f"an arena of {request.attachment.array.nbytes} bytes; {segment.num_bytes} needed")
        self._home.adopt(request.attachment.array)
        self.commits.attach(request.peer, message.segment, message.slot, request.attachment)
        request.reply(Done())

    def _verify(self, request: Request, message: Verify) -> None:
        stale, versions = [], []
        for number, version in zip(message.slices, message.versions, strict=True):
            slot = self._slices.get(number)
            if slot is None:
                raise ProtocolError(f"{self.name} does not host slice {number}")
            if not slot.state.is_still(version):
                stale.append(number)
                versions.append(slot.state.version)
            slot.state.seen[request.peer.name] = slot.state.version
        request.reply(Verified(stale, versions))

    def stats(self) -> ServerStats:
        with self._lock:
            wire = self._wire
            for endpoint in self._endpoints:
                wire += endpoint.stats()
        slots = list(self._slices.values())
        commits = self._commits
        return ServerStats(
            name=self.name,
            num_slices=len(slots),
            parameter_bytes=sum(slot.part.num_bytes for slot in slots),
            num_updates=sum(slot.num_updates for slot in slots),
            num_commits=commits.num_commits if commits else 0,
            apply_seconds=sum(slot.apply_seconds for slot in slots),
            num_rounds=commits.num_rounds if commits else 0,
            round_seconds=commits.round_seconds if commits else 0.0,
            bytes_copied=self._pulls.bytes_copied,
            staleness_sum=float(sum(slot.staleness_sum for slot in slots)),
            staleness_count=sum(slot.staleness_count for slot in slots),
            staleness_max=max((slot.staleness_max for slot in slots), default=0),
            lag_max=commits.lag_max if commits else 0,
            num_pins=self._pulls.num_pins,
            wire=wire,
        )

    def close(self) -> None:
        with self._lock:
            endpoints = list(self._endpoints)
        for endpoint in endpoints:
            endpoint.close()
        self._pool.close()
        self._senders.shutdown(wait=True, cancel_futures=True)
        self._home.close()
        if self._commits is not None:
            self._commits.staging.close()
        for memory in self._memories.values():
            memory.close()
