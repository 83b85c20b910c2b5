"""A relay: the sums of one generation of a ring, made inside hosts first and carried between hosts by host leaders.

Rounds are added up one after the other, each when the one before is applied here: first what workers stage early, by
the forecast of the round, and the rest when it is whole. Memory, and what others lend, is that of the generation:
what is still on its way when that ends goes nowhere.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from syncline.core.forecast import Forecasts
from syncline.core.layout import ITEM_BYTES, Segment, Slice
from syncline.core.members import by_name
from syncline.core.ring import HostLeaders
from syncline.core.slice_state import Identity
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import HostSum, WholeSum
from syncline.errors import ProtocolError, SynclineError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.server.adding import NOTHING_LAID, Adding, Lent
from syncline.server.early import forecast_commits, settle_forecast
from syncline.server.hosted import HostedSlice
from syncline.server.hosting import Hosting
from syncline.server.laying import lay_out
from syncline.server.pool import Pool
from syncline.server.summing import Failed, Summed
from syncline.server.sums import counted_in, wide_of
from syncline.server.turn import Place, Turn
from syncline.server.work import Contribution, RoundWork

_LOOK_SECONDS = 0.005


class _Key(NamedTuple):
    """Of a sum that has come: of which round, whether it is made again, of which slice, and from whom."""

    round: int
    anew: bool
    slice: int
    sender: str


class Relay:
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
        self._adding = Adding(generation, host_leaders, hosting, pool, lent=lent, summed=summed, failed=failed)
        self._lock = self._adding.lock
        self._works: collections.deque[RoundWork] = collections.deque()  # whole here, in their order
        self._forecasts = Forecasts()
        self._kept: dict[_Key, Request] = {}  # of rounds that others have begun before us
        self._most_kept = 4 * len(names) * (1 + hosting.num_slices)
        self._is_supplied, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # -- its beginning and its end ------------------------------------------------------------------------

    def supplied(self) -> None:
        self._is_supplied.set()

    def submit(self, work: RoundWork) -> None:
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
            waiting = [*self._kept.values(), *(request for _, request in (turn.unanswered if turn else ()))]
            said = self._adding.close()
            self._works.clear()
            self._kept.clear()
        for saying in said:
            saying.take_back()
        if waiting:  # not here: nothing is sent under `order`
            threading.Thread(target=_answer, args=(waiting,), name="end of relay", daemon=True).start()

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
                self._kept[_Key(message.round, message.anew, message.slice, request.peer.name)] = request

    # -- rounds -------------------------------------------------------------------------------------------

    def staged_by(self, worker: str) -> list[HostedSlice]:
        """The slices whose pushes come here from this worker."""
        if self._deputies.host_of(worker) != self._adding.host:
            return []
        return [slot for slot in self._hosting.copies() if self._adding.is_deputy(slot.part.id)]

    def stage_early(self, worker: Identity, clock: int, contribution: Contribution, slices: set[int]) -> None:
        """What a worker of this host has staged before its commit."""
        with self._lock:
            self._adding.staged.note(worker, clock, contribution, slices)
        self._go_on(slices)

    def _go_on(self, staged: set[int] | None = None) -> None:
        """The next round begins with its forecast, and goes on when it is whole. `staged`: nothing is new but these
        slices."""
        adding = self._adding
        with self._lock:
            if adding.is_closed or adding.laid is NOTHING_LAID:
                return
            turn, is_new = adding.turn, adding.turn is None
            if turn is None:
                turn = adding.turn = self._next_turn()
            if turn is None:
                return
            is_whole, answered = turn.work is None and bool(self._works), list[Request]()
            if is_whole:
                work = self._works.popleft()
                answered = turn.take_up(work, settle_forecast(self._forecasts, work, len(turn.by_number)))
            places = self._to_add(turn, None if is_new or is_whole else staged)
            turn.begun.update(place.number for place in places)
            kept = self._kept_for(turn) if is_new or is_whole else []
            is_summed = not turn.left
        _answer(answered)
        if is_whole and turn.errors:
            self._failed(work, next(iter(turn.errors.values())))
        elif is_whole and is_summed:
            self._summed(work, turn.sums)
        for place in places:
            anew = turn.is_anew(place.number)
            adding.do(turn, place, anew, functools.partial(adding.add, turn, place, anew))
        for request in kept:
            assert isinstance(request.message, HostSum | WholeSum)
            self.hear(request, request.message)

    def _next_turn(self) -> Turn | None:
        number, shares = self._forecasts.number, self._forecasts.next
        if not shares and not self._works:
            return None
        counted = forecast_commits(shares) if shares else counted_in(self._works[0])
        return Turn(number, counted, self._adding.laid.places.values(), self._deputies.host_of)

    def _to_add(self, turn: Turn, staged: set[int] | None) -> list[Place]:
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
        numbers = [key for key in self._kept if key.round == turn.number and (turn.work is not None or not key.anew)]
        return [self._kept.pop(key) for key in numbers]

    def is_through(self, work: RoundWork) -> None:
        """Its memory may be used again, by the next round and by those who have lent it."""
        with self._lock:
            turn = self._adding.turn
            if turn is None or turn.work is not work:
                return
            self._adding.turn = None
            for place in turn.by_number.values():
                place.empty()  # a round that has failed may leave something
        for _, saying in turn.sayings:
            saying.take_back()  # if it has not come, it was not needed
        _answer([request for _, request in turn.unanswered])
        self._go_on()

    def awaited(self) -> tuple[RoundWork, list[str]] | None:
        """The round that is added up, and of whom something is missing here."""
        with self._lock:
            turn = self._adding.turn
            if turn is None or turn.work is None or not turn.left:
                return None
            names = {name for number in turn.left for name in self._missing(turn, turn.by_number[number])}
            return turn.work, sorted(names - {self._hosting.name}, key=by_name)

    def _missing(self, turn: Turn, place: Place) -> list[str]:
        reading = [saying.partner.name for saying in place.given if not saying.is_acknowledged]
        if reading:
            return reading
        if self._adding.is_primary(place):
            return [place.host_leaders[host] for host in turn.missing[place.number]]
        is_deputy = self._adding.is_deputy(place.number)
        return [self._deputies.primary(place.number) if is_deputy else place.host_leaders[self._adding.host]]

    # -- what comes ---------------------------------------------------------------------------------------

    def landing(self, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
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
                is_wanted = message.slice in turn.awaited and not turn.is_anew(message.slice) and not message.anew
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
        key = _Key(message.round, message.anew, message.slice, request.peer.name)
        with self._lock:
            turn = self._adding.turn
            is_over = self._closed.is_set() or message.round < (turn.number if turn else self._forecasts.number)
            is_on = turn is not None and turn.number == message.round and (turn.work is not None or not message.anew)
            if not is_over and not is_on:
                if key not in self._kept and len(self._kept) >= self._most_kept:
                    raise ProtocolError(f"{request.peer} gives sums of rounds that nobody knows")
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
