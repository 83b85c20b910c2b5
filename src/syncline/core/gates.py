"""The gate: while a cut is made, what of all that workers ask may begin to count at a server, and what waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from syncline.core.slices import Identity, highest_clocks

#: What can change what is in a round, or in a slice.
Kind = Literal["commit", "clip", "rest", "leave"]


@dataclasses.dataclass(frozen=True)
class Gate:
    """A closed gate. Commits up to `through` pass, which other servers have; and what they may be waiting for.

    A rest, or a worker that leaves, may make whole the round that such a commit is in: it passes while anything of
    `through` is not applied yet. In the first turn nothing passes.
    """

    number: int
    turn: int = 0
    through: Mapping[Identity, int] = dataclasses.field(default_factory=dict)

    def lacking(self, least: Mapping[Identity, int], there: Collection[Identity]) -> dict[Identity, int]:
        """What of `through` is not in, by the clocks on all slices here. Who is not `there` brings nothing more."""
        return {
            worker: clock
            for worker, clock in self.through.items()
            if worker in there and least.get(worker, 0) < clock
        }

    def lets_pass(self, kind: Kind, worker: Identity, clock: int, *, is_whole: bool) -> bool:
        """Whether this is decided upon now. `is_whole`: all of `through` is in."""
        if kind in ("commit", "clip"):
            return clock <= self.through.get(worker, 0)
        return not is_whole

    def is_replaced_by(self, number: int, turn: int) -> bool:
        """Whether what is asked now is newer."""
        return (number, turn) > (self.number, self.turn)


def gate_of(number: int, turn: int, through: Iterable[tuple[str, int, int]]) -> Gate:
    """As it came over the wire."""
    return Gate(number, turn, {(name, incarnation): clock for name, incarnation, clock in through})


def on_all(
    slices: Iterable[tuple[Mapping[Identity, int], bool]], settled: Collection[Identity]
) -> dict[Identity, int]:
    """Of every worker the last commit that all slices here have, of their clocks and whether they stand in for lost
    ones. After a move some may lack what others have; it is made anew.

    `settled`: those who take part in no rounds now. All that they have made was answered: a slice that has nothing of
    them, or stands in for a lost one, gets no more of that, and does not count.
    """
    known = list(slices)
    found = {}
    for worker, highest in highest_clocks(clocks for clocks, _ in known).items():
        is_settled = worker in settled
        counting = [
            clocks.get(worker, 0)
            for clocks, stands_in in known
            if not (is_settled and (stands_in or worker not in clocks))
        ]
        found[worker] = min(counting, default=highest)
    return found


def behind_to_tell(applied: Mapping[Identity, int], on_all: Mapping[Identity, int]) -> list[tuple[str, int, int]]:
    """Of those whose commits are on some slices here only: what is on all of them."""
    return [(*worker, on_all[worker]) for worker in sorted(on_all) if on_all[worker] < applied.get(worker, 0)]


def clocks_to_tell(
    gate: Gate, applied: Mapping[Identity, int], there: Collection[Identity]
) -> list[tuple[str, int, int]]:
    """The clocks of those who take part; and of those that others have named and who have left here already: all
    that they have ever committed is in."""
    found = {worker: clock for worker, clock in applied.items() if worker in there and clock}
    for worker, clock in gate.through.items():
        if worker not in there:
            found[worker] = max(clock, applied.get(worker, 0))
    return [(name, incarnation, clock) for (name, incarnation), clock in sorted(found.items())]
