"""A reducer for rings with several workers on a host: sums inside each host, then between one leader per host."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from syncline.core.members import by_name
from syncline.core.ring import HostLeaders
from syncline.core.slice_state import Identity
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import HostSum, ShareSums, WholeSum
from syncline.errors import ProtocolError, SynclineError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.reduce.host_round import NOT_SET_UP, ActiveRound, FindShared, HostRound, SliceMemory, set_up
from syncline.reduce.kernels import Bytes
from syncline.reduce.reducer import Participant
from syncline.reduce.rounds import NextRound, Round
from syncline.reduce.slices import Contributions, FindNumbers

_LOOK_SECONDS = 0.005


class _Key(NamedTuple):
    """Identifies a sum that another server sent."""

    round: int
    again: bool
    slice: int
    sender: str


class HierarchicalReducer:
    """One server's reducer of one generation."""

    def __init__(
        self,
        generation: int,
        names: Sequence[str],
        host_leaders: HostLeaders,
        server: Participant,
        *,
        shared_by: FindShared,
    ) -> None:
        self.generation, self.names, self.host_leaders, self._server = generation, names, host_leaders, server
        self._shared_by = shared_by
        self.host_round = HostRound(generation, host_leaders, server, shared_by=shared_by)
        self._lock = self.host_round.lock
        self._complete: collections.deque[Round] = collections.deque()  # in their order
        self.next_round = NextRound()
        self.kept: dict[_Key, Request] = {}  # sums of rounds that other servers have begun before this one
        self.most_kept = 4 * len(names) * (1 + server.num_slices)
        self._is_supplied, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # -- begin and end ------------------------------------------------------------------------------------

    def supplied(self) -> None:
        self._is_supplied.set()

    def reduce(self, complete: Round) -> None:
        with self._lock:
            self._complete.append(complete)
            if self._thread is None:
                self._thread = threading.Thread(target=self._set_up, name="hierarchical reducer", daemon=True)
                self._thread.start()
        self._advance()

    def _set_up(self) -> None:
        """Before the first sum: waits until no slice is being copied from or to this server, then shares memory."""
        try:
            while not self._closed.is_set() and not (self._is_supplied.is_set() and self._server.has_all()):
                self._closed.wait(_LOOK_SECONDS)
            if self._closed.is_set():
                return
            setup = set_up(self.generation, self.names, self.host_leaders, self._server)
        except Exception as error:  # the workers that wait must get it, whatever it is
            with self._lock:
                waiting = list(self._complete)
            for complete in waiting:
                complete.failed(error)
            return
        with self._lock:
            self.host_round.setup = setup
        self._advance()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            active = self.host_round.active
            unanswered = [*self.kept.values(), *(active.unanswered if active else ())]
            sends = self.host_round.close()
            self._complete.clear()
            self.kept.clear()
        for send in sends:
            send.take_back()
        if unanswered:  # in another thread: nothing is sent under the server's lock
            threading.Thread(target=_reply, args=(unanswered,), name="end of a reducer", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, seconds: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def keep(self, requests: Iterable[Request]) -> None:
        """Keeps sums that arrived before this server knew the generation."""
        for request in requests:
            assert isinstance(request.message, HostSum | WholeSum)
            with contextlib.suppress(SynclineError):
                self._check(request.peer, request.message, request)
                message = request.message
                self.kept[_Key(message.round, message.again, message.slice, request.peer.name)] = request

    # -- rounds -------------------------------------------------------------------------------------------

    def is_staged_here(self, worker: str, number: int) -> bool:
        """Workers stage a slice at its leader on their host."""
        return self.host_leaders.host_of(worker) == self.host_round.host and self.host_round.is_leader(number)

    def stage_early(self, worker: Identity, clock: int, numbers: FindNumbers, slices: set[int]) -> None:
        with self._lock:
            self.host_round.staged.note(worker, clock, numbers, slices)
        self._advance(slices)

    def _advance(self, staged: set[int] | None = None) -> None:
        """Begins the next round, as expected or complete, and adds up what is ready. `staged`: only these slices are
        new.
        """
        host_round = self.host_round
        with self._lock:
            if host_round.is_closed or host_round.setup is NOT_SET_UP:
                return
            active, is_new = host_round.active, host_round.active is None
            if active is None:
                active = host_round.active = self._begin_next()
            if active is None:
                return
            complete, unanswered = None, list[Request]()
            if active.round is None and self._complete:
                complete = self._complete.popleft()
                active, unanswered = self._completed(active, complete)
                host_round.active = active
            is_other = is_new or complete is not None
            ready = self._ready(active, None if is_other else staged)
            active.begun.update(memory.number for memory in ready)
            kept = self._kept_for(active) if is_other else []
            is_summed = not active.left
        _reply(unanswered)
        if complete is not None and active.error is not None:
            complete.failed(active.error)
        elif complete is not None and is_summed:
            complete.summed(active.sums)
        for memory in ready:
            host_round.submit(active, functools.partial(host_round.add_local, active, memory))
        for request in kept:
            assert isinstance(request.message, HostSum | WholeSum)
            self.receive(request, request.message)

    def _begin_next(self) -> ActiveRound | None:
        if self.next_round.expected:
            return self._activate(self.next_round.number, self.next_round.expected)
        return self._activate(self.next_round.number, self._complete[0].counted) if self._complete else None

    def _activate(self, number: int, counted: Contributions, *, is_again: bool = False) -> ActiveRound:
        memories = self.host_round.setup.memories.values()
        return ActiveRound(number, counted, memories, self.host_leaders.host_of, is_again=is_again)

    def _completed(self, active: ActiveRound, complete: Round) -> tuple[ActiveRound, list[Request]]:
        """The active round is complete. Returns the round that goes on, and requests of the one that does not."""
        was_expected = bool(self.next_round.expected)
        if self.next_round.settle(complete) or not was_expected:
            active.complete(complete)
            return active, []
        again = self._activate(active.number, complete.counted, is_again=True)
        again.complete(complete)
        return again, active.end()

    def _ready(self, active: ActiveRound, staged: set[int] | None) -> list[SliceMemory]:
        """The slices whose host sum can begin here; sums for other servers come first. `staged`: only of these."""
        host_round, local, found = self.host_round, self.host_round.local(active), []
        for number in active.by_number if staged is None else staged & active.by_number.keys():
            is_made_here = host_round.is_leader(number) and host_round.host in active.hosts[number]
            if number in active.begun or not is_made_here:
                continue
            memory = active.by_number[number]
            pushing = [each for each in local if memory.reduction.touched_by(each.pushed)]
            if active.round is not None or host_round.staged.has_all(pushing, number):
                found.append(memory)
        return sorted(found, key=host_round.is_primary)

    def _kept_for(self, active: ActiveRound) -> list[Request]:
        """Sums that are made again are kept until the round is complete here."""
        is_complete = active.round is not None
        keys = [key for key in self.kept if key.round == active.number and (is_complete or not key.again)]
        return [self.kept.pop(key) for key in keys]

    def release(self, complete: Round) -> None:
        with self._lock:
            active = self.host_round.active
            if active is None or active.round is not complete:
                return
            self.host_round.active = None
            unanswered = active.end()
        _reply(unanswered)
        self._advance()

    def waiting_for(self) -> tuple[Round, list[str]] | None:
        with self._lock:
            active = self.host_round.active
            if active is None or active.round is None or not active.left:
                return None
            names = {name for number in active.left for name in self._missing(active, active.by_number[number])}
            return active.round, sorted(names - {self._server.name}, key=by_name)

    def _missing(self, active: ActiveRound, memory: SliceMemory) -> list[str]:
        reading = [send.partner.name for send in memory.reads if not send.is_acknowledged]
        if reading:
            return reading
        if self.host_round.is_primary(memory):
            return [memory.leaders[host] for host in active.missing[memory.number]]
        is_leader = self.host_round.is_leader(memory.number)
        return [self.host_leaders.primary(memory.number) if is_leader else memory.leaders[self.host_round.host]]

    # -- messages -----------------------------------------------------------------------------------------

    def buffers_for(self, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
        """The receive buffers for a sum."""
        self._check(peer, message)
        reduction = self._server.find(message.slice)
        with self._lock:
            active, memory = self.host_round.active, self.host_round.setup.memories.get(message.slice)
            if isinstance(message, HostSum):
                spare = memory.spare if memory is not None else []
                return [buffer_of(spare.pop() if spare else np.empty(reduction.wide_bytes, np.uint8))]
            if active is not None and memory is not None and self._may_receive_in_place(active, memory, message):
                assert memory.memory is not None
                return [buffer_of(memory.memory)]
        return [buffer_of(np.empty(reduction.part.num_bytes, np.uint8))]

    def _may_receive_in_place(self, active: ActiveRound, memory: SliceMemory, message: WholeSum) -> bool:
        """Whether a sum can be received where it stays. An early sum cannot: the slice may be added up again there
        before all bytes have arrived. Nor can a sum that is made again: a thread may still write the early one.
        """
        is_complete = active.round is not None and active.number == message.round
        is_free = memory.is_own and memory.memory is not None and not memory.is_read
        is_first = not active.is_again and not message.again
        return is_complete and is_free and is_first and message.slice in active.not_received

    def _check(self, peer: Peer, message: HostSum | WholeSum, request: Request | None = None) -> None:
        """Refuses sums from servers that do not send them. `request`: the message has arrived with its bytes."""
        may = self.host_leaders.carries if isinstance(message, HostSum) else self.host_leaders.gives
        if not may(peer.name, message.slice, self._server.name):
            raise ProtocolError(f"{peer} gives a sum of slice {message.slice}, which another server has to send")
        is_shared = isinstance(message, WholeSum) and message.slice in self._shared_by(peer.name)
        if request is not None and not request.payload and not is_shared:
            raise ProtocolError(f"{peer} gives a sum of slice {message.slice} without its bytes")

    def receive(self, request: Request, message: HostSum | WholeSum) -> None:
        self._check(request.peer, message, request)
        key = _Key(message.round, message.again, message.slice, request.peer.name)
        with self._lock:
            active = self.host_round.active
            current = active.number if active is not None else self.next_round.number
            is_over = self._closed.is_set() or message.round < current
            is_known = active is not None and (active.round is not None or not message.again)
            is_active = active is not None and active.number == message.round and is_known
            if not is_over and not is_active:
                if key not in self.kept and len(self.kept) >= self.most_kept:
                    raise ProtocolError(f"{request.peer} gives sums of unknown rounds")
                self.kept[key] = request
                return
        if is_over or active is None:
            request.reply(Done())
        elif isinstance(message, HostSum):
            self.host_round.receive_part(active, request, message)
        else:
            self.host_round.receive_sum(active, request, message)


def _reply(requests: Iterable[Request]) -> None:
    for request in requests:
        request.reply(Done())


#: Messages are kept for this many generations that other servers have begun before this one.
_MOST_AHEAD = 4
SharedMemory = dict[int, Bytes]


class HierarchicalReducers:
    """Makes the hierarchical reducers of one server, and passes their messages on."""

    what = "the servers"

    def __init__(self, server: Participant) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._generation = 0
        self.current: HierarchicalReducer | None = None
        self.shared: dict[int, dict[str, SharedMemory]] = {}  # by generation and host leader
        self.early: list[tuple[int, Request]] = []  # sums of generations that other servers have begun

    def begin(self, generation: int, names: Sequence[str]) -> HierarchicalReducer | None:
        host_leaders = self._server.host_leaders() if self._server.name in names else None
        reducer: HierarchicalReducer | None = None
        with self._lock:
            self._generation = generation
            self.shared = {number: shared for number, shared in self.shared.items() if number >= generation}
            if host_leaders is not None:
                shared = self.shared.setdefault(generation, {})
                reducer = HierarchicalReducer(
                    generation, names, host_leaders, self._server, shared_by=lambda sender: shared.get(sender, {})
                )
            early = [request for number, request in self.early if number == generation]
            self.early = [(number, request) for number, request in self.early if number > generation]
            self.current = reducer
        if reducer is not None:
            reducer.keep(early)
        else:
            for request in early:
                self._server.submit(functools.partial(request.reply, Done()))
        return reducer

    def share(self, request: Request, message: ShareSums) -> None:
        """A host leader shares the memory of its sums, for one generation."""
        memory = request.attachment
        if memory is None or memory.array.nbytes < message.num_bytes:
            raise ProtocolError(f"{request.peer} announces shared memory that did not arrive")
        found: SharedMemory = {}
        for number, offset in message.places:
            size = self._server.find(number).part.num_bytes
            view = memory.array[offset : offset + size]
            if offset < 0 or view.nbytes != size:
                raise ProtocolError(f"{request.peer} names a place outside of the memory that it has shared")
            found[number] = view
        with self._lock:
            if self._is_near(message.generation):
                self.shared.setdefault(message.generation, {})[request.peer.name] = found
        request.reply(Done())

    def _is_near(self, generation: int) -> bool:
        return self._generation <= generation and len({*self.shared, generation}) <= _MOST_AHEAD

    def buffers_for(self, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
        """The receive buffers for a sum. Sums of past generations are received and discarded."""
        reducer = self.current
        if reducer is not None and reducer.generation == message.generation:
            return reducer.buffers_for(peer, message)
        reduction = self._server.find(message.slice)
        size = reduction.wide_bytes if isinstance(message, HostSum) else reduction.part.num_bytes
        return [buffer_of(np.empty(size, np.uint8))]

    def receive(self, request: Request, message: HostSum | WholeSum) -> None:
        generation = message.generation
        with self._lock:
            reducer = self.current
            is_early = generation > self._generation
            if is_early:
                if len(self.early) >= _MOST_AHEAD * (1 + self._server.num_slices) * self._server.num_servers:
                    raise ProtocolError(f"{request.peer} gives sums of unknown generations")
                self.early.append((generation, request))
        if is_early:
            return
        if reducer is None or generation < reducer.generation:
            request.reply(Done())
        else:
            reducer.receive(request, message)

    def close(self) -> None:
        with self._lock:
            self.current, self.early = None, []
