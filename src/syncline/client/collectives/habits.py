"""Calls that are made again and again with little data: what is said of them is kept as bytes, and compared so."""

from __future__ import annotations

import msgspec

from syncline.core.collecting import Describe
from syncline.net import frame

#: Of one group; a script has few.
MOST_HABITS = 256
_encode = msgspec.msgpack.Encoder().encode


class Habit:
    """What is said of a call every time, but for its number: the same by all ranks, or they do not agree."""

    def __init__(self, said: Describe) -> None:
        assert said.number == 0
        body, group = frame.encode(said), _encode(said.group)
        at = body.index(group) + len(group)
        assert body[at] == 0, "the number comes behind the group"
        self._before, self._after = body[:at], body[at + 1 :]

    def body(self, number: int) -> bytes:
        """Of the call of this number, as it goes over the wire."""
        return self._before + _encode(number) + self._after
