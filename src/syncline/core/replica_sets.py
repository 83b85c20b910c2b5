"""Replica sets: the primary and backups of each slice, and how they change.

To move a slice, the target becomes a backup (a *seed*: a full copy, then every update), then the primary. The same
mechanism replaces a lost backup, fills a new server and empties a leaving one.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping

import msgspec

from syncline.core.units import counted

#: Primaries move only if servers differ by this much, in slices of the largest size.
WORTH_A_MOVE = 2.0


class ReplicaSet(msgspec.Struct, frozen=True, array_like=True):
    """The servers of one slice. No primary (""): the slice is lost and is restored from a worker's copy."""

    slice: int
    primary: str
    backups: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All servers that have it."""
        return (self.primary, *self.backups) if self.primary else self.backups


class SeedMove(msgspec.Struct, frozen=True):
    """A slice whose primary must seed a backup."""

    slice: int
    source: str
    target: str


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The next step towards the wanted replica sets, and why: first the seeds, then the replica sets."""

    seeds: tuple[SeedMove, ...]
    replica_sets: tuple[ReplicaSet, ...]
    reason: str

    @property
    def is_empty(self) -> bool:
        return not self.seeds and not self.replica_sets


def without(replica_sets: Iterable[ReplicaSet], gone: Collection[str]) -> tuple[list[ReplicaSet], list[int]]:
    """The replica sets after these servers' deaths, with backups promoted; and the lost slices."""
    after, lost = [], []
    for replica_set in replica_sets:
        backups = tuple(name for name in replica_set.backups if name not in gone)
        if replica_set.primary in gone or not replica_set.primary:
            if not backups:
                lost.append(replica_set.slice)
            after.append(ReplicaSet(replica_set.slice, *_promoted(backups, replica_set.slice)))
        else:
            after.append(ReplicaSet(replica_set.slice, replica_set.primary, backups))
    return after, lost


def _promoted(backups: tuple[str, ...], number: int) -> tuple[str, tuple[str, ...]]:
    """Promotes a backup. With several, the load of the dead server is spread over all."""
    if not backups:
        return "", ()
    chosen = backups[number % len(backups)]
    return chosen, tuple(name for name in backups if name != chosen)


def rehome(
    replica_sets: Iterable[ReplicaSet], sizes: Mapping[int, int], servers: Collection[str]
) -> list[ReplicaSet]:
    """Assigns a primary to every slice without one: the server with the least load."""
    replica_sets = list(replica_sets)
    loads = dict.fromkeys(sorted(servers), 0)
    for replica_set in replica_sets:
        if replica_set.primary in loads:
            loads[replica_set.primary] += sizes[replica_set.slice]
    found = []
    for replica_set in replica_sets:
        if not replica_set.primary and loads:
            server = min(loads, key=lambda name: loads[name])
            loads[server] += sizes[replica_set.slice]
            replica_set = ReplicaSet(replica_set.slice, server)
        found.append(replica_set)
    return found


def plan(
    replica_sets: Iterable[ReplicaSet],
    sizes: Mapping[int, int],
    hosts: Mapping[str, str],
    *,
    replicas: int,
    leaving: Collection[str] = (),
) -> PlacementPlan:
    """The next step towards the wanted replica sets; empty if there is none.

    `hosts`: the live servers and their hosts. First leaving servers are emptied, then every slice gets its backups,
    then primaries are balanced.
    """
    replica_sets = list(replica_sets)
    staying = [server for server in sorted(hosts) if server not in leaving]
    if not staying or any(not replica_set.primary for replica_set in replica_sets):
        return PlacementPlan((), (), "waits for a server")
    loads = _Loads(replica_sets, sizes, staying)
    for step in (_relieve, _back, _even):
        found = step(replica_sets, sizes, hosts, loads, replicas, frozenset(leaving))
        if not found.is_empty:
            return found
    return PlacementPlan((), (), "the replica sets are as they should be")


class _Loads:
    """Bytes by server: in total, and as primary."""

    def __init__(self, replica_sets: Iterable[ReplicaSet], sizes: Mapping[int, int], staying: Iterable[str]) -> None:
        self.all: dict[str, int] = dict.fromkeys(staying, 0)
        self.primary: dict[str, int] = dict.fromkeys(staying, 0)
        for replica_set in replica_sets:
            if replica_set.primary in self.all:
                self.all[replica_set.primary] += sizes[replica_set.slice]
                self.primary[replica_set.primary] += sizes[replica_set.slice]
            for backup in replica_set.backups:
                if backup in self.all:
                    self.all[backup] += sizes[replica_set.slice]

    def least(self, names: Iterable[str]) -> str:
        return min(names, key=lambda name: (self.all[name], name), default="")

    def choose_backup(self, replica_set: ReplicaSet, hosts: Mapping[str, str]) -> str:
        """The server with the least load, on another host if possible; "" if there is none."""
        others = [name for name in self.all if name not in replica_set.names]
        elsewhere = [name for name in others if hosts[name] != hosts[replica_set.primary]]
        return self.least(elsewhere or others)


def _relieve(
    replica_sets: list[ReplicaSet], sizes: Mapping[int, int], hosts: Mapping[str, str], loads: _Loads, replicas: int,
    leaving: frozenset[str],
) -> PlacementPlan:  # fmt: skip
    seeds, after = [], []
    for replica_set in replica_sets:
        backups = tuple(name for name in replica_set.backups if name not in leaving)
        if replica_set.primary in leaving and backups:
            after.append(ReplicaSet(replica_set.slice, *_promoted(backups, replica_set.slice)))
        elif replica_set.primary in leaving and replica_set.backups:
            after.append(
                ReplicaSet(replica_set.slice, replica_set.primary)
            )  # all leave: first remove the other backups
        elif replica_set.primary in leaving:
            target = loads.least(loads.all)
            loads.all[target] += sizes[replica_set.slice]
            seeds.append(SeedMove(replica_set.slice, replica_set.primary, target))
            after.append(ReplicaSet(replica_set.slice, target))
        elif backups != replica_set.backups:
            after.append(ReplicaSet(replica_set.slice, replica_set.primary, backups))
    names = ", ".join(sorted(leaving))
    leave = "leaves" if len(leaving) == 1 else "leave"
    return PlacementPlan(tuple(seeds), tuple(after), f"{names} {leave}" if after else "")


def _back(
    replica_sets: list[ReplicaSet], sizes: Mapping[int, int], hosts: Mapping[str, str], loads: _Loads, replicas: int,
    leaving: frozenset[str],
) -> PlacementPlan:  # fmt: skip
    if replicas < 2:
        dropped = tuple(
            ReplicaSet(replica_set.slice, replica_set.primary) for replica_set in replica_sets if replica_set.backups
        )
        return PlacementPlan((), dropped, "one replica is enough" if dropped else "")
    seeds, after = list[SeedMove](), list[ReplicaSet]()
    for replica_set in replica_sets:
        while len(replica_set.names) < replicas and (target := loads.choose_backup(replica_set, hosts)):
            loads.all[target] += sizes[replica_set.slice]
            seeds.append(SeedMove(replica_set.slice, replica_set.primary, target))
            replica_set = ReplicaSet(replica_set.slice, replica_set.primary, (*replica_set.backups, target))
            after = [other for other in after if other.slice != replica_set.slice] + [replica_set]
    get = "slice gets" if len(after) == 1 else "slices get"
    return PlacementPlan(tuple(seeds), tuple(after), f"{len(after)} {get} a backup" if after else "")


def _even(
    replica_sets: list[ReplicaSet], sizes: Mapping[int, int], hosts: Mapping[str, str], loads: _Loads, replicas: int,
    leaving: frozenset[str],
) -> PlacementPlan:  # fmt: skip
    """Moves primaries from the fullest server to the emptiest: by swapping with a backup there, else by a seed."""
    if not replica_sets or len(loads.primary) < 2:
        return PlacementPlan((), (), "")
    fullest = max(loads.primary, key=lambda name: loads.primary[name])
    emptiest = min(loads.primary, key=lambda name: (loads.primary[name], name))
    largest = max(sizes[replica_set.slice] for replica_set in replica_sets)
    gap = loads.primary[fullest] - loads.primary[emptiest]
    seeds, after = [], []
    if gap >= WORTH_A_MOVE * largest:
        mine = [replica_set for replica_set in replica_sets if replica_set.primary == fullest]
        for replica_set in sorted(
            mine, key=lambda replica_set: (emptiest not in replica_set.backups, replica_set.slice)
        ):
            if gap < WORTH_A_MOVE * largest:
                break
            gap -= 2 * sizes[replica_set.slice]
            if emptiest in replica_set.backups:
                others = tuple(name for name in replica_set.backups if name != emptiest)
                after.append(ReplicaSet(replica_set.slice, emptiest, (fullest, *others)))
            elif replica_set.backups:
                continue  # it needs one more copy there first; slices with a backup there come first
            else:
                seeds.append(SeedMove(replica_set.slice, fullest, emptiest))
                after.append(ReplicaSet(replica_set.slice, emptiest))
    go = "slice goes" if len(after) == 1 else "slices go"
    return PlacementPlan(
        tuple(seeds), tuple(after), f"{len(after)} {go} from {fullest} to {emptiest}" if after else ""
    )


def by_source(seeds: Iterable[SeedMove]) -> dict[tuple[str, str], list[int]]:
    """Slices to be seeded, by (source, target)."""
    found: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for seed in seeds:
        found[seed.source, seed.target].append(seed.slice)
    return dict(found)


def protection(replicas: int, hosts: Iterable[str], replica_sets: Collection[ReplicaSet] = ()) -> str:
    """What the death of a server would cost. `hosts`: of each server; `replica_sets`: the current ones."""
    if replicas < 2:
        return "if a server dies, its newest updates and optimizer state are lost; -s 2 --replicas 2 keeps them"
    alone = sum(not replica_set.backups for replica_set in replica_sets)
    if alone:
        have, them = ("has", "it") if alone == 1 else ("have", "them")
        return (
            f"{alone} of {counted(len(replica_sets), 'slice')} {have} no backup now; a server's death can lose {them}"
        )
    if len(set(hosts)) > 1:
        return "survives the death of any one server; the loss of a whole host can tear one step"
    return "survives the death of any one server, but not of this host: all servers are on it"
