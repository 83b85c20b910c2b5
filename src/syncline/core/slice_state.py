"""Slice state: what is saved, replicated and moved with a slice besides its bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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


class CommonClocks:
    """One table of clocks and fences for all slices that recent rounds have not touched.

    A round is counted here once, in place of at every such slice. A slice joins with an equal table, and stands apart
    with a copy before anything else happens to it. Tables are replaced, never changed, so a reader sees all of a
    round or nothing of it. The thread that decides the order of rounds advances the table under `lock`; joining and
    standing apart take it too, so that a slice has each round from the table or counts it itself.
    """

    __slots__ = ("clocks", "fences", "lock", "num_slices")

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self.clocks: Mapping[Identity, int] = {}
        self.fences: Mapping[str, int] = {}
        self.lock, self.num_slices = lock, 0

    def advance(self, workers: Sequence[tuple[Identity, int]]) -> bool:
        """Under `lock`: counts a round for all slices here. False if each slice must decide for itself."""
        if not _are_next(workers, self.clocks, self.fences):
            return False
        self.clocks = {**self.clocks, **dict(workers)}
        return True


def _are_next(
    workers: Iterable[tuple[Identity, int]], clocks: Mapping[Identity, int], fences: Mapping[str, int]
) -> bool:
    """Whether each of these commits follows the worker's last one, and none is of a fenced worker."""
    return all(
        clock == clocks.get(worker, 0) + 1 and worker[1] > fences.get(worker[0], 0) for worker, clock in workers
    )


class VersionTable:
    """The versions of all slices of a server, by place, and those that each worker has read with its last answer.

    Slices report their changes here, and the next answer takes them in: its cost does not grow with slices that have
    not changed. Threads that change a slice do not wait for `lock`.
    """

    __slots__ = ("_changed", "_lock", "_read", "_versions")

    def __init__(self, lock: AbstractContextManager[object], states: Sequence[SliceState] = ()) -> None:
        """These states report to it from now on, and no more to the table before."""
        self._lock, self._changed = lock, set[SliceState]()  # each at most once, however long no answer takes them in
        self._read: dict[str, Sequence[int]] = {}
        for place, state in enumerate(states):
            state.report_to(self, place)
        self._versions = [state.version for state in states]  # later changes are reported

    def has_changed(self, state: SliceState) -> None:
        self._changed.add(state)

    def newest(self) -> list[int]:
        """The versions of all slices."""
        with self._lock:
            changed, versions = self._changed, self._versions
            while changed:
                state = changed.pop()
                versions[state.place] = state.version
            return versions.copy()

    def read_by(self, worker: str) -> list[int]:
        """The same; this worker reads them."""
        versions = self._read[worker] = self.newest()
        return versions

    def seen(self, worker: str, place: int) -> int:
        """The version of one slice that this worker has read; -1: none."""
        versions = self._read.get(worker)
        return -1 if versions is None else versions[place]

    def seen_at(self, place: int) -> dict[str, int]:
        """By worker: the version of one slice that it has read."""
        return {worker: versions[place] for worker, versions in self._read.copy().items()}

    def forget(self, worker: str) -> None:
        self._read.pop(worker, None)

    @property
    def num_readers(self) -> int:
        return len(self._read)


class SliceState:
    """Version, clocks and fences of one slice. The vector clock records what has been applied."""

    __slots__ = (
        "_clocks",
        "_common",
        "_fences",
        "_table",
        "_version",
        "acks",
        "late",
        "pins",
        "place",
        "seen",
        "writing",
    )

    def __init__(
        self, version: int = 0, clocks: Mapping[Identity, int] | None = None, fences: Mapping[str, int] | None = None
    ) -> None:
        self._version, self.place = version, 0
        self._table: VersionTable | None = None  # if set, the slice is at `place` there
        self._clocks: dict[Identity, int] = dict(clocks or {})
        self._fences: dict[str, int] = dict(fences or {})
        self._common: CommonClocks | None = None  # if set, its tables are those of this slice
        self.seen: dict[str, int] = {}  # version that each worker last pulled by itself; see also the table
        self.pins = 0
        self.writing = False
        self.acks: dict[int, list[Places]] = {}  # slice 0: unconfirmed lease acks
        self.late: dict[int, list[Places]] = {}  # slice 0: unconfirmed, of late commits

    @property
    def version(self) -> int:
        """The number of updates."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        if self._table is not None:
            self._table.has_changed(self)

    def report_to(self, table: VersionTable | None, place: int = 0) -> None:
        """Its version is at this place of the table from now on."""
        if self._table is not None:
            for worker, version in self._table.seen_at(self.place).items():
                self.seen[worker] = max(version, self.seen.get(worker, -1))
        self._table, self.place = table, place

    @property
    def clocks(self) -> Mapping[Identity, int]:
        """Every worker's clock here."""
        common = self._common
        return self._clocks if common is None else common.clocks

    @clocks.setter
    def clocks(self, clocks: Mapping[Identity, int]) -> None:
        self.stand_apart()
        self._clocks = dict(clocks)

    @property
    def fences(self) -> Mapping[str, int]:
        """The highest fenced incarnation of each name."""
        common = self._common
        return self._fences if common is None else common.fences

    @property
    def num_commits(self) -> int:
        """Commits counted here. Rounds have one order on all slices: those with as many are at the same round."""
        return sum(dict(self.clocks).values())

    # -- clocks in common ---------------------------------------------------------------------------------

    def shares(self, common: CommonClocks) -> bool:
        """Whether its clocks are these."""
        return self._common is common

    def join(self, common: CommonClocks) -> bool:
        """Shares these clocks if they equal its own, or if no slice shares them yet; nothing may be under way here.
        Returns whether it does.
        """
        with common.lock:
            if self._common is not None:
                return self._common is common
            if not common.num_slices:
                common.clocks, common.fences = dict(self._clocks), dict(self._fences)
            elif common.clocks != self._clocks or common.fences != self._fences:
                return False
            common.num_slices += 1
            self._common = common
            return True

    def stand_apart(self) -> None:
        """Has clocks and fences of its own from now on. Every method that changes them does this first."""
        common = self._common
        if common is None:
            return
        with common.lock:
            if self._common is not None:  # else another thread was faster
                self._clocks, self._fences = dict(common.clocks), dict(common.fences)
                common.num_slices -= 1
                self._common = None

    # -- what is applied ----------------------------------------------------------------------------------

    def lacks(self, workers: Iterable[tuple[Identity, int]]) -> bool:
        """Whether all of these commits are new here, and none is of a fenced worker."""
        return _are_next(workers, self.clocks, self.fences)

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
        if workers:
            self.stand_apart()
            self._clocks.update(workers)
        if changed:
            self.version += 1

    def level(self, clocks: Mapping[Identity, int]) -> None:
        """These workers are at these clocks from now on."""
        self.stand_apart()
        self._clocks.update(clocks)

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
        self.stand_apart()
        name, incarnation = worker
        self._fences[name] = max(incarnation, self._fences.get(name, 0))
        for known in [k for k in self._clocks if k[0] == name and k[1] < self._fences[name]]:
            del self._clocks[known]
        self.forget_reader(name)

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
        self.stand_apart()
        self.acks, self.late = {}, {}
        self.used(acks, late)
        self.version = version
        self._clocks = {(name, incarnation): clock for name, incarnation, clock in clocks}
        self._fences = dict(fences)

    def staleness(self, worker: str) -> int:
        """Updates applied since this worker's last pull."""
        seen = self.seen.get(worker, -1)
        if self._table is not None:
            seen = max(seen, self._table.seen(worker, self.place))
        return self._version - seen if seen >= 0 else 0

    def forget_reader(self, worker: str) -> None:
        """Nothing is known any more of what this worker has pulled."""
        self.seen.pop(worker, None)
        if self._table is not None:
            self._table.forget(worker)

    @property
    def num_readers(self) -> int:
        """Entries about what workers have pulled."""
        return len(self.seen) + (self._table.num_readers if self._table is not None else 0)

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
