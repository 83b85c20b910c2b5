"""Slice state: what is saved, replicated and moved with a slice besides its bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

import msgspec

from syncline.core.leasing.ranges import Places, merged, without
from syncline.errors import ProtocolError

Identity = tuple[str, int]  # name, incarnation


def life_of(name: str, incarnation: int) -> str:
    """A key of name and incarnation: a restarted worker shares no commits with its earlier life."""
    return f"{name}#{incarnation}"


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """A worker's copy of a slice, which restores it when its only server is gone."""

    slice: int
    version: int
    clocks: dict[str, int]  # of the workers' lives in it
    known: int  # the highest version acknowledged to this worker


@dataclasses.dataclass(slots=True)
class SliceState:
    """Version, clocks and fences of one slice. The vector clock records what has been applied."""

    version: int = 0
    clocks: dict[Identity, int] = dataclasses.field(default_factory=dict)
    fences: dict[str, int] = dataclasses.field(default_factory=dict)  # highest fenced incarnation of each name
    seen: dict[str, int] = dataclasses.field(default_factory=dict)  # version that each worker last pulled
    pins: int = 0
    writing: bool = False
    acks: dict[int, list[Places]] = dataclasses.field(default_factory=dict)  # slice 0: unconfirmed lease acks
    late: dict[int, list[Places]] = dataclasses.field(default_factory=dict)  # slice 0: unconfirmed, of late commits

    def admit(self, worker: Identity, clock: int) -> Literal["new", "already applied"]:
        """Whether a commit is still to be applied here. A gap raises an error."""
        known = self.clocks.get(worker, 0)
        if clock <= known:
            return "already applied"
        if self.is_fenced(worker):
            raise ProtocolError(f"{worker[0]}, incarnation {worker[1]}, is fenced on this slice")
        if clock != known + 1:
            raise ProtocolError(f"{worker[0]} commits clock {clock} on a slice that is at {known}")
        return "new"

    def applied(self, workers: list[tuple[Identity, int]], changed: bool) -> None:
        """A round is applied: clocks advance on every slice, the version only if something changed."""
        for worker, clock in workers:
            self.clocks[worker] = clock
        if changed:
            self.version += 1

    def used(self, acks: Iterable[tuple[int, int, int]], late: Iterable[tuple[int, int, int]] = ()) -> None:
        """Records the lease ranges of applied and of late commits."""
        for known, fresh in ((self.acks, acks), (self.late, late)):
            for lease, begin, end in fresh:
                known[lease] = merged([*known.get(lease, ()), (begin, end)])

    def confirmed(self, acks: Iterable[tuple[int, int, int]], late: Iterable[tuple[int, int, int]] = ()) -> None:
        """The coordinator has journaled these ranges: drops them."""
        for known, kept in ((self.acks, acks), (self.late, late)):
            for lease, begin, end in kept:
                known[lease] = without(known.get(lease, ()), (begin, end))
                if not known[lease]:
                    del known[lease]

    def ack_entries(self) -> list[tuple[int, int, int]]:
        """The lease acks, for messages."""
        return [(lease, begin, end) for lease, places in self.acks.items() for begin, end in places]

    def late_entries(self) -> list[tuple[int, int, int]]:
        return [(lease, begin, end) for lease, places in self.late.items() for begin, end in places]

    def fence(self, worker: Identity) -> None:
        """Refuses this incarnation and earlier ones of its name, and drops their clocks."""
        name, incarnation = worker
        self.fences[name] = max(incarnation, self.fences.get(name, 0))
        for known in [k for k in self.clocks if k[0] == name and k[1] < self.fences[name]]:
            del self.clocks[known]
        self.seen.pop(name, None)

    def is_fenced(self, worker: Identity) -> bool:
        return worker[1] <= self.fences.get(worker[0], 0)

    def clock_entries(self) -> list[tuple[str, int, int]]:
        """The clocks, for messages."""
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
        """Takes over the state of another server."""
        self.acks, self.late = {}, {}
        self.used(acks, late)
        self.version = version
        self.clocks = {(name, incarnation): clock for name, incarnation, clock in clocks}
        self.fences = dict(fences)

    def staleness(self, worker: str) -> int:
        """Updates applied since this worker's last pull."""
        return self.version - self.seen.get(worker, self.version)

    def is_still(self, version: int) -> bool:
        """Whether an optimistic copy of this version, made before now, is consistent."""
        return self.version == version and not self.writing


def least_clocks(states: Iterable[SliceState]) -> dict[Identity, int]:
    """Every worker's clock that all of these slices have; later commits must be replayed."""
    found: dict[Identity, int] | None = None
    for state in states:
        if found is None:
            found = dict(state.clocks)
        else:
            for worker in [*found, *state.clocks]:
                found[worker] = min(found.get(worker, 0), state.clocks.get(worker, 0))
    return found or {}


def highest_clocks(copies: Iterable[Mapping[Identity, int]]) -> dict[Identity, int]:
    """Every worker's latest clock on any of these copies."""
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
    """For each removed worker, the least clock that the slices of each primary can reach.

    `states`: the slices whose primary this server is or will be, by the incarnation of their primary so far; those of
    `own` reach what is `staged` here. `fenced`: the removed workers. A slice created after a worker was fenced lacks
    nothing of it.
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
    """The worker whose copy restores a lost slice, and the copy; None if there is none."""
    found = {giver: copy for giver, copies in given.items() for copy in copies if copy.slice == number}
    if not found:
        return None
    giver = max(found, key=lambda one: (found[one].version, one))
    clocks = dict(found[giver].clocks)
    for life, copy in ((life_of(*one), copy) for one, copy in found.items()):
        # A worker never replays what was acknowledged to it, even if a copy lacks it.
        if copy.clocks.get(life, 0) > clocks.get(life, 0):
            clocks[life] = copy.clocks[life]
    known = max(copy.known for copy in found.values())
    return giver[0], Copy(number, found[giver].version, clocks, known)


def num_revoked(chosen: Iterable[Copy]) -> int:
    """Acknowledged updates that are lost by restoring slices from these copies."""
    return max((copy.known - copy.version for copy in chosen), default=0)
