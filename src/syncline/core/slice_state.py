"""Slice state: what travels together when a slice is saved, replicated or moved, apart from its bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

import msgspec

from syncline.core.leasing.ranges import Places, merged, without
from syncline.errors import ProtocolError

Identity = tuple[str, int]  # name, incarnation


def life_of(name: str, incarnation: int) -> str:
    """One key for a name and its incarnation: who comes back under a name has made none of its earlier commits."""
    return f"{name}#{incarnation}"


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """A worker's copy of a slice: all that is left of it when its only server is gone."""

    slice: int
    version: int
    clocks: dict[str, int]  # of the workers whose commits are in it, by their lives
    known: int  # the highest version that was acknowledged to this worker


@dataclasses.dataclass(slots=True)
class SliceState:
    """Version, clocks and fences of one slice. The vector clock is the table of what has been applied here."""

    version: int = 0
    clocks: dict[Identity, int] = dataclasses.field(default_factory=dict)
    fences: dict[str, int] = dataclasses.field(default_factory=dict)  # highest fenced incarnation of each name
    seen: dict[str, int] = dataclasses.field(default_factory=dict)  # version that each worker pulled last
    pins: int = 0
    writing: bool = False
    acks: dict[int, list[Places]] = dataclasses.field(default_factory=dict)  # slice 0: of leases, not confirmed yet
    late: dict[int, list[Places]] = dataclasses.field(default_factory=dict)  # likewise, of commits that were late

    def admit(self, worker: Identity, clock: int) -> Literal["new", "already applied"]:
        """Whether a commit is still to be applied here; a gap is an error of ours, never skipped over."""
        known = self.clocks.get(worker, 0)
        if clock <= known:
            return "already applied"
        if self.is_fenced(worker):
            raise ProtocolError(f"{worker[0]}, incarnation {worker[1]}, is fenced on this slice")
        if clock != known + 1:
            raise ProtocolError(f"{worker[0]} commits clock {clock} on a slice that is at {known}")
        return "new"

    def applied(self, workers: list[tuple[Identity, int]], changed: bool) -> None:
        """A round is in: clocks advance on every slice, the version only where something changed."""
        for worker, clock in workers:
            self.clocks[worker] = clock
        if changed:
            self.version += 1

    def used(self, acks: Iterable[tuple[int, int, int]], late: Iterable[tuple[int, int, int]] = ()) -> None:
        """What the commits that are in it have used of leases; and those that were late, of which nothing is."""
        for known, fresh in ((self.acks, acks), (self.late, late)):
            for lease, begin, end in fresh:
                known[lease] = merged([*known.get(lease, ()), (begin, end)])

    def confirmed(self, acks: Iterable[tuple[int, int, int]], late: Iterable[tuple[int, int, int]] = ()) -> None:
        """The coordinator has kept these: they are forgotten here."""
        for known, kept in ((self.acks, acks), (self.late, late)):
            for lease, begin, end in kept:
                known[lease] = without(known.get(lease, ()), (begin, end))
                if not known[lease]:
                    del known[lease]

    def ack_entries(self) -> list[tuple[int, int, int]]:
        """The uses, for the wire."""
        return [(lease, begin, end) for lease, places in self.acks.items() for begin, end in places]

    def late_entries(self) -> list[tuple[int, int, int]]:
        return [(lease, begin, end) for lease, places in self.late.items() for begin, end in places]

    def fence(self, worker: Identity) -> None:
        """Nothing more of this incarnation, or an earlier one of its name; earlier ones are forgotten."""
        name, incarnation = worker
        self.fences[name] = max(incarnation, self.fences.get(name, 0))
        for known in [k for k in self.clocks if k[0] == name and k[1] < self.fences[name]]:
            del self.clocks[known]
        self.seen.pop(name, None)

    def is_fenced(self, worker: Identity) -> bool:
        return worker[1] <= self.fences.get(worker[0], 0)

    def clock_entries(self) -> list[tuple[str, int, int]]:
        """The clocks, for the wire."""
        return [(name, incarnation, clock) for (name, incarnation), clock in self.clocks.items()]

    def fence_entries(self) -> list[tuple[str, int]]:
        return list(self.fences.items())

    def take_over(
        self,
        version: int,
        clocks: Iterable[tuple[str, int, int]],
        fences: Iterable[tuple[str, int]],
        acks: Iterable[tuple[int, int, int]] = (),
        late: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        """Becomes the state that another server had."""
        self.acks, self.late = {}, {}
        self.used(acks, late)
        self.version = version
        self.clocks = {(name, incarnation): clock for name, incarnation, clock in clocks}
        self.fences = dict(fences)

    def staleness(self, worker: str) -> int:
        """Updates applied since this worker pulled: version at apply minus version at pull."""
        return self.version - self.seen.get(worker, self.version)

    def is_still(self, version: int) -> bool:
        """Whether an optimistic copy of this version, taken before now, cannot be torn."""
        return self.version == version and not self.writing


def least_clocks(states: Iterable[SliceState]) -> dict[Identity, int]:
    """For every worker, the commits that are on all of these slices: from there on they must be made again."""
    found: dict[Identity, int] | None = None
    for state in states:
        if found is None:
            found = dict(state.clocks)
        else:
            for worker in [*found, *state.clocks]:
                found[worker] = min(found.get(worker, 0), state.clocks.get(worker, 0))
    return found or {}


def highest_clocks(copies: Iterable[Mapping[Identity, int]]) -> dict[Identity, int]:
    """For every worker, the latest of its commits that is on any of these copies, by their clocks."""
    found: dict[Identity, int] = {}
    for clocks in copies:
        for worker, clock in clocks.items():
            found[worker] = max(clock, found.get(worker, 0))
    return found


def reach_of(
    states: Mapping[str, Collection[SliceState]],
    own: str,
    fenced: Iterable[Identity],
    staged: Callable[[Identity], int],
) -> list[tuple[str, int, int, str]]:
    """Of each worker that is out, the least clock that the slices of each primary's life can come to.

    `states`: of the slices that a server has, or will have, as a primary, by whose they have been until now; those of
    its `own` come to what is `staged` here. `fenced`: those who are out from now on. A slice that has come since a
    worker was fenced lacks nothing of it.
    """
    found, now = [], set(fenced)
    known = {worker for each in states.values() for state in each for worker in state.fences.items()}
    for worker in sorted(known | now):
        for life, each in sorted(states.items()):
            clocks = [s.clocks.get(worker, 0) for s in each if worker in now or s.fences.get(worker[0]) == worker[1]]
            if clocks:
                found.append((*worker, max(min(clocks), staged(worker) if life == own else 0), life))
    return found


def freshest(given: Mapping[Identity, Iterable[Copy]], number: int) -> tuple[str, Copy] | None:
    """Whose copy stands in for a lost slice, and what is said of it; None: nobody has one."""
    found = {giver: copy for giver, copies in given.items() for copy in copies if copy.slice == number}
    if not found:
        return None
    giver = max(found, key=lambda one: (found[one].version, one))
    clocks = dict(found[giver].clocks)
    for life, copy in ((life_of(*one), copy) for one, copy in found.items()):
        # What a worker was told is there it never makes again, in whatever copy it is missing.
        if copy.clocks.get(life, 0) > clocks.get(life, 0):
            clocks[life] = copy.clocks[life]
    known = max(copy.known for copy in found.values())
    return giver[0], Copy(number, found[giver].version, clocks, known)


def num_revoked(chosen: Iterable[Copy]) -> int:
    """Acknowledged updates that are gone when these copies stand in for slices."""
    return max((copy.known - copy.version for copy in chosen), default=0)
