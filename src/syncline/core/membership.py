"""Membership: who is in the job, in which generation, who is awaited, and how the job ends."""

from __future__ import annotations

import dataclasses

import msgspec

from syncline.core.rounds import after_barrier, by_name
from syncline.errors import ConfigError


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a member listens: a Unix socket for its own host, host and port for the others."""

    unix: str
    host: str
    port: int


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One live process, as everyone in a generation knows it."""

    name: str
    role: str
    incarnation: int
    host: str
    address: Address | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: well, or by the death of a member, for a reason."""

    failed: bool
    culprit: str
    reason: str


class Membership:
    """The members of a job with a fixed number of workers and servers. Today a death ends the job."""

    def __init__(self, num_workers: int, num_servers: int) -> None:
        self.expected = {
            **{f"server-{k}": "server" for k in range(num_servers)},
            **{f"worker-{k}": "worker" for k in range(num_workers)},
        }
        self.members: dict[str, Member] = {}
        self.left: set[str] = set()
        self.generation = 0
        self.outcome: Outcome | None = None
        self._incarnations = 0

    def join(self, role: str, name: str, host: str, address: Address | None) -> Member:
        """A new member, or a ConfigError that says why not. An empty name takes the next free one."""
        if not name:
            free = [n for n, r in self.expected.items() if r == role and n not in self.members]
            name = min(free, key=by_name, default="")
        if self.expected.get(name) != role:
            counts = f"{self.count('worker')} workers and {self.count('server')} servers"
            raise ConfigError(f"no {role} {name or 'more'} is expected: the job has {counts}")
        if name in self.members:
            raise ConfigError(f"{name} is in the job already; each name is one process")
        self._incarnations += 1
        member = Member(name, role, self._incarnations, host, address)
        self.members[name] = member
        if self.formed:
            self.generation = 1
        return member

    def count(self, role: str) -> int:
        return sum(expected == role for expected in self.expected.values())

    @property
    def formed(self) -> bool:
        return len(self.members) == len(self.expected)

    def missing(self) -> list[str]:
        """Who is expected and not there yet."""
        return [name for name in self.expected if name not in self.members]

    def workers(self) -> list[str]:
        """The workers that have not left, in the order of their ranks."""
        names = [n for n, m in self.members.items() if m.role == "worker" and n not in self.left]
        return sorted(names, key=by_name)

    def ordered(self) -> list[Member]:
        return sorted(self.members.values(), key=lambda member: by_name(member.name))

    @property
    def chief(self) -> str:
        """The worker of rank 0 of the generation in which the job was formed."""
        return min((n for n, role in self.expected.items() if role == "worker"), key=by_name)

    def leave(self, name: str) -> Outcome | None:
        """A member has finished. The job ends well when its last worker has."""
        if name in self.members and name not in self.left:
            self.left.add(name)
            self.generation += 1
            if self.formed and not self.workers():
                self._end(Outcome(False, "", "all workers have finished"))
        return self.outcome

    def died(self, name: str, reason: str) -> Outcome | None:
        """A member's process is gone without having left: the job ends, once, with this verdict."""
        if name in self.left:
            return self.outcome
        self.generation += 1
        self._end(Outcome(True, name, f"{name} {reason}"))
        return self.outcome

    def never_came(self, seconds: float) -> Outcome | None:
        """The deadline for all members to be there has passed."""
        names = self.missing()
        if names:
            self._end(Outcome(True, names[0], f"{', '.join(names)} did not come up within {seconds:g} s"))
        return self.outcome

    def _end(self, outcome: Outcome) -> None:
        self.outcome = self.outcome or outcome


class Barriers:
    """Barriers by name and turn: whole when every worker that has not left is there."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], set[str]] = {}
        self._stretch = 0

    def arrive(self, name: str, turn: int, worker: str, stretch: int = 0) -> None:
        self._waiting.setdefault((name, turn), set()).add(worker)
        self._stretch = max(self._stretch, stretch)

    def next_stretch(self) -> int:
        """The stretch that begins behind a barrier: later than any that a worker was in."""
        self._stretch = after_barrier(self._stretch)
        return self._stretch

    def whole(self, workers: list[str]) -> list[tuple[str, int]]:
        """Barriers that all of these have reached; they are forgotten by that."""
        ready = [key for key, there in self._waiting.items() if there.issuperset(workers)]
        for key in ready:
            del self._waiting[key]
        return ready

    def missing(self, name: str, turn: int, workers: list[str]) -> list[str]:
        there = self._waiting.get((name, turn), set())
        return [worker for worker in workers if worker not in there]
