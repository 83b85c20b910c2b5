"""Those who take part in calls, with the ways to them: made once, and used until somebody comes or goes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from syncline.core.members import Member
from syncline.core.wire.collectives import Describe
from syncline.net.rpc import Endpoint
from syncline.worker.collectives.habits import MOST_HABITS, Habit
from syncline.worker.collectives.reducing import Reducer
from syncline.worker.collectives.streams import Stream
from syncline.worker.peers import Way


class Party:
    """The members of a group; by their places in it."""

    def __init__(self, members: Sequence[Member], me: int, generation: int, there: frozenset[int]) -> None:
        """`me`: an incarnation. `generation`: of the roster, if these are all workers; else 0. `there`: the
        incarnations of all workers."""
        self.members, self.generation = list(members), generation
        self.there = there
        self.attempt, self.num_calls = 0, 0
        self.failures: tuple[int, ...] = ()
        self.names = [member.name for member in members]
        self.group = tuple(member.incarnation for member in members)
        self.place = self.group.index(me)
        self.ways: dict[int, Way] = {}
        self.streams: dict[int, Stream] = {}
        self.host = me  # the first that shares memory with this one
        self.sharing: list[int] = [self.place]
        self.habits: dict[Hashable, Habit] = {}
        self.near: list[tuple[int, Endpoint, Stream]] = []  # the others, if none is heard until this one reads

    def __len__(self) -> int:
        return len(self.members)

    @property
    def is_open(self) -> bool:
        """Whether there are ways to all others."""
        for way in self.ways.values():
            if way.lost:
                return False
        return len(self.ways) == len(self.members) - 1

    def open(self, ways: dict[int, Way], streams: dict[int, Stream]) -> None:
        self.ways, self.streams = ways, streams
        self.sharing = sorted([self.place, *(place for place, way in ways.items() if way.shares_memory)])
        self.host = self.group[self.sharing[0]]
        is_near = all(way.waiter_reads for way in ways.values())
        found = [(place, way.endpoint, streams[place]) for place, way in ways.items() if is_near]
        self.habits, self.near = {}, found

    def learn(self, kind: Hashable, said: Describe, reducer: Reducer | None = None) -> None:
        """All have called this, and may do so again."""
        if self.near:
            if len(self.habits) >= MOST_HABITS:
                self.habits.clear()
            self.habits[kind] = Habit(said, reducer)

    def describe(self, number: int, verb: str, **fields: Any) -> Describe:
        """A call of this group."""
        return Describe(
            self.group, number, verb, generation=self.generation, host=self.host, sharing=len(self.sharing),
            attempt=self.attempt, failures=self.failures, num_calls=self.num_calls, **fields,
        )  # fmt: skip
