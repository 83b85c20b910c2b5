"""Members of a job, and each worker's standing in the rounds."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a member listens: a Unix socket for its own host, host and port for the others."""

    unix: str
    host: str
    port: int


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One live process."""

    name: str
    role: str
    incarnation: int
    host: str
    address: Address | None = None
    since: int = 0  # generation in which it joined; seniority defines ranks
    kind: str = ""  # processor and torch
    cores: str = ""  # pinned to it, if any
    pid: int = 0  # on its host
    num_cores: int = 0  # available to it


class Standing(msgspec.Struct, array_like=True):
    """One worker's standing. Its clock is the number of its commits."""

    name: str
    incarnation: int
    clock: int = 0
    phase: int = 0  # grows with every rest, loop and barrier, in steps that rounds.LOOP and BARRIER_EPOCH define
    phase_began: int = 0  # its clock when the phase began
    inactive: bool = False
    at_barrier: bool = False  # at a barrier: no round waits for it until its next push, or the next barrier epoch
    left: bool = False
    position: int = 0  # its clock for lag: a worker that returns from a rest is not behind
    late: int = 0  # its last commit that was late
    fenced: bool = False  # evicted: its messages are refused; rounds wait until it is settled everywhere
    last_inactive: int = 0  # its clock when it last rested or waited at a barrier
    num_segments: int = 0  # registered by its last commit; 0: unknown

    @property
    def active(self) -> bool:
        return not (self.inactive or self.at_barrier or self.left)

    def turn(self) -> tuple[int, int]:
        """The phase of its latest commit, and the number within it."""
        return (self.phase, self.clock - self.phase_began)


@functools.lru_cache(maxsize=4096)
def by_name(name: str) -> tuple[str, int, str]:
    """Sort key that puts worker-10 after worker-2."""
    stem, dash, number = name.rpartition("-")
    return (stem, int(number), name) if dash and number.isdecimal() else (name, -1, name)


def merged(reports: Iterable[Iterable[Standing]]) -> dict[str, Standing]:
    """Merges the standings of several servers: the most advanced report wins."""
    found: dict[str, Standing] = {}
    for report in reports:
        for one in report:
            known = found.get(one.name)
            if known is None or (known.incarnation, known.clock, known.phase) < (
                one.incarnation,
                one.clock,
                one.phase,
            ):
                found[one.name] = msgspec.structs.replace(one)
            elif (known.incarnation, known.clock, known.phase) == (one.incarnation, one.clock, one.phase):
                known.inactive, known.at_barrier = known.inactive or one.inactive, known.at_barrier or one.at_barrier
                known.left, known.position = known.left or one.left, max(known.position, one.position)
    return found
