"""Seeding: copies slices to another server while they are in use, one after the other with pauses."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from syncline import faults
from syncline.core.layout import aligned
from syncline.core.members import Member
from syncline.core.wire.control import SeedTo
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import ShareRegion
from syncline.errors import ConnectionLost, FencedError, SynclineError
from syncline.net.reliable_send import Partner
from syncline.net.rpc import Call, Endpoint, Request
from syncline.net.transport import Memory
from syncline.server.replicate import Region, Replica, Update, seed_of
from syncline.server.slices import HostedSlice
from syncline.server.tasks import FenceTask, in_thread

#: Poll interval for updates that follow a seed.
_LOOK_SECONDS = 0.001
#: How long a backup may take to apply the updates behind its seed, and how often its connection is checked.
_TAIL_SECONDS, _LOST_SECONDS = 60.0, 0.05
#: Pause before asking again a server that does not know yet that it is a backup.
_AGAIN_SECONDS = 0.01


class Seeding:
    """Seeds other servers from one thread at a time."""

    def __init__(self, slices: Mapping[int, HostedSlice]) -> None:
        self._slices = slices
        self._one_at_a_time = threading.Lock()

    def begin(self, request: Request, message: SeedTo, partner: Partner) -> None:
        in_thread("seed", request, lambda: self._seed_all(request, message, partner))

    def _seed_all(self, request: Request, message: SeedTo, partner: Partner) -> None:
        begun: list[HostedSlice] = []
        try:
            partner.connect()  # dialing a dead host takes ten seconds; seeds for others need not wait
            with self._one_at_a_time:
                endpoint = partner.current()
                if endpoint is None:
                    raise ConnectionLost(f"{partner.name} is gone again")
                slots = [slot for slot in self._slots(message.slices) if not _has(slot, message.target)]
                replicas = self._replicas(endpoint, partner, slots)
                for slot, replica in zip(slots, replicas, strict=True):
                    begun.append(slot)
                    took = self._seed(endpoint, slot, replica)
                    if slot is not slots[-1]:
                        time.sleep(took)
                if not all(_has(slot, message.target) for slot in self._slots(message.slices)):
                    raise ConnectionLost(f"{partner.name} is not counted on any more for some of these slices")
        except BaseException:
            for slot in begun:
                self._take_back(slot, partner)
            raise
        request.reply(Done())

    def _slots(self, numbers: Sequence[int]) -> list[HostedSlice]:
        found = [self._slices.get(number) for number in numbers]
        if any(slot is None for slot in found):
            missing = [number for number, slot in zip(numbers, found, strict=True) if slot is None]
            raise SynclineError(f"slice {missing[0]} has no primary here that could seed it")
        return [slot for slot in found if slot is not None]

    def _replicas(self, endpoint: Endpoint, partner: Partner, slots: Sequence[HostedSlice]) -> list[Replica]:
        """Creates replicas whose updates lie in shared memory, if the other side can map it."""
        total = sum(aligned(slot.part.num_bytes) for slot in slots)
        memory = share_region(endpoint, partner, total) if slots else None
        found, offset = [], 0
        for slot in slots:
            size = slot.part.num_bytes
            if memory is not None:
                region = Region(memory.array[offset : offset + size], slot.part.dtype, memory)
                found.append(Replica(partner, region, (partner.num_lent, offset)))
            else:
                found.append(alone_replica(partner, slot))
            offset += aligned(size)
        return found

    def _seed(self, endpoint: Endpoint, slot: HostedSlice, replica: Replica) -> float:
        """Sends the whole slice, then the updates since. Returns the seconds during which the slice was blocked."""
        with self._between_updates(slot):
            began = time.perf_counter()
            slot.state.stand_apart()  # from the seed on, the copy gets every round from here
            outgoing = seed_of(slot, replica.lent)
            replica.after_seed = collections.deque()
            slot.replicas = [*slot.replicas, replica]
        took = time.perf_counter() - began
        seed = outgoing.send(endpoint)
        if faults.armed is not None:
            faults.reach("seed.sent")
        while not seed.is_done:
            self._send_gathered(endpoint, slot, replica)
            seed.arrives(_LOOK_SECONDS)
        seed.wait(0)
        self._count_on_it(endpoint, slot, replica)
        return took

    @contextlib.contextmanager
    def _between_updates(self, slot: HostedSlice) -> Iterator[None]:
        """Holds the slice's lock while no update of it is in flight."""
        until = time.monotonic() + _TAIL_SECONDS
        while True:
            with slot.lock:
                if slot.in_flight is None:
                    yield
                    return
            if time.monotonic() > until:
                raise SynclineError(f"slice {slot.part.id} has an update in flight that is not through yet")
            time.sleep(_LOOK_SECONDS)

    def _send_gathered(self, endpoint: Endpoint, slot: HostedSlice, replica: Replica) -> None:
        """Sends the updates applied since the seed."""
        with slot.lock:
            _check_wanted(slot, replica)
            assert replica.after_seed is not None
            gathered = list(replica.after_seed)
            replica.after_seed.clear()
        for each in gathered:
            each.send(endpoint)

    def _count_on_it(self, endpoint: Endpoint, slot: HostedSlice, replica: Replica) -> None:
        """Adds the replica: updates need its acknowledgement from now on. Blocks the slice until the copy is
        level.
        """
        there = threading.Event()
        with self._between_updates(slot):
            _check_wanted(slot, replica)
            gathered, replica.after_seed = replica.after_seed or (), None
            last = Update(FenceTask((), (slot,), lambda work: there.set()), (), replica.region, [], 1.0)
            last.sends = [replica.prepare(slot, last)]
            slot.in_flight = last
        for each in gathered:
            each.send(endpoint)
        last.sends[0].send()
        until = time.monotonic() + _TAIL_SECONDS
        while not there.wait(_LOST_SECONDS):
            if not endpoint.is_open or time.monotonic() > until:
                raise ConnectionLost(f"{replica.partner.name} did not take slice {slot.part.id} in")
        _check_wanted(slot, replica)

    def _take_back(self, slot: HostedSlice, partner: Partner) -> None:
        """Seeding failed: removes the replica unless the replica sets name it."""
        replica = slot.replica_on(partner.name)
        if replica is not None and replica.partner is partner and not replica.is_named:
            slot.stand_alone(partner)
            slot.drain()


def supply(partner: Partner, slots: Sequence[HostedSlice], goes_on: Callable[[], bool]) -> None:
    """In a ring, while nothing is applied: sends this backup all that it lacks, and shares memory for updates. A
    backup that has not prepared the generation yet refuses; it is asked again.
    """
    found = [(slot, replica) for slot in slots if (replica := slot.replica_on(partner.name)) and replica.is_named]
    if not any(replica.is_new or replica.lent is None for _, replica in found):
        return
    endpoint = partner.connect()
    lacking = [(s, r) for s, r in found if r.is_new or (r.lent is None and endpoint.shares_memory)]
    memory = share_region(endpoint, partner, sum(aligned(s.part.num_bytes) for s, _ in lacking)) if lacking else None
    offset = 0
    for slot, replica in lacking:
        if memory is not None:
            view = memory.array[offset : offset + slot.part.num_bytes]
            with slot.lock:
                replica.region, replica.lent = Region(view, slot.part.dtype, memory), (partner.num_lent, offset)
            offset += aligned(slot.part.num_bytes)
    try:
        while lacking:
            calls = [(slot, replica, _seed_now(slot, replica, endpoint)) for slot, replica in lacking]
            for _, replica, call in calls:
                with contextlib.suppress(FencedError):
                    call.wait(_TAIL_SECONDS)
                    replica.is_new = False
                    lacking = [(s, r) for s, r in lacking if r is not replica]
            if lacking and goes_on():
                time.sleep(_AGAIN_SECONDS)
            if lacking and not goes_on():
                raise ConnectionLost(f"{partner.name} could not be supplied before the next change")
    except BaseException:
        for slot, replica in lacking:
            with slot.lock:
                replica.lent = None  # it does not know that memory: the next reconfiguration shares new memory
        raise


def _seed_now(slot: HostedSlice, replica: Replica, endpoint: Endpoint) -> Call:
    with slot.lock:
        outgoing = seed_of(slot, replica.lent)
    return outgoing.send(endpoint)


def share_region(endpoint: Endpoint, partner: Partner, num_bytes: int) -> Memory | None:
    """Shares memory for updates, if the other side can map it."""
    if not endpoint.shares_memory:
        return None
    try:
        memory = endpoint.create_memory(num_bytes)
    except OSError:
        return None  # too small to share: updates go over the socket
    partner.num_lent += 1
    endpoint.call(ShareRegion(partner.num_lent, num_bytes), attachment=memory).wait(_TAIL_SECONDS)
    return memory


def alone_replica(partner: Partner, slot: HostedSlice) -> Replica:
    """A replica without shared memory: updates go over the connection."""
    return Replica(partner, Region(np.zeros(slot.part.num_bytes, np.uint8), slot.part.dtype))


def _check_wanted(slot: HostedSlice, replica: Replica) -> None:
    if replica not in slot.replicas:
        raise ConnectionLost(f"slice {slot.part.id} was given up")


def _has(slot: HostedSlice, target: Member) -> bool:
    """Whether this slice's backup exists and is connected."""
    replica = slot.replica_on(target.name)
    if replica is None or replica.is_seeding:
        return False
    member = replica.partner.member
    return (member.name, member.incarnation) == (target.name, target.incarnation) and bool(replica.partner.current())
