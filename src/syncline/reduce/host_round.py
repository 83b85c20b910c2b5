"""The sums that one server makes in a round of the hierarchical reducer: of its host, and of its own slices."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from syncline.core.layout import aligned
from syncline.core.ring import HostLeaders
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import HostSum, ShareSums, WholeSum
from syncline.errors import SynclineError
from syncline.net.memory import HeapMemory
from syncline.net.reliable_send import Outbox, Partner, ReliableSend
from syncline.net.rpc import Request
from syncline.net.transport import Memory, buffer_of
from syncline.reduce.kernels import Bytes, Numbers, Reducer, numbers_of
from syncline.reduce.reducer import Participant
from syncline.reduce.rounds import EarlyStages, Round, SliceSum, equal_weight, total_weight
from syncline.reduce.slices import Contributions, SliceReduction


class SliceMemory:
    """The memory of one slice's sums at one server, for a generation."""

    def __init__(self, reduction: SliceReduction, leaders: Mapping[str, str], memory: Bytes | None) -> None:
        """`leaders`: the slice's leader on each host. `memory`: for the sum, at a host leader; its local peers map it
        too.
        """
        self.reduction, self.number, self.leaders = reduction, reduction.number, leaders
        #: Where the sum is, in the dtype of the slice; at a local peer, the memory of its host leader.
        self.memory, self.is_own = memory, memory is not None
        self.lock = threading.Lock()  # held by a thread that writes the memory
        self._numbers: Numbers = None  # the memory as numbers
        self._wide: Numbers = None
        self._wide_memory: Bytes | None = None
        self.parts: dict[str, Bytes] = {}  # at the primary: the sums of other hosts
        self.spare: list[Bytes] = []  # receive buffers for them
        self.reads: Sequence[ReliableSend] = ()  # to local peers, which read the memory until they acknowledge
        self.waiting: list[Callable[[], None]] = []  # writes that wait for these reads

    @property
    def is_read(self) -> bool:
        """Whether a local peer still reads the memory."""
        return not all(send.is_acknowledged for send in self.reads)

    def wide(self) -> tuple[Numbers, Bytes]:
        """Where this host's gradients are added up, as numbers and as bytes: the memory itself, if it has the dtype
        of sums.
        """
        if self._wide_memory is None:
            assert self.memory is not None
            dtype, wide_dtype = self.reduction.part.dtype, self.reduction.wide_dtype
            self._numbers = self._wide = numbers_of(self.memory, dtype)
            self._wide_memory = self.memory
            if wide_dtype != dtype:
                self._wide_memory = np.zeros(self.reduction.wide_bytes, np.uint8)
                self._wide = numbers_of(self._wide_memory, wide_dtype)
        return self._wide, self._wide_memory

    def add_hosts(self, parts: Iterable[Bytes], *, is_first: bool) -> None:
        """Adds the sums of other hosts, in the given order. `is_first`: this host has none of its own."""
        reducer, total = Reducer(self.reduction.wide_dtype, "sum", 1), self.wide()[1]
        for part in parts:
            if is_first:
                total[...] = part
            else:
                reducer.merge(total, part)
            is_first = False

    def finish(self, contributions: Contributions, weight: float, equal: float | None) -> None:
        """Makes the final sum or mean from the sum of all hosts."""
        wide, _ = self.wide()
        self.reduction.finish(contributions, wide, self._numbers, weight, equal)

    def use(self, view: Bytes) -> None:
        """The sum is in the memory of the host leader."""
        if self.memory is None or self.memory.ctypes.data != view.ctypes.data:
            self.memory, self.is_own = view, False

    def store(self, data: Bytes) -> None:
        """The sum came as bytes."""
        if self.memory is None or not self.is_own:
            self.memory, self.is_own = np.zeros(self.reduction.part.num_bytes, np.uint8), True
        if self.memory.ctypes.data != data.ctypes.data:
            self.memory[:] = data

    def clear(self) -> None:
        """Drops the parts of a round that failed, or that is added up again."""
        self.spare += self.parts.values()
        self.parts.clear()


class ActiveRound:
    """The state of the round that is being added up, guarded by the lock of `HostRound`."""

    def __init__(
        self,
        number: int,
        counted: Contributions,
        memories: Iterable[SliceMemory],
        host_of: Callable[[str], str],
        *,
        is_again: bool = False,
    ) -> None:
        """`number`: of the round, in its generation. `counted`: its contributions, or the expected ones. `is_again`:
        it replaces an expected round that turned out to be another one.
        """
        self.number, self.counted, self.is_again = number, counted, is_again
        self.equal = equal_weight(counted)
        self.round: Round | None = None  # set when it is complete
        self.error: Exception | None = None  # raised before that
        self.sends: list[ReliableSend] = []
        self.unanswered: list[Request] = []  # of host leaders whose memory is read here
        self.hosts: dict[int, set[str]] = {}  # by slice: the hosts that contribute
        self.by_number: dict[int, SliceMemory] = {}
        for memory in memories:
            hosts = {host_of(each.worker) for each in counted if memory.reduction.touched_by(each.pushed)}
            if hosts:
                self.hosts[memory.number], self.by_number[memory.number] = hosts, memory
        self.missing = {number: set(hosts) for number, hosts in self.hosts.items()}  # at primaries: hosts
        self.left = set(self.hosts)  # slices without a sum here
        self.not_received = set(self.hosts)  # slices whose sum has not arrived
        self.begun: set[int] = set()  # slices whose host sum is made here
        self.sums: list[SliceSum] = []

    def complete(self, found: Round) -> None:
        """The round is complete, and has the contributions that the sums began with."""
        self.round, self.counted = found, found.counted

    def end(self) -> list[Request]:
        """The round is over, or is added up again. Returns the requests to answer: the memory of these host leaders
        is not read any more.
        """
        for memory in self.by_number.values():
            memory.clear()
        for send in self.sends:
            send.take_back()  # a receiver without it does not need it any more
        return self.unanswered


#: A local peer that does not map shared memory within this time is sent its sums.
SHARE_SECONDS = 10.0


class Setup(NamedTuple):
    """What a server prepares before the first sum of a generation."""

    memories: dict[int, SliceMemory]  #: by slice
    partners: dict[str, Partner]
    readers: frozenset[str]  #: local peers that map this server's memory; others are sent sums


NOT_SET_UP = Setup({}, {}, frozenset())


def set_up(generation: int, names: Sequence[str], host_leaders: HostLeaders, server: Participant) -> Setup:
    """Connects to all other servers, and shares the memory for sums with local peers."""
    slices = {reduction.number: reduction for reduction in server.slices()}
    host, local_peers = host_leaders.host_of(server.name), host_leaders.local_peers(server.name)
    offsets, total = dict[int, int](), 0
    for number in sorted(slices):
        if host_leaders.of(number).get(host) == server.name:
            offsets[number], total = total, total + aligned(slices[number].part.num_bytes)
    memory = _create_memory(server, total) if local_peers and offsets else HeapMemory(total)
    partners = {partner.name: partner for partner in server.partners(names)}
    readers, message = set[str](), ShareSums(generation, total, list(offsets.items()))
    for name, partner in partners.items():
        with contextlib.suppress(SynclineError, OSError):  # sends are repeated, and carry the bytes
            partner.connect()
            if name in local_peers and offsets and _share(partner, memory, message):
                readers.add(name)
    memories = {}
    for number, reduction in slices.items():
        start = offsets.get(number)
        # The view keeps the bytes alive; the file descriptor is not needed any more.
        view = memory.array[start : start + reduction.part.num_bytes] if start is not None else None
        memories[number] = SliceMemory(reduction, host_leaders.of(number), view)
    return Setup(memories, partners, frozenset(readers))


def _create_memory(server: Participant, num_bytes: int) -> Memory:
    try:
        return server.create_memory(num_bytes)
    except OSError:
        return HeapMemory(num_bytes)  # too little memory to share: sums are sent


def _share(partner: Partner, memory: Memory, message: ShareSums) -> bool:
    endpoint = partner.connect()
    if not (endpoint.shares_memory and endpoint.can_carry(memory)):
        return False
    endpoint.call(message, attachment=memory).wait(SHARE_SECONDS)
    return True


#: Finds the memory that a host leader has shared in this generation, by slice.
FindShared = Callable[[str], Mapping[int, Bytes]]


class HostRound:
    """Makes the sums of one server, round after round: as leader of its host, as primary, or as a local peer.

    Every action for a slice names its round. If another round has replaced that one, the action does nothing.
    """

    def __init__(
        self, generation: int, host_leaders: HostLeaders, server: Participant, *, shared_by: FindShared
    ) -> None:
        self.generation, self._host_leaders, self._server, self._shared_by = (
            generation,
            host_leaders,
            server,
            shared_by,
        )
        self.name, self.host = server.name, host_leaders.host_of(server.name)
        self.lock = threading.Lock()  # nothing is sent and no other lock is taken under it
        self.is_closed = False
        self.setup = NOT_SET_UP
        self.active: ActiveRound | None = None  # until it is applied
        self.staged = EarlyStages()
        self._outboxes: dict[str, Outbox] = {}

    def close(self) -> list[ReliableSend]:
        """Under the lock. Returns the sends to take back."""
        self.is_closed, active, self.active = True, self.active, None
        for outbox in self._outboxes.values():
            outbox.close()
        sends = active.sends if active is not None else []
        return [*sends, *(send for memory in self.setup.memories.values() for send in memory.reads)]

    def local(self, active: ActiveRound) -> Contributions:
        """The contributions of this host's workers."""
        return [each for each in active.counted if self._host_leaders.host_of(each.worker) == self.host]

    def is_leader(self, number: int) -> bool:
        """Whether this server is the leader of its host for this slice."""
        return self._host_leaders.of(number).get(self.host) == self.name

    def is_primary(self, memory: SliceMemory) -> bool:
        return self._host_leaders.primary(memory.number) == self.name

    def submit(self, active: ActiveRound, action: Callable[[], None]) -> None:
        """Runs an action in a thread of the server. An error fails the round, now or when it is complete."""

        def run() -> None:
            try:
                if not self.is_closed:
                    action()
            except Exception as error:  # the workers that wait must get it, whatever it is
                with self.lock:
                    is_current, complete = self.active is active, active.round
                    if is_current and complete is None:
                        active.error = error
                if is_current and complete is not None:
                    complete.failed(error)

        self._server.submit(run)

    def _may_write(self, active: ActiveRound, memory: SliceMemory, action: Callable[[], None]) -> bool:
        """Whether no local peer reads the sum of the round before. If one does, the action runs after that."""
        with self.lock:
            if not memory.is_read:
                return True
            memory.waiting.append(lambda: self.submit(active, action))
            return False

    def _was_read(self, memory: SliceMemory) -> None:
        with self.lock:
            if memory.is_read:
                return
            waiting, memory.waiting = memory.waiting, []
        for action in waiting:
            action()

    # -- sums ---------------------------------------------------------------------------------------------

    def add_local(self, active: ActiveRound, memory: SliceMemory) -> None:
        """At a host leader: adds up the gradients of its host."""
        if not self._may_write(active, memory, functools.partial(self.add_local, active, memory)):
            return
        with memory.lock:
            with self.lock:
                if self.active is not active:
                    return
                local, equal = self.local(active), active.equal
                if active.round is None:
                    local = self.staged.with_numbers(local)
            wide, wide_memory = memory.wide()
            memory.reduction.add_up(local, wide, equal)
        if self.is_primary(memory):
            self._host_is_here(active, memory, self.host)
        else:
            primary = self.setup.partners[self._host_leaders.primary(memory.number)]
            message = HostSum(self.generation, active.number, memory.number, active.is_again)
            self._send(active, ReliableSend(primary, message, [buffer_of(wide_memory)]))

    def _host_is_here(self, active: ActiveRound, memory: SliceMemory, host: str) -> None:
        with self.lock:
            if self.active is not active:
                return
            active.missing[memory.number].discard(host)
            is_last = not active.missing[memory.number]
        if is_last:
            self._finish(active, memory)

    def _finish(self, active: ActiveRound, memory: SliceMemory) -> None:
        """At the primary: the sums of all hosts are here."""
        if not self._may_write(active, memory, functools.partial(self._finish, active, memory)):
            return
        with memory.lock:
            with self.lock:
                if self.active is not active:
                    return
                counted, equal, hosts = active.counted, active.equal, active.hosts[memory.number]
                others = [host for host in memory.leaders if host in hosts and host != self.host]
                parts = [memory.parts.pop(host) for host in others]
            memory.add_hosts(parts, is_first=self.host not in hosts)
            memory.finish(counted, total_weight(counted), equal)
        with self.lock:
            memory.spare += parts
        self._distribute(active, memory)

    def _distribute(self, active: ActiveRound, memory: SliceMemory) -> None:
        """The sum is here: passes it to local peers, and from the primary to the other host leaders."""
        assert memory.memory is not None
        message = WholeSum(self.generation, active.number, memory.number, active.is_again)
        data, local_peers = [buffer_of(memory.memory)], self._host_leaders.local_peers(self.name)
        leaders = [name for name in memory.leaders.values() if name != self.name] if self.is_primary(memory) else []
        partners, readers, was_read = (
            self.setup.partners,
            self.setup.readers,
            functools.partial(self._was_read, memory),
        )
        reads = [ReliableSend(partners[name], message, then=was_read) for name in local_peers if name in readers]
        with self.lock:
            if self.active is not active:
                return
            memory.reads = reads
        for send in reads:
            send.send()
        for name in [*(name for name in local_peers if name not in readers), *leaders]:
            self._send(active, ReliableSend(partners[name], message, data))
        self._has_sum(active, memory)

    def _send(self, active: ActiveRound, send: ReliableSend) -> None:
        name = send.partner.name
        with self.lock:
            if self.is_closed or self.active is not active:
                return
            active.sends.append(send)
            if name not in self._outboxes:
                self._outboxes[name] = Outbox(name)
            self._outboxes[name].put(send)

    def _has_sum(self, active: ActiveRound, memory: SliceMemory) -> None:
        with self.lock:
            if self.active is not active:
                return
            assert memory.memory is not None and memory.number in active.left
            active.sums.append(SliceSum(memory.reduction, memory.memory))
            active.left.discard(memory.number)
            complete = active.round if not active.left else None
        if complete is not None and not self.is_closed:
            complete.summed(active.sums)

    # -- messages -----------------------------------------------------------------------------------------

    def receive_part(self, active: ActiveRound, request: Request, message: HostSum) -> None:
        """At the primary: the sum of another host."""
        host = self._host_leaders.host_of(request.peer.name)
        with self.lock:
            memory = active.by_number.get(message.slice)
            is_current = self.active is active and memory is not None and message.again == active.is_again
            is_new = is_current and host in active.missing[message.slice]
            if memory is not None and is_new and host not in memory.parts:
                memory.parts[host] = np.frombuffer(request.payload[0], np.uint8)
            else:
                is_new = False
        request.reply(Done())
        if memory is not None and is_new:
            self.submit(active, functools.partial(self._host_is_here, active, memory, host))

    def receive_sum(self, active: ActiveRound, request: Request, message: WholeSum) -> None:
        """At a host leader or a local peer: the sum over all hosts, as bytes or in shared memory."""
        is_shared = not request.payload
        with self.lock:
            memory = active.by_number.get(message.slice)
            is_current = self.active is active and memory is not None and message.again == active.is_again
            is_new = is_current and message.slice in active.not_received
            is_read = is_current and is_shared
            if is_new:
                active.not_received.discard(message.slice)
            if is_read:
                active.unanswered.append(request)  # the answer ends the read
        if not is_read:
            request.reply(Done())
        if memory is not None and is_new:
            data = None if is_shared else np.frombuffer(request.payload[0], np.uint8)
            self.submit(active, functools.partial(self._received, active, memory, request.peer.name, data))

    def _received(self, active: ActiveRound, memory: SliceMemory, sender: str, data: Bytes | None) -> None:
        if not self._may_write(active, memory, functools.partial(self._received, active, memory, sender, data)):
            return
        with memory.lock:
            with self.lock:
                if self.active is not active:
                    return
            if data is None:
                memory.use(self._shared_by(sender)[memory.number])
            else:
                memory.store(data)
        if self.is_leader(memory.number):
            self._distribute(active, memory)
        else:
            self._has_sum(active, memory)
