"""Sums of a ring with several workers on a host: inside each host first, then between one leader per host."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from syncline.config import JobConfig
from syncline.core.layout import ITEM_BYTES, Segment, Slice
from syncline.core.members import by_name
from syncline.core.ring import HostLeaders
from syncline.core.slice_state import Identity
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import HostSum, ShareSums, WholeSum
from syncline.errors import ProtocolError, SynclineError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.server.commits import Commits
from syncline.server.hosting import Hosting
from syncline.server.pool import Pool
from syncline.server.reduce.host_round import NOTHING_LAID, HostRound, HostSlot, Lent, Turn, lay_out
from syncline.server.reduce.reducer import Counted, Failed, NextRound, Summed, expected_commits
from syncline.server.reduce.sums import counted_in, wide_of
from syncline.server.rules import Bytes
from syncline.server.slices import HostedSlice
from syncline.server.tasks import RoundTask, StagedCommit

_LOOK_SECONDS = 0.005


class _Key(NamedTuple):
    """Of a sum that has come: of which round, whether it is made again, of which slice, and from whom."""

    round: int
    again: bool
    slice: int
    sender: str


class HierarchicalReducer:
    """One server's part in it, as a host leader, a primary or a neighbour."""

    def __init__(
        self,
        generation: int,
        names: Sequence[str],
        host_leaders: HostLeaders,
        hosting: Hosting,
        pool: Pool,
        *,
        lent: Lent,
        summed: Summed,
        failed: Failed,
    ) -> None:
        self.generation, self.names, self._deputies, self._hosting = generation, names, host_leaders, hosting
        self._lent, self._summed, self._failed = lent, summed, failed
        self._adding = HostRound(generation, host_leaders, hosting, pool, lent=lent, summed=summed, failed=failed)
        self._lock = self._adding.lock
        self._works: collections.deque[RoundTask] = collections.deque()  # whole here, in their order
        self._next_round = NextRound()
        self._kept: dict[_Key, Request] = {}  # of rounds that others have begun before us
        self._most_kept = 4 * len(names) * (1 + hosting.num_slices)
        self._is_supplied, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # -- its beginning and its end ------------------------------------------------------------------------

    def supplied(self) -> None:
        self._is_supplied.set()

    def submit(self, work: RoundTask) -> None:
        with self._lock:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._begin, name="relay", daemon=True)
                self._thread.start()
        self._go_on()

    def _begin(self) -> None:
        """Before the first sum: nobody's copy is on its way any more, from here or to here; neighbours have what
        sums will lie in."""
        try:
            while not self._closed.is_set() and not (self._is_supplied.is_set() and self._hosting.has_all()):
                self._closed.wait(_LOOK_SECONDS)
            if self._closed.is_set():
                return
            laid = lay_out(self.generation, self.names, self._deputies, self._hosting)
        except Exception as error:  # whoever waits must hear of it, whatever it is
            with self._lock:
                works = list(self._works)
            for work in works:
                self._failed(work, error)
            return
        with self._lock:
            self._adding.laid = laid
        self._go_on()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            turn = self._adding.turn
            waiting = [*self._kept.values(), *(turn.unanswered if turn else ())]
            said = self._adding.close()
            self._works.clear()
            self._kept.clear()
        for saying in said:
            saying.take_back()
        if waiting:  # not here: nothing is sent under `state_lock`
            threading.Thread(target=_answer, args=(waiting,), name="end of hierarchical reducer", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, seconds: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def keep(self, requests: Iterable[Request]) -> None:
        """What came before this server was told of the generation."""
        for request in requests:
            assert isinstance(request.message, HostSum | WholeSum)
            with contextlib.suppress(SynclineError):
                self._check(request.peer, request.message, request)
                message = request.message
                self._kept[_Key(message.round, message.again, message.slice, request.peer.name)] = request

    # -- rounds -------------------------------------------------------------------------------------------

    def staged_by(self, worker: str) -> list[HostedSlice]:
        """The slices whose pushes come here from this worker."""
        if self._deputies.host_of(worker) != self._adding.host:
            return []
        return [slot for slot in self._hosting.copies() if self._adding.is_deputy(slot.part.id)]

    def stage_early(self, worker: Identity, clock: int, contribution: StagedCommit, slices: set[int]) -> None:
        """What a worker of this host has staged before its commit."""
        with self._lock:
            self._adding.staged.note(worker, clock, contribution, slices)
        self._go_on(slices)

    def _go_on(self, staged: set[int] | None = None) -> None:
        """The next round begins as it is expected, and goes on when it is complete. `staged`: only these slices are
        new."""
        adding = self._adding
        with self._lock:
            if adding.is_closed or adding.laid is NOTHING_LAID:
                return
            turn, is_new = adding.turn, adding.turn is None
            if turn is None:
                turn = adding.turn = self._next_turn()
            if turn is None:
                return
            is_complete, answered = turn.work is None and bool(self._works), list[Request]()
            if is_complete:
                work = self._works.popleft()
                turn, answered = self._taken_up(turn, work)
                adding.turn = turn
            places = self._to_add(turn, None if is_new or is_complete else staged)
            turn.begun.update(place.number for place in places)
            kept = self._kept_for(turn) if is_new or is_complete else []
            is_summed = not turn.left
        _answer(answered)
        if is_complete and turn.error is not None:
            self._failed(work, turn.error)
        elif is_complete and is_summed:
            self._summed(work, turn.sums)
        for place in places:
            adding.do(turn, place, functools.partial(adding.add, turn, place))
        for request in kept:
            assert isinstance(request.message, HostSum | WholeSum)
            self.hear(request, request.message)

    def _next_turn(self) -> Turn | None:
        expected = self._next_round.expected
        if expected:
            return self._turn(self._next_round.number, expected_commits(expected))
        return self._turn(self._next_round.number, counted_in(self._works[0])) if self._works else None

    def _turn(self, number: int, counted: Counted, *, is_again: bool = False) -> Turn:
        places = self._adding.laid.places.values()
        return Turn(number, counted, places, self._deputies.host_of, is_again=is_again)

    def _taken_up(self, turn: Turn, work: RoundTask) -> tuple[Turn, list[Request]]:
        """The round of this turn is complete: the turn that goes on, and the requests of the one that does not."""
        was_expected = bool(self._next_round.expected)
        if self._next_round.settle(work) or not was_expected:
            turn.take_up(work)
            return turn, []
        again = self._turn(turn.number, counted_in(work), is_again=True)
        again.take_up(work)
        return again, turn.end()

    def _to_add(self, turn: Turn, staged: set[int] | None) -> list[HostSlot]:
        """The slices of which this host's sum can be made here, what is sent first; `staged`: only of these."""
        adding, here, found = self._adding, self._adding.here(turn), []
        for number in turn.by_number if staged is None else staged & turn.by_number.keys():
            if number in turn.begun or not adding.is_deputy(number) or adding.host not in turn.hosts[number]:
                continue
            place = turn.by_number[number]
            pushing = [commit for commit in here if place.slot.touched_by(commit.item.pushed)]
            if turn.work is not None or adding.staged.has_all(pushing, number):
                found.append(place)
        return sorted(found, key=adding.is_primary)

    def _kept_for(self, turn: Turn) -> list[Request]:
        """What is made again waits for its round to be whole here."""
        numbers = [key for key in self._kept if key.round == turn.number and (turn.work is not None or not key.again)]
        return [self._kept.pop(key) for key in numbers]

    def is_through(self, work: RoundTask) -> None:
        """Its memory may be used again, by the next round and by those who have lent it."""
        with self._lock:
            turn = self._adding.turn
            if turn is None or turn.work is not work:
                return
            self._adding.turn = None
            answered = turn.end()
        _answer(answered)
        self._go_on()

    def awaited(self) -> tuple[RoundTask, list[str]] | None:
        """The round that is added up, and of whom something is missing here."""
        with self._lock:
            turn = self._adding.turn
            if turn is None or turn.work is None or not turn.left:
                return None
            names = {name for number in turn.left for name in self._missing(turn, turn.by_number[number])}
            return turn.work, sorted(names - {self._hosting.name}, key=by_name)

    def _missing(self, turn: Turn, place: HostSlot) -> list[str]:
        reading = [saying.partner.name for saying in place.given if not saying.is_acknowledged]
        if reading:
            return reading
        if self._adding.is_primary(place):
            return [place.host_leaders[host] for host in turn.missing[place.number]]
        is_deputy = self._adding.is_deputy(place.number)
        return [self._deputies.primary(place.number) if is_deputy else place.host_leaders[self._adding.host]]

    # -- what comes ---------------------------------------------------------------------------------------

    def buffers_for(self, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
        """Where the bytes of a sum go."""
        self._check(peer, message)
        segment, part = self._hosting.find(message.slice)
        with self._lock:
            turn, place = self._adding.turn, self._adding.laid.places.get(message.slice)
            if isinstance(message, HostSum):
                spare = place.spare if place is not None else []
                return [buffer_of(spare.pop() if spare else np.empty(wide_bytes(segment, part), np.uint8))]
            # Never what is early: it may be added up again there before all bytes have come. Nor what is made again:
            # who added up early may not have left it yet.
            is_whole = turn is not None and turn.work is not None and turn.number == message.round
            if turn is not None and is_whole and place is not None and place.is_own and place.region is not None:
                is_wanted = message.slice in turn.awaited and not turn.is_again and not message.again
                if is_wanted and all(saying.is_acknowledged for saying in place.given):
                    return [buffer_of(place.region.array)]
        return [buffer_of(np.empty(part.num_bytes, np.uint8))]

    def _check(self, peer: Peer, message: HostSum | WholeSum, request: Request | None = None) -> None:
        """`request`: all of it is here, with its bytes, or where they lie."""
        may = self._deputies.carries if isinstance(message, HostSum) else self._deputies.gives
        if not may(peer.name, message.slice, self._hosting.name):
            raise ProtocolError(f"{peer} gives a sum of slice {message.slice}, which it is not the one to give")
        is_lent = isinstance(message, WholeSum) and message.slice in self._lent(peer.name)
        if request is not None and not request.payload and not is_lent:
            raise ProtocolError(f"{peer} gives a sum of slice {message.slice} without its bytes")

    def hear(self, request: Request, message: HostSum | WholeSum) -> None:
        self._check(request.peer, message, request)
        key = _Key(message.round, message.again, message.slice, request.peer.name)
        with self._lock:
            turn = self._adding.turn
            is_over = self._closed.is_set() or message.round < (turn.number if turn else self._next_round.number)
            is_on = turn is not None and turn.number == message.round and (turn.work is not None or not message.again)
            if not is_over and not is_on:
                if key not in self._kept and len(self._kept) >= self._most_kept:
                    raise ProtocolError(f"{request.peer} gives sums of unknown rounds")
                self._kept[key] = request
                return
        if is_over or turn is None:
            request.reply(Done())
        elif isinstance(message, HostSum):
            self._adding.take_part(turn, request, message)
        else:
            self._adding.take_whole(turn, request, message)


def wide_bytes(segment: Segment, part: Slice) -> int:
    """Of a host's sum of a slice."""
    return part.num_bytes // ITEM_BYTES[part.dtype] * wide_of(segment, part).itemsize


def _answer(requests: Iterable[Request]) -> None:
    for request in requests:
        request.reply(Done())


#: Generations that others may be ahead of us, and of which something is kept.
_MOST_AHEAD = 4
LentRegions = dict[int, Bytes]


class HierarchicalReducers:
    """Of one server."""

    what = "the servers"

    def __init__(self, config: JobConfig, commits: Commits, hosting: Hosting, pool: Pool) -> None:
        self._config, self._commits, self._hosting, self._pool = config, commits, hosting, pool
        self._lock = threading.Lock()
        self._generation = 0
        self._relay: HierarchicalReducer | None = None
        self._lent: dict[int, dict[str, LentRegions]] = {}  # by generation and neighbour: where its sums lie
        self._early: list[tuple[int, Request]] = []  # of generations that others have begun before us

    def begin(
        self, generation: int, names: Sequence[str], summed: Summed, failed: Failed
    ) -> HierarchicalReducer | None:
        host_leaders = self._hosting.deputies_by(self._config) if self._hosting.name in names else None
        relay: HierarchicalReducer | None = None
        for slot in self._hosting.copies():
            slot.rules.forget_staged()  # regions of the generation before
        with self._lock:
            self._generation = generation
            self._lent = {number: lent for number, lent in self._lent.items() if number >= generation}
            if host_leaders is not None:
                lent = self._lent.setdefault(generation, {})
                relay = HierarchicalReducer(
                    generation, names, host_leaders, self._hosting, self._pool,
                    lent=lambda sender: lent.get(sender, {}), summed=summed, failed=failed,
                )  # fmt: skip
            early = [request for number, request in self._early if number == generation]
            self._early = [(number, request) for number, request in self._early if number > generation]
            self._relay = relay
        if relay is not None:
            relay.keep(early)
        else:
            for request in early:
                self._pool.submit(functools.partial(request.reply, Done()))  # as for what comes from now on
        departures, self._commits.decoding.takes_all = self._commits.departures, relay is not None
        departures.stage_by(relay.staged_by if relay is not None else None)
        return relay

    def lend(self, request: Request, message: ShareSums) -> None:
        """A neighbour's memory: kept for as long as its generation lasts."""
        memory = request.attachment
        if memory is None or memory.array.nbytes < message.num_bytes:
            raise ProtocolError(f"{request.peer} lends memory that did not come")
        found: LentRegions = {}
        for number, offset in message.places:
            size = self._hosting.find(number)[1].num_bytes
            view = memory.array[offset : offset + size]
            if offset < 0 or view.nbytes != size:
                raise ProtocolError(f"{request.peer} names a place outside of what it has lent")
            found[number] = view
        with self._lock:
            if self._is_near(message.generation):
                self._lent.setdefault(message.generation, {})[request.peer.name] = found
        request.reply(Done())

    def _is_near(self, generation: int) -> bool:
        return self._generation <= generation and len({*self._lent, generation}) <= _MOST_AHEAD

    def buffers_for(self, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
        """Where the bytes of a sum go; what is of another generation goes nowhere, or waits."""
        relay = self._relay
        if relay is not None and relay.generation == message.generation:
            return relay.buffers_for(peer, message)
        segment, part = self._hosting.find(message.slice)
        size = wide_bytes(segment, part) if isinstance(message, HostSum) else part.num_bytes
        return [buffer_of(np.empty(size, np.uint8))]

    def hear(self, request: Request, message: HostSum | WholeSum) -> None:
        generation = message.generation
        with self._lock:
            relay = self._relay
            is_early = generation > self._generation
            if is_early:
                if len(self._early) >= _MOST_AHEAD * (1 + self._hosting.num_slices) * len(self._hosting.servers()):
                    raise ProtocolError(f"{request.peer} gives sums of unknown generations")
                self._early.append((generation, request))
        if is_early:
            return
        if relay is None or generation < relay.generation:
            request.reply(Done())
        else:
            relay.hear(request, message)

    def close(self) -> None:
        with self._lock:
            self._relay, self._early = None, []
