"""Rolls: who is in a round, by the word of the server that closed it.

With spare workers one server decides that, the primary of slice 0. The others hear of it from the workers that it has
answered, from updates that it hands to its backups, and with every change of the generation. What any of them knows
counts: a round that nobody knows of is on no slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from syncline.core.standings import Standing
from syncline.core.verdicts import Commit

#: Of segments: more than there ever are.
ALL = 1 << 62
#: Name, incarnation, clock.
Entry = tuple[str, int, int]


class Roll(msgspec.Struct, frozen=True, array_like=True):
    """A round that was closed: its place among all, whose commits are in it, and who was late by it."""

    stretch: int
    number: int  # within the stretch
    members: list[Entry]
    late: list[Entry] = []
    # Members that had registered fewer segments than others of them, and how many: what was new to them then, and the
    # servers of it, they have told nothing.
    told_less: list[tuple[str, int]] = []
    # The round before, where nobody is left who could say that all servers have it: it comes first everywhere.
    before: Roll | None = None

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
        if roll.before is not None:
            self.learn(roll.before)
        for name, incarnation, clock in (*roll.members, *roll.late):
            known = self._last.get(name)
            if known is None or known[:2] < (incarnation, clock):
                self._last[name] = (incarnation, clock, roll)
        if self.newest is None or self.newest.turn < roll.turn:
            self.newest = roll

    def was_late(self, turn: tuple[int, int], entry: Entry) -> None:
        """By this round, the newest."""
        self.learn(msgspec.structs.replace(self.newest or Roll(*turn, []), late=[entry]))

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


def closed_with(
    turn: tuple[int, int], commits: Iterable[Commit[Any]], standings: Mapping[str, Standing], before: Roll | None
) -> Roll:
    """The roll of a round that is closed here and now; `before`: of the last one, with other servers."""
    members = [commit[:3] for commit in commits]
    known = {name: standings[name].num_segments for name, _, _ in members if name in standings}
    most = max(known.values(), default=0)
    told_less = [(name, number) for name, number in known.items() if 0 < number < most]
    return Roll(*turn, members, [], told_less, None if _is_everywhere(before, standings) else before)


def uncommitted(roll: Roll | None, standings: Mapping[str, Standing], first_segment: int = 0) -> list[str]:
    """Who is in this round, or in those that must come before it, and has not committed it here.

    Not who is gone, and settled; who had not registered anything that is here (`first_segment`: the first that is);
    nor who rests since: it was answered, also if that was on a slice that is lost.
    """
    found: list[str] = []
    while roll is not None:
        less = dict(roll.told_less)
        there = [(s, clock) for s, clock in _still_there(roll, standings) if less.get(s.name, ALL) > first_segment]
        found += [s.name for s, clock in there if s.clock < clock and not _rests_since(s, clock)]
        roll = roll.before
    return found


def unanswered(roll: Roll | None, standings: Mapping[str, Standing]) -> list[str]:
    """Who is in this round, while other servers may not have it yet: one of them is to go on, or to rest."""
    return [] if _is_everywhere(roll, standings) else [s.name for s, _ in _witnesses(roll, standings)]


def _is_everywhere(roll: Roll | None, standings: Mapping[str, Standing]) -> bool:
    """Who was in it and has gone on, or rests, was answered by all servers that know of it: a round that is closed
    after that comes after it everywhere."""
    return any(s.clock > clock or _rests_since(s, clock) for s, clock in _witnesses(roll, standings))


def _rests_since(standing: Standing, clock: int) -> bool:
    """Its clock may have been set back after that, with a slice that was lost."""
    return not standing.active and max(standing.clock, standing.rested) >= clock


def _witnesses(roll: Roll | None, standings: Mapping[str, Standing]) -> list[tuple[Standing, int]]:
    """Those who have told all servers that anybody in this round has told."""
    less = dict(roll.told_less) if roll is not None else {}
    return [(s, clock) for s, clock in _still_there(roll, standings) if s.name not in less]


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
