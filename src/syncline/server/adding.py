"""What a relay does about the slices of its turn: this host's sums, the primary's, and what comes from others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np

from syncline.core.ring import HostLeaders
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import HostSum, WholeSum
from syncline.net.rpc import Request
from syncline.net.transport import buffer_of
from syncline.server.early import Counted, Early
from syncline.server.hosting import Hosting
from syncline.server.laying import Laid
from syncline.server.pool import Pool
from syncline.server.rules import Bytes
from syncline.server.saying import Outbox, Saying
from syncline.server.summing import Failed, Summed
from syncline.server.sums import divide, lay_shares, narrow, pieces_of
from syncline.server.turn import Place, Turn

#: Finds what a neighbour has lent for this generation, by slice.
Lent = Callable[[str], "dict[int, Bytes]"]
NOTHING_LAID = Laid({}, {}, frozenset())


class Adding:
    """One server's part in it, as a host leader, a primary or a neighbour.

    What is done for a slice says whether it is done `again`: what was begun early is left alone when the forecast of
    its round has not held.
    """

    def __init__(
        self, generation: int, host_leaders: HostLeaders, hosting: Hosting, pool: Pool,
        *, lent: Lent, summed: Summed, failed: Failed,
    ) -> None:  # fmt: skip
        self.generation, self._deputies, self._hosting, self._pool = generation, host_leaders, hosting, pool
        self._lent, self._summed, self._failed = lent, summed, failed
        self._name, self.host = hosting.name, host_leaders.host_of(hosting.name)
        self.lock = threading.Lock()  # nothing is sent, and nobody else's lock is taken, under it
        self.is_closed = False
        self.laid = NOTHING_LAID  # before the first sum
        self.turn: Turn | None = None  # the round that is added up, until it is applied
        self.staged = Early()
        self._outboxes: dict[str, Outbox] = {}

    def close(self) -> list[Saying]:
        """Under the lock. Returns what need not be said any more."""
        self.is_closed, turn, self.turn = True, self.turn, None
        for outbox in self._outboxes.values():
            outbox.close()
        said = [saying for _, saying in turn.sayings] if turn is not None else []
        return [*said, *(saying for place in self.laid.places.values() for saying in place.given)]

    def here(self, turn: Turn) -> Counted:
        """The commits of this host's workers."""
        return [commit for commit in turn.counted if self._deputies.host_of(commit.worker) == self.host]

    def is_deputy(self, number: int) -> bool:
        """Whether this server is, on its host."""
        return self._deputies.of(number).get(self.host) == self._name

    def is_primary(self, place: Place) -> bool:
        return self._deputies.primary(place.number) == self._name

    def do(self, turn: Turn, place: Place, anew: bool, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                if not self.is_closed:
                    action()
            except Exception as error:  # whoever waits must hear of it, whatever it is; unless it was for nothing
                with self.lock:
                    is_wanted = self._is_wanted(turn, place, anew)
                    if is_wanted and turn.work is None:
                        turn.errors[place.number] = error
                if is_wanted and turn.work is not None:
                    self._failed(turn.work, error)

        self._pool.submit(run)

    def _is_free(self, turn: Turn, place: Place, anew: bool, action: Callable[[], None]) -> bool:
        """Whether no neighbour reads there what the round before has left; if one does, this is done after that."""
        with self.lock:
            if all(saying.is_acknowledged for saying in place.given):
                return True
            place.waiting.append(lambda: self.do(turn, place, anew, action))
            return False

    def _freed(self, place: Place) -> None:
        with self.lock:
            if not all(saying.is_acknowledged for saying in place.given):
                return
            waiting, place.waiting = place.waiting, []
        for action in waiting:
            action()

    # -- sums ---------------------------------------------------------------------------------------------

    def _is_wanted(self, turn: Turn, place: Place, anew: bool) -> bool:
        """Under the lock: whether the round that this is done for is still the one, and the slice not begun again."""
        return self.turn is turn and place.number in turn.by_number and turn.is_anew(place.number) == anew

    def add(self, turn: Turn, place: Place, anew: bool) -> None:
        """This host's gradients."""
        if not self._is_free(turn, place, anew, functools.partial(self.add, turn, place, anew)):
            return
        with place.lock:
            with self.lock:
                if not self._is_wanted(turn, place, anew):
                    return
                here, equal = self.here(turn), turn.equal
                if turn.work is None:
                    here = self.staged.with_arrays(here)
            with self._hosting.home.at_work():
                lay_shares(place.slot, here, place.wide, equal)
        if self.is_primary(place):
            self._has_come(turn, place, anew, self.host)
        else:
            primary = self.laid.partners[self._deputies.primary(place.number)]
            message = HostSum(self.generation, turn.number, place.number, anew)
            self._say(turn, place, anew, Saying(primary, message, [place.wide_bytes]))

    def _has_come(self, turn: Turn, place: Place, anew: bool, host: str) -> None:
        with self.lock:
            if not self._is_wanted(turn, place, anew):
                return
            turn.missing[place.number].discard(host)
            is_last = not turn.missing[place.number]
        if is_last:
            self._finish(turn, place, anew)

    def _finish(self, turn: Turn, place: Place, anew: bool) -> None:
        """At its primary: the sums of all hosts are here."""
        if not self._is_free(turn, place, anew, functools.partial(self._finish, turn, place, anew)):
            return
        with place.lock:
            with self.lock:
                if not self._is_wanted(turn, place, anew):
                    return
                counted, equal, weight, pushed = turn.counted, turn.equal, turn.weight, turn.hosts[place.number]
                hosts = [host for host in place.host_leaders if host in pushed and host != self.host]
                others = [place.parts.pop(host) for host in hosts]
            with self._hosting.home.at_work():
                place.add(others, is_first=self.host not in pushed)
                divide(place.slot, counted, place.wide, weight, equal)
                assert place.region is not None
                narrow(place.slot, place.wide, place.region.flat)
        with self.lock:
            place.spare += others
        self._give(turn, place, anew)

    def _give(self, turn: Turn, place: Place, anew: bool) -> None:
        """The sum is here: to those who have it from here."""
        assert place.region is not None
        message = WholeSum(self.generation, turn.number, place.number, anew)
        data = [buffer_of(place.region.array)]
        near = self._deputies.neighbours(self._name)
        far = [name for name in place.host_leaders.values() if name != self._name] if self.is_primary(place) else []
        partners, readers, freed = self.laid.partners, self.laid.readers, functools.partial(self._freed, place)
        given = [Saying(partners[name], message, then=freed) for name in near if name in readers]
        with self.lock:
            if not self._is_wanted(turn, place, anew):
                return
            place.given = given
        for saying in given:
            saying.send()
        for name in [*(name for name in near if name not in readers), *far]:
            self._say(turn, place, anew, Saying(partners[name], message, data))
        self._has(turn, place, anew)

    def _say(self, turn: Turn, place: Place, anew: bool, saying: Saying) -> None:
        name = saying.partner.name
        with self.lock:
            if self.is_closed or not self._is_wanted(turn, place, anew):
                return
            turn.sayings.append((place.number, saying))
            if name not in self._outboxes:
                self._outboxes[name] = Outbox(name)
            self._outboxes[name].put(saying)

    def _has(self, turn: Turn, place: Place, anew: bool) -> None:
        with self.lock:
            if not self._is_wanted(turn, place, anew):
                return
            assert place.region is not None and place.number in turn.left
            turn.sums.put(place.slot, place.region, pieces_of(place.slot, turn.counted))
            turn.left.discard(place.number)
            work = turn.work if not turn.left else None
        if work is not None and not self.is_closed:
            self._summed(work, turn.sums)

    # -- what comes ---------------------------------------------------------------------------------------

    def take_part(self, turn: Turn, request: Request, message: HostSum) -> None:
        """At a primary: another host's sum."""
        host = self._deputies.host_of(request.peer.name)
        with self.lock:
            place = turn.by_number.get(message.slice)
            is_wanted = place is not None and self._is_wanted(turn, place, message.anew)
            is_new = is_wanted and host in turn.missing[message.slice]
            if place is not None and is_new and host not in place.parts:
                place.parts[host] = np.frombuffer(request.payload[0], np.uint8)
            else:
                is_new = False
        request.reply(Done())
        if place is not None and is_new:
            self.do(turn, place, message.anew, functools.partial(self._has_come, turn, place, message.anew, host))

    def take_whole(self, turn: Turn, request: Request, message: WholeSum) -> None:
        """At a host leader or a neighbour: the sum of all."""
        is_lent = not request.payload
        with self.lock:
            place = turn.by_number.get(message.slice)
            is_wanted = place is not None and self._is_wanted(turn, place, message.anew)
            is_new = is_wanted and message.slice in turn.awaited
            is_kept = is_wanted and is_lent
            if is_new:
                turn.awaited.discard(message.slice)
            if is_kept:
                turn.unanswered.append((message.slice, request))  # until the round is through, it is read there
        if not is_kept:
            request.reply(Done())
        if place is not None and is_new:
            data = None if is_lent else np.frombuffer(request.payload[0], np.uint8)
            got = functools.partial(self._got, turn, place, message.anew, request.peer.name, data)
            self.do(turn, place, message.anew, got)

    def _got(self, turn: Turn, place: Place, anew: bool, sender: str, data: Bytes | None) -> None:
        if not self._is_free(turn, place, anew, functools.partial(self._got, turn, place, anew, sender, data)):
            return
        with place.lock:
            with self.lock:
                if not self._is_wanted(turn, place, anew):
                    return
            if data is None:
                place.read_in(self._lent(sender)[place.number])
            else:
                place.take(data)
        if self.is_deputy(place.number):
            self._give(turn, place, anew)
        else:
            self._has(turn, place, anew)
