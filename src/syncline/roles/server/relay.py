"""A relay: the sums of one generation of a ring, made inside hosts first and carried between hosts by deputies.

Rounds are added up one after the other, each when the one before is applied here. Memory, and what others lend, is
that of the generation: what is still on its way when that ends goes nowhere.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from syncline.core.deputies import Deputies
from syncline.core.layout import ITEM_BYTES, Segment, Slice
from syncline.core.message import Done
from syncline.core.standings import by_name
from syncline.core.traffic import HostSum, WholeSum
from syncline.core.votes import Ballot
from syncline.errors import ProtocolError, SynclineError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.roles.server.hosted import HostedSlice
from syncline.roles.server.hosting import Hosting
from syncline.roles.server.laying import Laid, lay_out
from syncline.roles.server.pool import Pool
from syncline.roles.server.rules import Bytes
from syncline.roles.server.saying import Outbox, Saying
from syncline.roles.server.summing import Failed, Summed
from syncline.roles.server.sums import divide, lay_shares, narrow, pieces_of, wide_of
from syncline.roles.server.turn import Place, Turn
from syncline.roles.server.work import RoundWork

_LOOK_SECONDS = 0.005
#: Ballots of rounds that are through: of what is said again of them, nothing is kept.
_NUM_OVER = 64
#: Finds what a neighbour has lent for this generation, by slice.
Lent = Callable[[str], "dict[int, Bytes]"]
_NOTHING = Laid({}, {}, frozenset())


class Relay:
    """One server's part in it, as a deputy, a primary or a neighbour."""

    def __init__(
        self,
        generation: int,
        names: Sequence[str],
        deputies: Deputies,
        hosting: Hosting,
        pool: Pool,
        *,
        lent: Lent,
        summed: Summed,
        failed: Failed,
    ) -> None:
        self.generation, self.names, self._deputies, self._hosting, self._pool = (
            generation, names, deputies, hosting, pool
        )  # fmt: skip
        self._lent, self._summed, self._failed = lent, summed, failed
        self._name, self._host = hosting.name, deputies.host_of(hosting.name)
        self._lock = threading.Lock()  # nothing is sent, and nobody else's lock is taken, under it
        self._laid = _NOTHING  # before the first sum
        self._outboxes: dict[str, Outbox] = {}
        self._works: collections.deque[RoundWork] = collections.deque()  # whole here, in their order
        self._turn: Turn | None = None  # the round that is added up, until it is applied
        self._over: collections.deque[Ballot] = collections.deque(maxlen=_NUM_OVER)
        self._kept: dict[tuple[Ballot, int, str], Request] = {}  # of rounds that others have begun before us
        self._most_kept = 2 * len(names) * (1 + hosting.num_slices)
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
        while not self._closed.is_set() and not (self._is_supplied.is_set() and self._hosting.has_all()):
            self._closed.wait(_LOOK_SECONDS)
        if self._closed.is_set():
            return
        try:
            laid = lay_out(self.generation, self.names, self._deputies, self._hosting)
        except Exception as error:  # whoever waits must hear of it, whatever it is
            with self._lock:
                works = list(self._works)
            for work in works:
                self._failed(work, error)
            return
        with self._lock:
            self._laid = laid
        self._go_on()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            turn, self._turn = self._turn, None
            waiting = [*self._kept.values(), *(turn.unanswered if turn is not None else ())]
            places = list(self._laid.places.values())
            self._works.clear()
            self._kept.clear()
            for outbox in self._outboxes.values():
                outbox.close()
        for saying in [*(turn.sayings if turn is not None else ()), *(s for place in places for s in place.given)]:
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
            key = (request.message.ballot, request.message.slice, request.peer.name)
            with contextlib.suppress(SynclineError):
                self._check(request.peer, request.message, request)
                self._kept[key] = request

    # -- rounds -------------------------------------------------------------------------------------------

    def is_deputy(self, number: int) -> bool:
        """Whether this server is, on its host."""
        return self._deputies.of(number).get(self._host) == self._name

    def staged_by(self, worker: str) -> list[HostedSlice]:
        """The slices whose pushes come here from this worker."""
        if self._deputies.host_of(worker) != self._host:
            return []
        return [slot for slot in self._hosting.copies() if self.is_deputy(slot.part.id)]

    def _go_on(self) -> None:
        with self._lock:
            laid = self._laid
            if self._closed.is_set() or laid is _NOTHING or self._turn is not None or not self._works:
                return
            turn = self._turn = Turn(self._works.popleft(), laid.places.values(), self._deputies.host_of)
            kept = [self._kept.pop(key) for key in list(self._kept) if key[0] == turn.ballot]
        if not turn.places:
            self._summed(turn.work, turn.sums)
            return
        for place in sorted(turn.places, key=self._is_primary):  # what is sent goes first
            if self.is_deputy(place.number) and self._host in turn.hosts[place.number]:
                self._do(turn, functools.partial(self._add, turn, place))
        for request in kept:
            assert isinstance(request.message, HostSum | WholeSum)
            self.hear(request, request.message)

    def is_through(self, work: RoundWork) -> None:
        """Its memory may be used again, by the next round and by those who have lent it."""
        with self._lock:
            turn = self._turn
            if turn is None or turn.work is not work:
                return
            self._turn = None
            self._over.append(turn.ballot)
        for saying in turn.sayings:
            saying.take_back()  # if it has not come, it was not needed
        _answer(turn.unanswered)
        self._go_on()

    def awaited(self) -> tuple[RoundWork, list[str]] | None:
        """The round that is added up, and of whom something is missing here."""
        with self._lock:
            turn = self._turn
            if turn is None or not turn.left:
                return None
            names = {name for number in turn.left for name in self._missing(turn, turn.by_number[number])}
            return turn.work, sorted(names - {self._name}, key=by_name)

    def _missing(self, turn: Turn, place: Place) -> list[str]:
        reading = [saying.partner.name for saying in place.given if not saying.is_acknowledged]
        if reading:
            return reading
        if self._is_primary(place):
            return [place.deputies[host] for host in turn.missing[place.number]]
        return [self._deputies.primary(place.number) if self.is_deputy(place.number) else place.deputies[self._host]]

    def _is_primary(self, place: Place) -> bool:
        return self._deputies.primary(place.number) == self._name

    def _do(self, turn: Turn, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                if not self._closed.is_set():
                    action()
            except Exception as error:  # whoever waits must hear of it, whatever it is
                self._failed(turn.work, error)

        self._pool.submit(run)

    def _is_free(self, turn: Turn, place: Place, action: Callable[[], None]) -> bool:
        """Whether no neighbour reads there what the round before has left; if one does, this is done after that."""
        with self._lock:
            if all(saying.is_acknowledged for saying in place.given):
                return True
            place.waiting.append(lambda: self._do(turn, action))
            return False

    def _freed(self, place: Place) -> None:
        with self._lock:
            if not all(saying.is_acknowledged for saying in place.given):
                return
            waiting, place.waiting = place.waiting, []
        for action in waiting:
            action()

    # -- sums ---------------------------------------------------------------------------------------------

    def _add(self, turn: Turn, place: Place) -> None:
        """This host's gradients."""
        if not self._is_free(turn, place, functools.partial(self._add, turn, place)):
            return
        here = [commit for commit in turn.counted if self._deputies.host_of(commit.worker) == self._host]
        with self._hosting.home.at_work():
            lay_shares(place.slot, here, place.wide, turn.equal)
        if self._is_primary(place):
            self._has_come(turn, place, self._host)
        else:
            primary = self._laid.partners[self._deputies.primary(place.number)]
            self._say(turn, Saying(primary, HostSum(turn.ballot, place.number), [place.wide_bytes]))

    def _has_come(self, turn: Turn, place: Place, host: str) -> None:
        with self._lock:
            turn.missing[place.number].discard(host)
            is_last = not turn.missing[place.number]
        if is_last:
            self._finish(turn, place)

    def _finish(self, turn: Turn, place: Place) -> None:
        """At its primary: the sums of all hosts are here."""
        if not self._is_free(turn, place, functools.partial(self._finish, turn, place)):
            return
        hosts = [host for host in place.deputies if host in turn.hosts[place.number] and host != self._host]
        others = [place.parts.pop(host) for host in hosts]
        with self._hosting.home.at_work():
            place.add(others, is_first=self._host not in turn.hosts[place.number])
            divide(place.slot, turn.counted, place.wide, turn.work.weight, turn.equal)
            assert place.region is not None
            narrow(place.slot, place.wide, place.region.flat)
        with self._lock:
            place.spare += others
        self._give(turn, place)

    def _give(self, turn: Turn, place: Place) -> None:
        """The sum is here: to those who have it from here."""
        assert place.region is not None
        message, data = WholeSum(turn.ballot, place.number), [buffer_of(place.region.array)]
        near = self._deputies.neighbours(self._name)
        far = [name for name in place.deputies.values() if name != self._name] if self._is_primary(place) else []
        partners, readers, freed = self._laid.partners, self._laid.readers, functools.partial(self._freed, place)
        given = [Saying(partners[name], message, then=freed) for name in near if name in readers]
        with self._lock:
            place.given = given
        for saying in given:
            saying.send()
        for name in [*(name for name in near if name not in readers), *far]:
            self._say(turn, Saying(partners[name], message, data))
        self._has(turn, place)

    def _say(self, turn: Turn, saying: Saying) -> None:
        name = saying.partner.name
        with self._lock:
            if self._closed.is_set():
                return
            turn.sayings.append(saying)
            if name not in self._outboxes:
                self._outboxes[name] = Outbox(name)
            self._outboxes[name].put(saying)

    def _has(self, turn: Turn, place: Place) -> None:
        with self._lock:
            assert place.region is not None and place.number in turn.left
            turn.sums.put(place.slot, place.region, pieces_of(place.slot, turn.counted))
            turn.left.discard(place.number)
            is_last = not turn.left
        if is_last and not self._closed.is_set():
            self._summed(turn.work, turn.sums)

    # -- what comes ---------------------------------------------------------------------------------------

    def landing(self, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
        """Where the bytes of a sum go."""
        self._check(peer, message)
        segment, part = self._hosting.find(message.slice)
        with self._lock:
            turn, place = self._turn, self._laid.places.get(message.slice)
            if isinstance(message, HostSum):
                spare = place.spare if place is not None else []
                return [buffer_of(spare.pop() if spare else np.empty(wide_bytes(segment, part), np.uint8))]
            is_wanted = turn is not None and turn.ballot == message.ballot and message.slice in turn.awaited
            is_free = place is not None and all(saying.is_acknowledged for saying in place.given)
            if place is not None and place.region is not None and place.is_own and is_wanted and is_free:
                return [buffer_of(place.region.array)]
        return [buffer_of(np.empty(part.num_bytes, np.uint8))]

    def _check(self, peer: Peer, message: HostSum | WholeSum, request: Request | None = None) -> None:
        """`request`: all of it is here, with its bytes, or where they lie."""
        may = self._deputies.carries if isinstance(message, HostSum) else self._deputies.gives
        if not may(peer.name, message.slice, self._name):
            raise ProtocolError(f"{peer} gives a sum of slice {message.slice}, which it is not the one to give")
        is_lent = isinstance(message, WholeSum) and message.slice in self._lent(peer.name)
        if request is not None and not request.payload and not is_lent:
            raise ProtocolError(f"{peer} gives a sum of slice {message.slice} without its bytes")

    def hear(self, request: Request, message: HostSum | WholeSum) -> None:
        self._check(request.peer, message, request)
        key = (message.ballot, message.slice, request.peer.name)
        with self._lock:
            turn = self._turn
            is_over = self._closed.is_set() or message.ballot in self._over
            if not is_over and (turn is None or turn.ballot != message.ballot):
                if key not in self._kept and len(self._kept) >= self._most_kept:
                    raise ProtocolError(f"{request.peer} gives sums of rounds that nobody knows")
                self._kept[key] = request
                return
        if is_over or turn is None:
            request.reply(Done())
        elif isinstance(message, HostSum):
            self._take_part(turn, request, message)
        else:
            self._take_whole(turn, request, message)

    def _take_part(self, turn: Turn, request: Request, message: HostSum) -> None:
        """At a primary: another host's sum."""
        host = self._deputies.host_of(request.peer.name)
        with self._lock:
            place = turn.by_number.get(message.slice)
            is_new = place is not None and host in turn.missing[message.slice] and host not in place.parts
            if place is not None and is_new:
                place.parts[host] = np.frombuffer(request.payload[0], np.uint8)
        request.reply(Done())
        if place is not None and is_new:
            self._do(turn, functools.partial(self._has_come, turn, place, host))

    def _take_whole(self, turn: Turn, request: Request, message: WholeSum) -> None:
        """At a deputy or a neighbour: the sum of all."""
        is_lent = not request.payload
        with self._lock:
            place = turn.by_number.get(message.slice)
            is_new = place is not None and message.slice in turn.awaited
            turn.awaited.discard(message.slice)
            if is_lent:
                turn.unanswered.append(request)  # it is read where it lies, until the round is through
        if not is_lent:
            request.reply(Done())
        if place is not None and is_new:
            data = None if is_lent else np.frombuffer(request.payload[0], np.uint8)
            self._do(turn, functools.partial(self._got, turn, place, request.peer.name, data))

    def _got(self, turn: Turn, place: Place, sender: str, data: Bytes | None) -> None:
        if not self._is_free(turn, place, functools.partial(self._got, turn, place, sender, data)):
            return
        if data is None:
            place.read_in(self._lent(sender)[place.number])
        else:
            place.take(data)
        if self.is_deputy(place.number):
            self._give(turn, place)
        else:
            self._has(turn, place)


def wide_bytes(segment: Segment, part: Slice) -> int:
    """Of a host's sum of a slice."""
    return part.num_bytes // ITEM_BYTES[part.dtype] * wide_of(segment, part).itemsize


def _answer(requests: Iterable[Request]) -> None:
    for request in requests:
        request.reply(Done())
