"""Members of a job, and where each worker stands in the rounds."""

from __future__ import annotations

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
    since: int = 0  # generation in which it joined: who was there first has the lower rank
    kind: str = ""  # processor and torch
    cores: str = ""  # that are its own, where it was given some
    pid: int = 0  # on its host
    num_cores: int = 0  # that it may run on


class Standing(msgspec.Struct, array_like=True):
    """Where one worker stands: its clock is the number of its commits, and the table of what is applied."""

    name: str
    incarnation: int
    clock: int = 0
    phase: int = 0  # how often it has rested
    phase_began: int = 0  # its clock when the phase began
    inactive: bool = False
    at_barrier: bool = False  # at a barrier: no round waits for it until its next push, or the next era
    left: bool = False
    position: int = 0  # its clock for the sake of lag: a worker that comes back from a rest is not behind
    late: int = 0  # its last commit that was late
    fenced: bool = False  # evicted: nothing more is taken from it, and rounds wait until that is settled everywhere
    last_inactive: int = 0  # its clock when it last rested, or stood aside at a barrier
    num_segments: int = 0  # that it had registered by its last commit; 0: it has not said

    @property
    def active(self) -> bool:
        return not (self.inactive or self.at_barrier or self.left)

    def turn(self) -> tuple[int, int]:
        """Stretch and number within it of its latest commit."""
        return (self.phase, self.clock - self.phase_began)


def by_name(name: str) -> tuple[str, int, str]:
    """Sort key that puts worker-10 after worker-2."""
    stem, dash, number = name.rpartition("-")
    return (stem, int(number), name) if dash and number.isdecimal() else (name, -1, name)


def merged(reports: Iterable[Iterable[Standing]]) -> dict[str, Standing]:
    """Where every worker stands by the word of several servers: the one that heard more of it is right."""
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
