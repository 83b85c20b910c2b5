"""One round of the hierarchical reducer: the sums of this host, of primaries, and of other hosts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from syncline.core.layout import aligned
from syncline.core.ring import HostLeaders
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import HostSum, ShareSums, WholeSum
from syncline.errors import SynclineError
from syncline.net.memory import HeapMemory
from syncline.net.reliable_send import Outbox, Partner, ReliableSend
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Memory, buffer_of
from syncline.reduce.kernels import Reducer, narrow
from syncline.server.hosting import Hosting
from syncline.server.pool import Pool
from syncline.server.reduce.reducer import Counted, Early, Failed, Summed
from syncline.server.reduce.sums import counted_in, divide, equal_weight, lay_shares, pieces_of, wide_type
from syncline.server.replicate import Region
from syncline.server.rules import Bytes
from syncline.server.slices import HostedSlice, RoundSums
from syncline.server.tasks import RoundTask


class HostSlot:
    """One slice at one server, as long as a generation lasts: where it is added up, and where its sum lies then."""

    def __init__(self, slot: HostedSlice, host_leaders: Mapping[str, str], region: Region | None) -> None:
        """`region`: of a host leader, which its neighbours read too."""
        self.slot, self.number, self.host_leaders = slot, slot.part.id, host_leaders
        self.region, self.is_own = region, region is not None  # None: where neighbours have it, or made when it comes
        self.lock = threading.Lock()  # whoever writes the region has it
        self._wide: torch.Tensor | None = None
        self.parts: dict[str, Bytes] = {}  # at its primary: sums of other hosts
        self.spare: list[Bytes] = []  # memory of such
        self.given: Sequence[ReliableSend] = ()  # to neighbours, which read the region until they have answered
        self.waiting: list[Callable[[], None]] = []  # for that

    @property
    def wide(self) -> torch.Tensor:
        """In which this host's gradients are added up: the region itself, where that is as wide."""
        assert self.region is not None
        if self._wide is None:
            kind, flat = wide_type(self.slot), self.region.flat
            self._wide = flat if flat.dtype == kind else torch.zeros(flat.numel(), dtype=kind)
        return self._wide

    @property
    def _wide_array(self) -> Bytes:
        found: Bytes = self.wide.view(torch.uint8).numpy()
        return found

    @property
    def wide_bytes(self) -> Buffer:
        return buffer_of(self._wide_array)

    def add(self, parts: Iterable[Bytes], *, is_first: bool) -> None:
        """Other hosts' sums, in their order; `is_first`: there are none of this host."""
        reducer, total = Reducer(str(self.wide.dtype).removeprefix("torch."), "sum", 1), self._wide_array
        for part in parts:
            if is_first:
                total[...] = part
            else:
                reducer.merge(total, part)
            is_first = False

    def read_in(self, view: Bytes) -> None:
        """A neighbour's memory, where the sum lies."""
        if self.region is None or self.region.array.ctypes.data != view.ctypes.data:
            self.region, self.is_own = Region(view, self.slot.part.dtype), False

    def take(self, data: Bytes) -> None:
        """A sum that has come as bytes."""
        if self.region is None or not self.is_own:
            self.region = Region(np.zeros(self.slot.part.num_bytes, np.uint8), self.slot.part.dtype)
            self.is_own = True
        if self.region.array.ctypes.data != data.ctypes.data:
            self.region.array[:] = data

    def empty(self) -> None:
        """What came for a round that failed, or that turned out otherwise, is dropped."""
        self.spare += self.parts.values()
        self.parts.clear()


class Turn:
    """The sums of one round. All under the hierarchical reducer's lock."""

    def __init__(
        self,
        number: int,
        counted: Counted,
        places: Iterable[HostSlot],
        host_of: Callable[[str], str],
        *,
        is_again: bool = False,
    ) -> None:
        """`number`: of the round, in its generation; `counted`: its commits, or the expected ones; `is_again`: it
        replaces the turn of an expected round that turned out otherwise."""
        self.number, self.counted, self.is_again = number, counted, is_again
        self.equal = equal_weight(counted)
        self.work: RoundTask | None = None  # when it is complete
        self.error: Exception | None = None  # of what was done before that
        self.sayings: list[ReliableSend] = []
        self.unanswered: list[Request] = []  # of slices that are read where they lie
        self.hosts: dict[int, set[str]] = {}  # by slice that anybody has pushed anything of: who has
        self.by_number: dict[int, HostSlot] = {}
        for place in places:
            pushed = {host_of(c.worker) for c in counted if place.slot.touched_by(c.item.pushed)}
            if pushed:
                self.hosts[place.number], self.by_number[place.number] = pushed, place
        self.missing = {number: set(hosts) for number, hosts in self.hosts.items()}  # at primaries
        self.left, self.awaited = set(self.hosts), set(self.hosts)  # whose sum is not here; has not come
        self.begun: set[int] = set()  # slices of which this host's sum is being made here, or is
        self.sums = RoundSums()

    @property
    def weight(self) -> float:
        """Of the whole round."""
        return sum(commit.item.weight for commit in self.counted)

    def take_up(self, work: RoundTask) -> None:
        """Its round is complete, and has the commits that it was begun with."""
        self.work, self.counted = work, counted_in(work)

    def end(self) -> list[Request]:
        """The round is through, or another turn replaces this one. Returns the requests to answer: what these
        neighbours have shared is not read any more."""
        for place in self.by_number.values():
            place.empty()
        for saying in self.sayings:
            saying.take_back()  # if it has not come, it was not needed
        return self.unanswered


#: For a neighbour to take what is lent; otherwise it is sent sums.
LEND_SECONDS = 10.0


class Laid(NamedTuple):
    """By slice, and by server; `readers`: those that are not sent sums, but read them where they lie."""

    places: dict[int, HostSlot]
    partners: dict[str, Partner]
    readers: frozenset[str]


def lay_out(generation: int, names: Sequence[str], host_leaders: HostLeaders, hosting: Hosting) -> Laid:
    """Connects with all others; neighbours get the memory in which the sums will lie that they have from here."""
    slots = {slot.part.id: slot for slot in hosting.copies()}
    host, near = host_leaders.host_of(hosting.name), host_leaders.neighbours(hosting.name)
    offsets, total = dict[int, int](), 0
    for number in sorted(slots):
        if host_leaders.of(number).get(host) == hosting.name:
            offsets[number], total = total, total + aligned(slots[number].part.num_bytes)
    memory = _memory(hosting, total) if near and offsets else HeapMemory(total)
    partners = {partner.name: partner for partner in hosting.partners_named(names)}
    readers, message = set[str](), ShareSums(generation, total, list(offsets.items()))
    for name, partner in partners.items():
        with contextlib.suppress(SynclineError, OSError):  # what is said to it is said again, with bytes
            partner.connect()
            if name in near and offsets and _lend(partner, memory, message):
                readers.add(name)
    places = {}
    for number, slot in slots.items():
        region = _region(memory, offsets, number, slot.part.num_bytes, slot.part.dtype)
        places[number] = HostSlot(slot, host_leaders.of(number), region)
    return Laid(places, partners, frozenset(readers))


def _memory(hosting: Hosting, num_bytes: int) -> Memory:
    try:
        return hosting.create_memory(num_bytes)
    except OSError:
        return HeapMemory(num_bytes)  # too little to share: sums are sent


def _lend(partner: Partner, memory: Memory, message: ShareSums) -> bool:
    endpoint = partner.connect()
    if not (endpoint.shares_memory and endpoint.can_carry(memory)):
        return False
    endpoint.call(message, attachment=memory).wait(LEND_SECONDS)
    return True


def _region(memory: Memory, offsets: Mapping[int, int], number: int, size: int, dtype: str) -> Region | None:
    """Without its memory: the bytes are there as long as anybody uses them, its descriptor is not needed."""
    start = offsets.get(number)
    return Region(memory.array[start : start + size], dtype) if start is not None else None


#: Finds what a neighbour has lent for this generation, by slice.
Lent = Callable[[str], "dict[int, Bytes]"]
NOTHING_LAID = Laid({}, {}, frozenset())


class HostRound:
    """One server's part in it, as a host leader, a primary or a neighbour.

    What is done for a slice names its turn. If another turn has replaced that one, nothing more is done.
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

    def close(self) -> list[ReliableSend]:
        """Under the lock. Returns what need not be said any more."""
        self.is_closed, turn, self.turn = True, self.turn, None
        for outbox in self._outboxes.values():
            outbox.close()
        said = turn.sayings if turn is not None else []
        return [*said, *(saying for place in self.laid.places.values() for saying in place.given)]

    def here(self, turn: Turn) -> Counted:
        """The commits of this host's workers."""
        return [commit for commit in turn.counted if self._deputies.host_of(commit.worker) == self.host]

    def is_deputy(self, number: int) -> bool:
        """Whether this server is, on its host."""
        return self._deputies.of(number).get(self.host) == self._name

    def is_primary(self, place: HostSlot) -> bool:
        return self._deputies.primary(place.number) == self._name

    def do(self, turn: Turn, place: HostSlot, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                if not self.is_closed:
                    action()
            except Exception as error:  # whoever waits must hear of it, whatever it is; unless it was for nothing
                with self.lock:
                    is_wanted = self.turn is turn
                    if is_wanted and turn.work is None:
                        turn.error = error
                if is_wanted and turn.work is not None:
                    self._failed(turn.work, error)

        self._pool.submit(run)

    def _is_free(self, turn: Turn, place: HostSlot, action: Callable[[], None]) -> bool:
        """Whether no neighbour reads there what the round before has left; if one does, this is done after that."""
        with self.lock:
            if all(saying.is_acknowledged for saying in place.given):
                return True
            place.waiting.append(lambda: self.do(turn, place, action))
            return False

    def _freed(self, place: HostSlot) -> None:
        with self.lock:
            if not all(saying.is_acknowledged for saying in place.given):
                return
            waiting, place.waiting = place.waiting, []
        for action in waiting:
            action()

    # -- sums ---------------------------------------------------------------------------------------------

    def add(self, turn: Turn, place: HostSlot) -> None:
        """This host's gradients."""
        if not self._is_free(turn, place, functools.partial(self.add, turn, place)):
            return
        with place.lock:
            with self.lock:
                if self.turn is not turn:
                    return
                here, equal = self.here(turn), turn.equal
                if turn.work is None:
                    here = self.staged.with_arrays(here)
            with self._hosting.home.at_work():
                lay_shares(place.slot, here, place.wide, equal)
        if self.is_primary(place):
            self._has_come(turn, place, self.host)
        else:
            primary = self.laid.partners[self._deputies.primary(place.number)]
            message = HostSum(self.generation, turn.number, place.number, turn.is_again)
            self._say(turn, ReliableSend(primary, message, [place.wide_bytes]))

    def _has_come(self, turn: Turn, place: HostSlot, host: str) -> None:
        with self.lock:
            if self.turn is not turn:
                return
            turn.missing[place.number].discard(host)
            is_last = not turn.missing[place.number]
        if is_last:
            self._finish(turn, place)

    def _finish(self, turn: Turn, place: HostSlot) -> None:
        """At its primary: the sums of all hosts are here."""
        if not self._is_free(turn, place, functools.partial(self._finish, turn, place)):
            return
        with place.lock:
            with self.lock:
                if self.turn is not turn:
                    return
                counted, equal, weight, pushed = turn.counted, turn.equal, turn.weight, turn.hosts[place.number]
                hosts = [host for host in place.host_leaders if host in pushed and host != self.host]
                others = [place.parts.pop(host) for host in hosts]
            with self._hosting.home.at_work():
                place.add(others, is_first=self.host not in pushed)
                divide(place.slot, counted, place.wide, weight, equal)
                assert place.region is not None
                narrow(place.wide, place.region.flat)
        with self.lock:
            place.spare += others
        self._give(turn, place)

    def _give(self, turn: Turn, place: HostSlot) -> None:
        """The sum is here: to those who have it from here."""
        assert place.region is not None
        message = WholeSum(self.generation, turn.number, place.number, turn.is_again)
        data = [buffer_of(place.region.array)]
        near = self._deputies.neighbours(self._name)
        far = [name for name in place.host_leaders.values() if name != self._name] if self.is_primary(place) else []
        partners, readers, freed = self.laid.partners, self.laid.readers, functools.partial(self._freed, place)
        given = [ReliableSend(partners[name], message, then=freed) for name in near if name in readers]
        with self.lock:
            if self.turn is not turn:
                return
            place.given = given
        for saying in given:
            saying.send()
        for name in [*(name for name in near if name not in readers), *far]:
            self._say(turn, ReliableSend(partners[name], message, data))
        self._has(turn, place)

    def _say(self, turn: Turn, saying: ReliableSend) -> None:
        name = saying.partner.name
        with self.lock:
            if self.is_closed or self.turn is not turn:
                return
            turn.sayings.append(saying)
            if name not in self._outboxes:
                self._outboxes[name] = Outbox(name)
            self._outboxes[name].put(saying)

    def _has(self, turn: Turn, place: HostSlot) -> None:
        with self.lock:
            if self.turn is not turn:
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
            is_wanted = self.turn is turn and place is not None and message.again == turn.is_again
            is_new = is_wanted and host in turn.missing[message.slice]
            if place is not None and is_new and host not in place.parts:
                place.parts[host] = np.frombuffer(request.payload[0], np.uint8)
            else:
                is_new = False
        request.reply(Done())
        if place is not None and is_new:
            self.do(turn, place, functools.partial(self._has_come, turn, place, host))

    def take_whole(self, turn: Turn, request: Request, message: WholeSum) -> None:
        """At a host leader or a neighbour: the sum of all."""
        is_lent = not request.payload
        with self.lock:
            place = turn.by_number.get(message.slice)
            is_wanted = self.turn is turn and place is not None and message.again == turn.is_again
            is_new = is_wanted and message.slice in turn.awaited
            is_kept = is_wanted and is_lent
            if is_new:
                turn.awaited.discard(message.slice)
            if is_kept:
                turn.unanswered.append(request)  # until the round is through, it is read there
        if not is_kept:
            request.reply(Done())
        if place is not None and is_new:
            data = None if is_lent else np.frombuffer(request.payload[0], np.uint8)
            got = functools.partial(self._got, turn, place, request.peer.name, data)
            self.do(turn, place, got)

    def _got(self, turn: Turn, place: HostSlot, sender: str, data: Bytes | None) -> None:
        if not self._is_free(turn, place, functools.partial(self._got, turn, place, sender, data)):
            return
        with place.lock:
            with self.lock:
                if self.turn is not turn:
                    return
            if data is None:
                place.read_in(self._lent(sender)[place.number])
            else:
                place.take(data)
        if self.is_deputy(place.number):
            self._give(turn, place)
        else:
            self._has(turn, place)
