"""Votes: in a ring a round counts when every server has said that all hold what it is made of.

A server votes for a round that is whole there, when all others hold the sums of the slices that it is the primary of.
So whoever has all votes may apply the round: whatever happens to it then, everybody else can come to the same. What
a change of seats finds is settled by what is held: a round that all survivors hold counts, any other is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from syncline.core.slices import Identity


class Ballot(msgspec.Struct, frozen=True, array_like=True):
    """A round that is voted on: since which change of seats, and one of its commits, which is in no other round."""

    generation: int
    worker: str
    incarnation: int
    clock: int


def ballot_of(generation: int, commits: Iterable[tuple[str, int, int]]) -> Ballot:
    return Ballot(generation, *min(commits))


class Votes:
    """Who has voted for what, at one server."""

    def __init__(self) -> None:
        self.generation = 0
        self.voters: frozenset[str] = frozenset()
        self._votes: dict[Ballot, set[str]] = {}

    def begin(self, generation: int, voters: Collection[str]) -> None:
        """Seats have changed: what was voted on before is settled otherwise; others may have begun before us."""
        self.generation, self.voters = generation, frozenset(voters)
        self._votes = {ballot: votes for ballot, votes in self._votes.items() if ballot.generation >= generation}

    def vote(self, ballot: Ballot, server: str) -> None:
        """Said again it changes nothing; of a generation that is over, nothing counts."""
        if ballot.generation >= self.generation:
            self._votes.setdefault(ballot, set()).add(server)

    def missing(self, ballot: Ballot) -> list[str]:
        """Whose votes there are not yet."""
        return sorted(self.voters - self._votes.get(ballot, set()))

    def is_decided(self, ballot: Ballot) -> bool:
        return ballot.generation == self.generation and self.voters <= self._votes.get(ballot, set())

    def forget(self, ballot: Ballot) -> None:
        self._votes.pop(ballot, None)


def settled_by(held: Iterable[Mapping[Identity, int]]) -> dict[Identity, int]:
    """Up to which clock every worker's commits count, from what each survivor has applied or holds."""
    answers = list(held)
    workers = {worker for answer in answers for worker in answer}
    return {worker: min(answer.get(worker, 0) for answer in answers) for worker in workers}
