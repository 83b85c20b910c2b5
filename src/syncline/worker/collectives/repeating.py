"""A small call that all ranks of a host make as before: each says it, and what the others say is what it has said.

The frames are those that `Meetings` sends and hears; here nothing of them is taken apart. What is not as expected is
left where it is, and `Meetings` goes on from there: with a rank that comes late, calls something else, or is gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from syncline.core.wire.collectives import Describe
from syncline.errors import ConnectionLost
from syncline.worker.collectives.habits import Habit
from syncline.worker.collectives.meeting import Begun
from syncline.worker.collectives.meetings import Meetings
from syncline.worker.collectives.party import Party

#: Others are waited for here for a moment, before it is looked what else there may be.
_MOMENT_SECONDS = 0.005


def repeat(meetings: Meetings, party: Party, habit: Habit, numbers: np.ndarray[Any, Any]) -> Begun | None:
    """Begins the call, and hears who says the same; None: it is not begun."""
    near, heard = party.near, meetings.heard
    if not party.is_open or (heard.broken and (party.group, heard.numbers.get(party.group, 0)) in heard.broken):
        return None
    number = meetings.begin(party)
    begun, key, size = Begun(party, number), (party.group, number), numbers.nbytes
    try:
        head = near[0][1].head(Describe, habit.body(number), size)
        packed = head + numbers.tobytes()
        for _, endpoint, _ in near:
            try:
                endpoint.post(packed)
            except ConnectionLost:  # found where it is waited for, with its last words
                continue
        for place, endpoint, stream in near:
            payload = endpoint.take_like(head, size, _MOMENT_SECONDS) if not stream.said else None
            if payload is None:
                return begun
            begun.payloads[place] = payload
            stream.last = stream.heard = key
            if stream.through:
                stream.through &= {key}
    except BaseException as error:
        meetings.give_up(party, number, error)
        raise
    meetings.finish(key)
    return begun


def gathered(begun: Begun, flat: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """What all ranks have given, in their order; `flat`: this one."""
    found, dtype = [flat] * len(begun.party), flat.dtype
    for place, payload in begun.payloads.items():
        found[place] = np.frombuffer(payload, dtype)
    return found
