"""Rolls: who is in a round, by the word of the server that closed it.

With spare workers one server decides that, the primary of slice 0. The others hear of it from the workers that it has
answered, from updates that it hands to its backups, and with every change of the generation. What any of them knows
counts: a round that nobody knows of is on no slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from syncline.core.standings import Standing

#: Name, incarnation, clock.
Entry = tuple[str, int, int]


class Roll(msgspec.Struct, frozen=True, array_like=True):
    """A round that was closed: its place among all, whose commits are in it, and who was late by it."""

    stretch: int
    number: int  # within the stretch
    members: list[Entry]
    late: list[Entry] = []

    @property
    def turn(self) -> tuple[int, int]:
        return (self.stretch, self.number)


class Rolls:
    """The rolls that a server knows of: the newest, and of every worker the one of its last commit.

    Who commits again was answered by every server, so that nobody asks for the roll of the commit before. A worker
    that came back under its name has none of the earlier one's: that was settled before it entered.
    """

    def __init__(self, rolls: Iterable[Roll] = ()) -> None:
        self._last: dict[str, tuple[int, int, Roll]] = {}  # by name: incarnation, clock
        self.newest: Roll | None = None
        for roll in rolls:
            self.learn(roll)

    def learn(self, roll: Roll) -> None:
        """Said again it changes nothing."""
        for name, incarnation, clock in (*roll.members, *roll.late):
            known = self._last.get(name)
            if known is None or known[:2] < (incarnation, clock):
                self._last[name] = (incarnation, clock, roll)
        if self.newest is None or self.newest.turn < roll.turn:
            self.newest = roll

    def find(self, name: str, incarnation: int, clock: int) -> Roll | None:
        """What was decided about this commit; None: nothing, for all that is known here."""
        known = self._last.get(name)
        return known[2] if known is not None and known[:2] == (incarnation, clock) else None

    def entries(self) -> list[Roll]:
        """All of them, for the wire."""
        found = {id(roll): roll for _, _, roll in self._last.values()}
        if self.newest is not None:
            found[id(self.newest)] = self.newest
        return sorted(found.values(), key=lambda roll: (roll.turn, roll.late))


def uncommitted(roll: Roll | None, standings: Mapping[str, Standing]) -> list[str]:
    """Who is in this round and has not committed it here; not who is gone, and settled."""
    return [standing.name for standing, clock in _still_there(roll, standings) if standing.clock < clock]


def unanswered(roll: Roll | None, standings: Mapping[str, Standing]) -> list[str]:
    """Who is in this round, while servers other than this one may not have it yet.

    Who was in it and has gone on, or rests, was answered by all of them: a round that is closed after that comes
    after it everywhere.
    """
    there = _still_there(roll, standings)
    if any(s.clock > clock or (s.clock == clock and not s.active) for s, clock in there):
        return []
    return [standing.name for standing, _ in there]


def _still_there(roll: Roll | None, standings: Mapping[str, Standing]) -> list[tuple[Standing, int]]:
    """Of those who are in this round: where they stand, and their clocks in it."""
    found = [(standings.get(name), incarnation, clock) for name, incarnation, clock in roll.members] if roll else []
    return [(s, clock) for s, inc, clock in found if s is not None and s.incarnation == inc and not s.left]


def stand_by(roll: Roll | None, standing: Standing) -> None:
    """All slices of a server have this worker's last commit: it stands where that put it, or has gone on since.

    Whoever was told where may be gone.
    """
    if roll is not None and standing.turn() < roll.turn:
        standing.stretch, standing.stretch_began = roll.stretch, standing.clock - roll.number
        standing.resting = standing.away = False
    if roll is not None and (standing.name, standing.incarnation, standing.clock) in roll.late:
        standing.late = standing.clock
