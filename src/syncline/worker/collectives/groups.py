"""Who takes part: all workers, or some that were chosen by their ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from syncline.core.members import Member
from syncline.core.units import listed
from syncline.core.wire.control import Roster
from syncline.errors import CollectiveError
from syncline.worker.rosters import Rosters, ranked


@dataclasses.dataclass(frozen=True)
class Group:
    """Some workers of the job, as they were when it was made: who dies or leaves is in it all the same."""

    members: tuple[Member, ...]

    def __hash__(self) -> int:
        return hash(tuple(member.incarnation for member in self.members))

    def __repr__(self) -> str:
        return f"Group({', '.join(self.names)})"

    def __len__(self) -> int:
        return len(self.members)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]


def choose(ranks: Iterable[int], roster: Roster) -> Group:
    """The workers that have these ranks now."""
    workers, wanted = ranked(roster), sorted(set(ranks))
    for rank in wanted:
        if not 0 <= rank < len(workers):
            raise CollectiveError(f"group({wanted}): there is no rank {rank}, the job has {len(workers)} workers")
    if not wanted:
        raise CollectiveError("group([]): a group has at least one rank")
    return Group(tuple(workers[rank] for rank in wanted))


class World:
    """All workers that are there, by the newest roster."""

    def __init__(self, me: Member, rosters: Rosters) -> None:
        self._me, self._rosters = me, rosters

    @property
    def roster(self) -> Roster:
        return self._rosters.newest

    def members(self, group: Group | None) -> tuple[list[Member], int]:
        """Who takes part in a call, in the order of ranks; and the generation, if that is everyone."""
        if group is None:
            roster = self.roster
            live = {member.incarnation for member in roster.members}
            members = [one for one in ranked(roster) if one.incarnation in live]
            return (members or [self._me], max(1, roster.generation))
        if self._me.incarnation not in [member.incarnation for member in group.members]:
            raise CollectiveError(f"{self._me.name} is not in this group: {listed(group.names)}")
        live = {member.incarnation for member in self.roster.members}
        gone = [member.name for member in group.members if member.incarnation not in live]
        if gone:
            raise CollectiveError(f"{listed(gone)} of this group is gone; make a new group of those who are there")
        return list(group.members), 0

    def root(self, rank: int, group: Sequence[int], what: str) -> int:
        """The incarnation of the worker of this rank, which must take part."""
        workers = ranked(self.roster)
        if not 0 <= rank < len(workers):
            raise CollectiveError(f"{what}: there is no rank {rank}, the job has {len(workers)} workers")
        found = workers[rank]
        if found.incarnation not in group:
            raise CollectiveError(f"{what}: rank {rank}, {found.name}, is not among those who take part")
        return found.incarnation
