"""What a relay has before its first sum: a place for each slice, ways to others, and neighbours that read here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syncline.core.layout import aligned
from syncline.core.ring import HostLeaders
from syncline.core.wire.traffic import ShareSums
from syncline.errors import SynclineError
from syncline.net.memory import HeapMemory
from syncline.net.transport import Memory
from syncline.server.hosting import Hosting
from syncline.server.replication import Partner, Region
from syncline.server.turn import Place

#: For a neighbour to take what is lent; otherwise it is sent sums.
LEND_SECONDS = 10.0


class Laid(NamedTuple):
    """By slice, and by server; `readers`: those that are not sent sums, but read them where they lie."""

    places: dict[int, Place]
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
        places[number] = Place(slot, host_leaders.of(number), region)
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
