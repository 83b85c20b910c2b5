"""The newest roster that a worker has heard of: who the members are, and which server is whose primary."""

from __future__ import annotations

import threading
from collections.abc import Callable

from syncline.core.members import Member, by_name
from syncline.core.wire.control import Roster


class Rosters:
    """Told by the thread that hears the coordinator; read, and waited for, by the script's own."""

    def __init__(self) -> None:
        self.newest = Roster(0, [], [])
        self._change = threading.Condition()
        self._telling = threading.RLock()
        self._listeners: list[Callable[[Roster], None]] = []

    def listen(self, listener: Callable[[Roster], None]) -> None:
        """From now on this is told of every newer roster, in the thread that brings it; it must be quick."""
        self._listeners.append(listener)

    def hear(self, roster: Roster) -> None:
        with self._change:
            if roster.generation < self.newest.generation:
                return
            self.newest = roster
            self._change.notify_all()
        with self._telling:  # one after the other, and always of the newest
            for listener in self._listeners:
                listener(self.newest)

    def wait(self, generation: int, seconds: float) -> bool:
        """Until there is a roster of a later generation than this, or this long; whether there is."""
        with self._change:
            return self._change.wait_for(lambda: self.newest.generation > generation, max(0.0, seconds))


def ranked(roster: Roster) -> list[Member]:
    """The workers in the order of their ranks. The one that was there first comes first.

    Workers that have finished keep their ranks once the chief has. Before that they come last: of the workers that
    are left, one is the chief.
    """
    finished = {member.name for member in roster.finished} if not roster.is_chief_done else set()
    workers = [member for member in (*roster.members, *roster.finished) if member.role == "worker"]
    return sorted(workers, key=lambda member: (member.name in finished, member.since, by_name(member.name)))


def place_of(me: Member, roster: Roster) -> tuple[int, int, int] | None:
    """Rank, number of workers, rank on this host; None: not there."""
    workers = ranked(roster)
    names = [member.name for member in workers]
    if me.name not in names:
        return None
    local = [member.name for member in workers if member.host == me.host]
    return names.index(me.name), len(names), local.index(me.name) if me.name in local else 0
