"""A small call that all ranks of a host make as before: each says it, and what the others say is what it has said.

The frames are those that `Meetings` sends and hears; here nothing of them is taken apart. What is not as expected is
left where it is, and `Meetings` goes on from there: with a rank that comes late, calls something else, or is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from syncline.client.arrays import Bytes
from syncline.client.collectives.habits import MOST_HABITS, Habit
from syncline.client.collectives.meeting import Begun, Make
from syncline.client.collectives.meetings import Meetings
from syncline.client.collectives.party import Party
from syncline.core.collecting import Describe
from syncline.errors import ConnectionLost
from syncline.net.transport import buffer_of

#: Others are waited for here for a moment, before it is looked what else there may be.
_MOMENT_SECONDS = 0.005
#: Found where it is waited for, with its last words.
_GONE = contextlib.suppress(ConnectionLost)


class Usual(NamedTuple):
    """A call in which every rank has the same for all others, so little that it goes with its description."""

    kind: Hashable  # the same for all calls of which the same is said
    data: Bytes
    finish: Callable[[list[Bytes]], Any]  # given what all ranks have, in their order


def repeat(meetings: Meetings, party: Party, usual: Usual, make: Make) -> Begun | None:
    """Begins the call, and hears who says the same; None: it is not begun."""
    heard = meetings.heard
    if heard.broken or not party.is_open:
        return None
    habit = party.habits.get(usual.kind) or _learn(party, usual, make)
    begun = Begun(meetings.begin(party))
    key, size = (party.group, begun.number), len(usual.data)
    try:
        head = party.near[0][1].endpoint.head(Describe, habit.body(begun.number), size)
        packed = b"".join((head, buffer_of(usual.data)))
        for _, way, _ in party.near:
            with _GONE:
                way.endpoint.post(packed)
        for place, way, stream in party.near:
            payload = way.endpoint.take_like(head, size, _MOMENT_SECONDS) if not stream.said else None
            if payload is None:
                return begun
            begun.payloads[place] = payload
            stream.last = stream.heard = key
            if stream.through:
                stream.through &= {key}
    except BaseException as error:
        meetings.give_up(party, begun.number, error)
        raise
    meetings.finish(key)
    return begun


def _learn(party: Party, usual: Usual, make: Make) -> Habit:
    if len(party.habits) >= MOST_HABITS:
        party.habits.clear()
    habit = party.habits[usual.kind] = Habit(make(party, 0).said)
    return habit


def views(party: Party, begun: Begun, data: Bytes) -> list[Bytes]:
    """What all ranks have given, in their order."""
    found = [data] * len(party)
    if len(data):
        for place, payload in begun.payloads.items():
            found[place] = np.frombuffer(payload, np.uint8)
    return found
