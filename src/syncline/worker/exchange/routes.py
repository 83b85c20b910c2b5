"""Routes to the servers: which server is the primary of which slice, the connections to these servers, and the arenas
where gradients lie until they are answered, in shared memory where a server is on this host.

In a ring a worker reads from the server in its own process (`own`), whichever server is the primary of a slice.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from syncline.config import JobConfig
from syncline.core.codecs.named import NONE, codecs_of
from syncline.core.layout import Layout, Segment, Slice
from syncline.core.members import Member, by_name
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import HostLeaders, Spread, host_leaders_of
from syncline.core.wire.control import AskWhy, GivenWhy, Roster
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import Attach
from syncline.errors import ConfigError, ConnectionLost, FrameError, Refresh, SynclineError
from syncline.extensions import load
from syncline.net.device_channel import WorkerChannel
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Endpoint, wait_all
from syncline.net.transport import Memory, buffer_of
from syncline.stats import WireStats
from syncline.worker.arrays import Bytes
from syncline.worker.exchange.receiver import ServerReader


class Dialing:
    """A connection being dialled, which may take ten seconds. An abandoned dial ends in its own thread."""

    def __init__(self, dial: Callable[[Member], Endpoint], member: Member) -> None:
        self.member, self._dial = member, dial
        self._change = threading.Condition()
        self._endpoint: Endpoint | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=f"dial {member.name}", daemon=True).start()

    def _run(self) -> None:
        try:
            endpoint = self._dial(self.member)
        except Exception as error:  # raised in `wait`
            self._end(error)
            return
        with self._change:
            is_wanted = self._error is None
            if is_wanted:
                self._endpoint = endpoint
                self._change.notify_all()
        if not is_wanted:
            endpoint.close()

    def _end(self, error: Exception) -> None:
        with self._change:
            if self._endpoint is None and self._error is None:
                self._error = error
                self._change.notify_all()

    def give_up(self, reason: str) -> None:
        """From any thread: `wait` ends now."""
        self._end(ConnectionLost(reason))

    def wait(self) -> Endpoint:
        """Returns the connection, or raises why there is none."""
        try:
            with self._change:
                self._change.wait_for(lambda: self._endpoint is not None or self._error is not None)
        except BaseException:
            self.give_up("the caller has stopped waiting")
            raise
        if self._endpoint is None:
            assert self._error is not None
            raise self._error
        return self._endpoint


class Arenas:
    """One arena per segment and slot, made on first use and attached to all servers that can read it in place."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        hosting: Callable[[int], Collection[str]],
        num_slots: int,
        config: JobConfig,
        say: Callable[[str], None],
    ) -> None:
        """`hosting`: the primaries of a segment; they and the endpoints change."""
        self._endpoints, self._hosting = endpoints, hosting
        self._num_slots, self._config, self._say = num_slots, config, say
        self._memories: dict[tuple[int, int], Memory] = {}
        self._sizes: dict[int, int] = {}
        self._shared: set[tuple[str, int, int]] = set()  # server, segment, slot
        self._fell_back = False

    def array(self, segment: Segment, slot: int) -> Bytes:
        """The whole arena, in the layout of the segment."""
        return self.memory(segment, slot).array

    def memory(self, segment: Segment, slot: int) -> Memory:
        key = (segment.index, slot)
        if key not in self._memories:
            self._memories[key] = self._create(segment)
            self._sizes[segment.index] = segment.num_bytes
            self._attach(*key)
        return self._memories[key]

    def has(self, segment: int, slot: int) -> bool:
        return (segment, slot) in self._memories

    def view(self, part: Slice, slot: int) -> memoryview:
        return buffer_of(self.bytes_of(part, slot))

    def bytes_of(self, part: Slice, slot: int) -> Bytes:
        """The bytes of this slice in the arena."""
        return self._memories[part.segment, slot].array[part.offset : part.offset + part.num_bytes]

    def is_shared(self, server: str, segment: int, slot: int) -> bool:
        """Whether this server reads the arena in place."""
        return (server, segment, slot) in self._shared

    def _create(self, segment: Segment) -> Memory:
        sharing = [self._endpoints[n] for n in self._hosting(segment.index) if self._endpoints[n].shares_memory]
        if sharing and not self._fell_back:
            try:
                # Stage processes make gradients there.
                return sharing[0].create_memory(segment.num_bytes, for_all=self._config.stages > 1)
            except OSError as error:
                self._fall_back(segment, error)
        return HeapMemory(segment.num_bytes)

    def attach(self) -> None:
        """Attaches the arenas to new primaries, where possible."""
        for segment, slot in self._memories:
            self._attach(segment, slot)

    def _attach(self, segment: int, slot: int) -> None:
        memory = self._memories[segment, slot]
        for server in self._hosting(segment):
            endpoint, key = self._endpoints[server], (server, segment, slot)
            if key not in self._shared and not self._fell_back and endpoint.shares_memory:
                if not endpoint.can_carry(memory):
                    continue  # made when all servers were on other hosts
                message = Attach(segment, slot, self._sizes[segment])
                endpoint.call(message, attachment=memory).wait(self._config.wait_seconds)
                self._shared.add(key)

    def forget(self, server: str) -> None:
        """The connection to this server is gone, and its attachments with it."""
        self._shared = {key for key in self._shared if key[0] != server}

    def _fall_back(self, segment: Segment, error: OSError) -> None:
        needed = segment.num_bytes * self._num_slots
        reason = f"too little memory for arenas of {needed} bytes ({self._num_slots} x {segment.num_bytes})"
        if self._config.transport == "shm":
            raise ConfigError(f"{reason}: {error.strerror or error}; use --transport auto or tcp") from None
        self._fell_back = True
        self._say(f"{reason}: {error.strerror or error}; falls back to TCP: gradients go over the socket")

    def close(self) -> None:
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()


#: How long the thread that reads a closed connection may still write to the model's memory.
_LAST_READ_SECONDS = 5.0
#: Slices in shared memory are announced early from this size on: a message has its price.
EARLY_BYTES = 1 << 20


class ServerRoutes:
    """Endpoints to all primaries. Used by one thread, except `hear`."""

    def __init__(
        self,
        config: JobConfig,
        dial: Callable[[Member], Endpoint],
        num_slots: int,
        say: Callable[[str], None],
        own: str = "",
    ) -> None:
        """`own`: in a ring, the server in this process; with a process group, the only one that gets pushes."""
        self._config, self._dial, self._say, self._own = config, dial, say, own
        self._spread = Spread(config, codecs_of(config, load))
        self.device_channel: WorkerChannel | None = None  #: to servers on this worker's GPU
        self._has_told = False  # that nothing is encoded in shared memory
        self.layout = Layout()
        self.primaries: dict[int, str] = {}  # by slice
        self._replica_sets: dict[int, ReplicaSet] = {}
        self.spread: frozenset[int] = frozenset()  # in a ring: slices that go to all servers
        self._host_leaders: HostLeaders | None = None  # in a ring
        #: Slices by server, in order of ids: its primaries, the pushes it gets, the slices read from it.
        self.hosted: dict[str, list[Slice]] = {}
        self.taken: dict[str, list[Slice]] = {}
        self.read: dict[str, list[Slice]] = {}
        self._others: list[str] = []  # in a ring: all servers are told of every commit
        self.names: list[str] = []  # sorted
        self.endpoints: dict[str, Endpoint] = {}
        self.readers: dict[str, ServerReader] = {}
        self._incarnations: dict[str, int] = {}
        self._unseen: set[str] = set()  # servers whose slices have moved in memory
        self._segments: dict[int, list[str]] = {}  # the servers that get pushes of each
        self._has_connected = False
        self._dialing: Dialing | None = None
        self._heard: Roster | None = None
        self.arenas = Arenas(self.endpoints, self.hosting, num_slots, config, say)
        self._wire = WireStats()

    def hosting(self, segment: int) -> list[str]:
        """The servers that get anything of this segment."""
        return self._segments.get(segment, [])

    # -- what changes it ----------------------------------------------------------------------------------

    def add(self, segments: Sequence[Segment], replica_sets: Iterable[ReplicaSet]) -> None:
        """The layout has grown. `follow` connects to the servers of the new slices."""
        for segment in segments[len(self.layout.segments) :]:
            self.layout.add(segment)
        self._take_replica_sets(replica_sets)

    def _take_replica_sets(self, replica_sets: Iterable[ReplicaSet]) -> bool:
        """Takes over the replica sets. Returns whether an existing slice has another primary."""
        replica_sets = list(replica_sets)
        self._replica_sets.update((replica_set.slice, replica_set) for replica_set in replica_sets)
        primaries = {**self.primaries, **{replica_set.slice: replica_set.primary for replica_set in replica_sets}}
        if self._config.is_ring and replica_sets:
            self._others = sorted({name for known in self._replica_sets.values() for name in known.backups})
        known = {part.id for part in self.layout.slices()}
        moved = any(primaries.get(number) != self.primaries.get(number) for number in known)
        self.primaries = primaries
        return moved

    def differs(self, roster: Roster) -> bool:
        """Whether this roster requires a replay: primaries move, or a connection is gone."""
        members = {member.name: member.incarnation for member in roster.members}
        kept = {part.id for part in self.layout.slices()}
        moved = any(self._moves(replica_set) for replica_set in roster.replica_sets if replica_set.slice in kept)
        return moved or any(self._is_out(name, members) for name in self.endpoints)

    def _moves(self, replica_set: ReplicaSet) -> bool:
        """In a ring every change of replica sets is a move."""
        known = self._replica_sets.get(replica_set.slice)
        return (
            known is None or known.primary != replica_set.primary or (self._config.is_ring and known != replica_set)
        )

    def _is_out(self, name: str, incarnations: dict[str, int]) -> bool:
        return not self.endpoints[name].is_open or incarnations.get(name) != self._incarnations[name]

    def drop(self, roster: Roster) -> None:
        """Takes over the roster's replica sets. Closes connections to servers that were restarted, are gone, or
        are no primaries.
        """
        self._take_replica_sets(roster.replica_sets)
        self._unseen.update(self.endpoints)
        incarnations = {member.name: member.incarnation for member in roster.members}
        wanted = set(self._by_server())
        for name in list(self.endpoints):
            if name not in wanted or self._is_out(name, incarnations):
                self._close(name)

    def _close(self, name: str) -> None:
        endpoint = self.endpoints.pop(name)
        endpoint.close()
        endpoint.read(_LAST_READ_SECONDS)  # no thread may read it after this: it would overwrite what comes next
        self._wire += endpoint.stats()
        self.readers.pop(name).close()
        self.arenas.forget(name)
        if self.device_channel is not None:
            self.device_channel.forget(name)
        del self._incarnations[name]

    def follow(self, roster: Roster) -> None:
        """Connects to every primary, maps its memory and attaches the arenas."""
        by_server = self._by_server()
        members = {member.name: member for member in roster.members}
        for name in by_server:
            if name not in self.endpoints:
                if name not in members:
                    raise Refresh(f"{name or 'no server'} is to have slices and is not in the roster")
                self._connect(members[name])
                self._hear_again(roster)
        self.names = sorted(by_server, key=by_name)
        hosts = {member.name: member.host for member in roster.members}
        parts = ((segment, part) for segment in self.layout.segments for part in segment.slices)
        self.spread = self._spread.of(parts, self._replica_sets, hosts)
        self._host_leaders = host_leaders_of(self._config, self._replica_sets, roster.members)
        self.taken = self._taken(by_server)
        read = self._sorted({} if self._own else by_server, lambda part: (self.source(part.id),))
        for name in self.names:
            if self.read.get(name) != read[name]:
                self._unseen.add(name)
        for name in self._unseen & by_server.keys():
            self.readers[name].look(read[name])
        self._unseen.clear()
        self.hosted, self.read = by_server, read
        self._segments = {}
        for name in self.names:
            for segment in dict.fromkeys(part.segment for part in self.taken[name]):
                self._segments.setdefault(segment, []).append(name)
        self.arenas.attach()
        self.tell_channel()
        self._tell_of_codecs()

    def tell_channel(self) -> None:
        """Attaches what the device channel shares to new primaries."""
        if self.device_channel is not None:
            self.device_channel.follow(self.hosting, self.endpoints)

    def _sorted(
        self, known: Mapping[str, list[Slice]], find: Callable[[Slice], Iterable[str]]
    ) -> dict[str, list[Slice]]:
        """By server: its slices in `known`, and those that `find` assigns to it."""
        found = {name: {part.id: part for part in known.get(name, ())} for name in self.names}
        for part in self.layout.slices():
            for name in find(part):
                found[name][part.id] = part
        return {name: [parts[number] for number in sorted(parts)] for name, parts in found.items()}

    def _taken(self, by_server: Mapping[str, list[Slice]]) -> dict[str, list[Slice]]:
        if not self._config.has_process_group and self._host_leaders is None:
            return self._sorted(by_server, lambda part: self.names if part.id in self.spread else ())
        if by_server and self._own not in by_server:
            raise Refresh(f"{self._own}, in this process, has no slices yet")
        return self._sorted({}, lambda part: (self._adder(part.id),))

    def _adder(self, number: int) -> str:
        """In a ring whose servers compute sums themselves: the server on this host that gets the pushes of a
        slice.
        """
        if self._host_leaders is None:
            return self._own
        found = self._host_leaders.of(number).get(self._host_leaders.host_of(self._own))
        return found or self.primaries[number]  # it has no copies yet: no worker pushes it

    def takes(self, server: str, part: Slice) -> bool:
        """Whether this server gets the pushes of a slice."""
        if self._config.has_process_group or self._host_leaders is not None:
            return server == self._adder(part.id)
        return part.id in self.spread or self.primaries.get(part.id) == server

    def source(self, number: int) -> str:
        """The server that this slice is read from."""
        replica_set = self._replica_sets.get(number)
        return (
            self._own
            if replica_set is not None and self._own in replica_set.names
            else self.primaries.get(number, "")
        )

    def _connect(self, member: Member) -> None:
        self._dialing = Dialing(self._dial, member)
        try:
            self._stop_dialing_if_out()
            endpoint = self._dialing.wait()
        except (OSError, FrameError) as error:
            raise ConnectionLost(f"{member.name} cannot be reached: {error}") from None
        except ConfigError as error:
            if not self._has_connected:  # a bad setting; later it means that the server is gone
                raise
            raise ConnectionLost(f"{member.name} cannot be reached: {error}") from None
        finally:
            self._dialing = None
        self._has_connected = True
        pins = member.name != self._own  # copies of other servers' slices are read there
        self.readers[member.name] = ServerReader(endpoint, self._config.wait_seconds, pins=pins)
        self._incarnations[member.name] = member.incarnation
        self._unseen.add(member.name)
        self.endpoints[member.name] = endpoint  # from now on a roster with another incarnation closes it

    def _tell_of_codecs(self) -> None:
        shared = [endpoint.shares_memory for endpoint in self.endpoints.values()]
        is_true = (len(shared) > 1 and all(shared)) if self._config.is_ring else any(shared)
        if self._has_told or not is_true:
            return
        said = [("--codec", self._config.codec), ("--pull-codec", self._config.pull_codec)]
        words = [f"{setting} {name}" for setting, name in said if name not in NONE]
        if words:
            self._has_told = True
            self._say(f"{', '.join(words)}: this worker shares memory with its servers: nothing is encoded there")

    def _by_server(self) -> dict[str, list[Slice]]:
        found: dict[str, list[Slice]] = {}
        for part in self.layout.slices():
            found.setdefault(self.primaries.get(part.id, ""), []).append(part)
        for name in self._others if found else ():
            found.setdefault(name, [])
        return found

    def hear(self, roster: Roster) -> None:
        """From any thread: ends waits for servers that are out."""
        self._heard = roster
        incarnations = {member.name: member.incarnation for member in roster.members}
        for name, endpoint in list(self.endpoints.items()):
            if incarnations.get(name) != self._incarnations.get(name):
                endpoint.close(f"{name} is out since generation {roster.generation}")
        self._stop_dialing_if_out()

    def _hear_again(self, followed: Roster) -> None:
        """Checks for a later roster that came while a server was neither being dialled nor connected."""
        heard = self._heard
        if heard is not None and heard.generation > followed.generation:
            self.hear(heard)

    def _stop_dialing_if_out(self) -> None:
        dialing, roster = self._dialing, self._heard
        if dialing is None or roster is None:
            return
        if all(member.incarnation != dialing.member.incarnation for member in roster.members):
            dialing.give_up(f"{dialing.member.name} is out since generation {roster.generation}")

    # -- what is asked of it ------------------------------------------------------------------------------

    def ask_all(self, message: Message) -> list[Message]:
        """Asks every server once and returns the answers."""
        return wait_all([endpoint.call(message) for endpoint in self.endpoints.values()], self._config.wait_seconds)

    def why(self, seconds: float) -> str:
        """Whom this worker waits for, as the servers say. From any thread."""
        return "; ".join(given.reason for given in self._ask_why(seconds))

    def is_awaited(self, seconds: float) -> bool:
        """Whether a round waits for this worker, as any server says."""
        return any(given.is_awaited for given in self._ask_why(seconds))

    def _ask_why(self, seconds: float) -> Iterator[GivenWhy]:
        for endpoint in list(self.endpoints.values()):
            try:
                answer = endpoint.call(AskWhy()).wait(seconds)
            except SynclineError as error:
                yield GivenWhy(str(error))
            else:
                yield answer if isinstance(answer, GivenWhy) else GivenWhy("")

    @property
    def sums_early(self) -> bool:
        """Whether servers sum slices that are staged before the commit."""
        return len(self.names) > 1 and (self._config.has_process_group or self._host_leaders is not None)

    @property
    def early_bytes(self) -> float:
        """The size from which announcing slices early helps; 0 if some servers get them over a socket."""
        if not all(end.shares_memory for name, end in self.endpoints.items() if self.taken.get(name)):
            return 0
        return EARLY_BYTES if self.sums_early else math.inf

    def mapped(self) -> list[Bytes]:
        return [array for reader in list(self.readers.values()) for array in reader.mapped()]

    def stats(self) -> WireStats:
        total = self._wire
        for endpoint in list(self.endpoints.values()):
            total += endpoint.stats()
        return total

    def peers(self) -> dict[str, WireStats]:
        """What went over the connection to each server, since it was made."""
        return {name: endpoint.stats() for name, endpoint in list(self.endpoints.items())}

    def break_off(self, reason: str) -> None:
        """From any thread: ends all waits."""
        dialing = self._dialing
        if dialing is not None:
            dialing.give_up(reason)
        for endpoint in list(self.endpoints.values()):
            with contextlib.suppress(SynclineError):
                endpoint.close(reason)

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()
        for reader in self.readers.values():
            reader.close()
        if self.device_channel is not None:
            self.device_channel.close()
        self.arenas.close()
