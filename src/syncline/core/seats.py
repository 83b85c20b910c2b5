"""Seats: which servers have a slice, as its primary and as its backups, and how seats change.

A slice moves by getting a backup where it is to go (a *seed*: all of it, then every update) and by that backup's
becoming the primary. So there is one way for a lost backup, a server that comes and one that goes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping

import msgspec

from syncline.core.units import counted

#: Primaries are moved only when one server has this much more than another, in slices of the largest size.
WORTH_A_MOVE = 2.0


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """The servers of one slice. No primary, "": it is lost, and comes back from a worker's copy."""

    slice: int
    primary: str
    backups: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All that have it."""
        return (self.primary, *self.backups) if self.primary else self.backups


class Seed(msgspec.Struct, frozen=True):
    """A slice to be given a backup, by its primary."""

    slice: int
    source: str
    target: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do next about the seats, and why: seeds first, then these seats."""

    seeds: tuple[Seed, ...]
    seats: tuple[Seat, ...]
    reason: str

    @property
    def is_empty(self) -> bool:
        return not self.seeds and not self.seats


def without(seats: Iterable[Seat], gone: Collection[str]) -> tuple[list[Seat], list[int]]:
    """The seats after these servers' deaths, backups in the place of primaries; and the slices that nobody has."""
    after, lost = [], []
    for seat in seats:
        backups = tuple(name for name in seat.backups if name not in gone)
        if seat.primary in gone or not seat.primary:
            if not backups:
                lost.append(seat.slice)
            after.append(Seat(seat.slice, *_promoted(backups, seat.slice)))
        else:
            after.append(Seat(seat.slice, seat.primary, backups))
    return after, lost


def _promoted(backups: tuple[str, ...], number: int) -> tuple[str, tuple[str, ...]]:
    """One of them in the place of the primary: where there are several, what one had is spread over all."""
    if not backups:
        return "", ()
    chosen = backups[number % len(backups)]
    return chosen, tuple(name for name in backups if name != chosen)


def rehome(seats: Iterable[Seat], sizes: Mapping[int, int], servers: Collection[str]) -> list[Seat]:
    """A primary for every slice that has none, where there is the least so far."""
    seats = list(seats)
    loads = dict.fromkeys(sorted(servers), 0)
    for seat in seats:
        if seat.primary in loads:
            loads[seat.primary] += sizes[seat.slice]
    found = []
    for seat in seats:
        if not seat.primary and loads:
            server = min(loads, key=lambda name: loads[name])
            loads[server] += sizes[seat.slice]
            seat = Seat(seat.slice, server)
        found.append(seat)
    return found


def plan(
    seats: Iterable[Seat],
    sizes: Mapping[int, int],
    hosts: Mapping[str, str],
    *,
    replicas: int,
    leaving: Collection[str] = (),
) -> Plan:
    """What brings the seats nearer to what they should be; nothing, when they are so.

    `hosts`: the live servers and where they are. First those who leave are relieved, then every slice gets its
    backup, then primaries are made even.
    """
    seats = list(seats)
    staying = [server for server in sorted(hosts) if server not in leaving]
    if not staying or any(not seat.primary for seat in seats):
        return Plan((), (), "waits for a server")
    loads = _Loads(seats, sizes, staying)
    for step in (_relieve, _back, _even):
        found = step(seats, sizes, hosts, loads, replicas, frozenset(leaving))
        if not found.is_empty:
            return found
    return Plan((), (), "the seats are as they should be")


class _Loads:
    """Bytes by server: all that it has, and as primary."""

    def __init__(self, seats: Iterable[Seat], sizes: Mapping[int, int], staying: Iterable[str]) -> None:
        self.all: dict[str, int] = dict.fromkeys(staying, 0)
        self.primary: dict[str, int] = dict.fromkeys(staying, 0)
        for seat in seats:
            if seat.primary in self.all:
                self.all[seat.primary] += sizes[seat.slice]
                self.primary[seat.primary] += sizes[seat.slice]
            for backup in seat.backups:
                if backup in self.all:
                    self.all[backup] += sizes[seat.slice]

    def least(self, names: Iterable[str]) -> str:
        return min(names, key=lambda name: (self.all[name], name), default="")

    def choose_backup(self, seat: Seat, hosts: Mapping[str, str]) -> str:
        """Another server, on another host where there is one, with the least so far; "" when there is none."""
        others = [name for name in self.all if name not in seat.names]
        elsewhere = [name for name in others if hosts[name] != hosts[seat.primary]]
        return self.least(elsewhere or others)


def _relieve(
    seats: list[Seat], sizes: Mapping[int, int], hosts: Mapping[str, str], loads: _Loads, replicas: int,
    leaving: frozenset[str],
) -> Plan:  # fmt: skip
    seeds, after = [], []
    for seat in seats:
        backups = tuple(name for name in seat.backups if name not in leaving)
        if seat.primary in leaving and backups:
            after.append(Seat(seat.slice, *_promoted(backups, seat.slice)))
        elif seat.primary in leaving and seat.backups:
            after.append(Seat(seat.slice, seat.primary))  # all leave: first nobody counts on the others any more
        elif seat.primary in leaving:
            target = loads.least(loads.all)
            loads.all[target] += sizes[seat.slice]
            seeds.append(Seed(seat.slice, seat.primary, target))
            after.append(Seat(seat.slice, target))
        elif backups != seat.backups:
            after.append(Seat(seat.slice, seat.primary, backups))
    names = ", ".join(sorted(leaving))
    leave = "leaves" if len(leaving) == 1 else "leave"
    return Plan(tuple(seeds), tuple(after), f"{names} {leave}" if after else "")


def _back(
    seats: list[Seat], sizes: Mapping[int, int], hosts: Mapping[str, str], loads: _Loads, replicas: int,
    leaving: frozenset[str],
) -> Plan:  # fmt: skip
    if replicas < 2:
        dropped = tuple(Seat(seat.slice, seat.primary) for seat in seats if seat.backups)
        return Plan((), dropped, "one replica is enough" if dropped else "")
    seeds, after = list[Seed](), list[Seat]()
    for seat in seats:
        while len(seat.names) < replicas and (target := loads.choose_backup(seat, hosts)):
            loads.all[target] += sizes[seat.slice]
            seeds.append(Seed(seat.slice, seat.primary, target))
            seat = Seat(seat.slice, seat.primary, (*seat.backups, target))
            after = [other for other in after if other.slice != seat.slice] + [seat]
    get = "slice gets" if len(after) == 1 else "slices get"
    return Plan(tuple(seeds), tuple(after), f"{len(after)} {get} a backup" if after else "")


def _even(
    seats: list[Seat], sizes: Mapping[int, int], hosts: Mapping[str, str], loads: _Loads, replicas: int,
    leaving: frozenset[str],
) -> Plan:  # fmt: skip
    """Some primaries of the fullest server go to the emptiest: by a swap with their backup there, else by a seed."""
    if not seats or len(loads.primary) < 2:
        return Plan((), (), "")
    fullest = max(loads.primary, key=lambda name: loads.primary[name])
    emptiest = min(loads.primary, key=lambda name: (loads.primary[name], name))
    largest = max(sizes[seat.slice] for seat in seats)
    gap = loads.primary[fullest] - loads.primary[emptiest]
    seeds, after = [], []
    if gap >= WORTH_A_MOVE * largest:
        mine = [seat for seat in seats if seat.primary == fullest]
        for seat in sorted(mine, key=lambda seat: (emptiest not in seat.backups, seat.slice)):
            if gap < WORTH_A_MOVE * largest:
                break
            gap -= 2 * sizes[seat.slice]
            if emptiest in seat.backups:
                others = tuple(name for name in seat.backups if name != emptiest)
                after.append(Seat(seat.slice, emptiest, (fullest, *others)))
            elif seat.backups:
                continue  # it would need one more copy there first: whoever is its backup is asked before
            else:
                seeds.append(Seed(seat.slice, fullest, emptiest))
                after.append(Seat(seat.slice, emptiest))
    go = "slice goes" if len(after) == 1 else "slices go"
    return Plan(tuple(seeds), tuple(after), f"{len(after)} {go} from {fullest} to {emptiest}" if after else "")


def by_source(seeds: Iterable[Seed]) -> dict[tuple[str, str], list[int]]:
    """Slices to be seeded, by (source, target)."""
    found: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for seed in seeds:
        found[seed.source, seed.target].append(seed.slice)
    return dict(found)


def protection(replicas: int, hosts: Iterable[str], seats: Collection[Seat] = ()) -> str:
    """What the death of a server would cost. `hosts`: of each server; `seats`: as they are now."""
    if replicas < 2:
        return (
            "1 replica, acknowledged from memory: if a server dies, its parameters come back from a worker's copy, "
            "the rule's state (momenta) and updates since then are lost"
        )
    alone = sum(not seat.backups for seat in seats)
    if alone:
        have, they = ("has", "it lives as long as its") if alone == 1 else ("have", "they live as long as their")
        return f"2 replicas, but {alone} of {counted(len(seats), 'slice')} {have} no backup now: {they} server"
    reach = "" if len(set(hosts)) > 1 else " (process-level only: all servers are on one host)"
    return f"2 replicas, acknowledged by both: the loss of any one server costs nothing{reach}"
