"""The last seconds of a job, added up once for all verdicts: each worker's mean step, each server's mean round.

Pure. With hundreds of members this is most of what a verdict costs: every look is gone through once, and what is
usual among the others comes from one sorted list.
"""

from __future__ import annotations

import bisect
import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from syncline.stats import JobFigures

#: Figures that a verdict looks at.
WINDOW_SECONDS = 20.0
#: Before so much is known there is no verdict on speed.
LEAST_SECONDS, LEAST_LOOKS = 8.0, 4


class WorkerMeans(msgspec.Struct, frozen=True, kw_only=True):
    """A worker over some looks, per step."""

    name: str
    num_steps: int
    compute: float
    data: float
    stage: float
    wait: float
    pull: float

    @property
    def total(self) -> float:
        return self.compute + self.stage + self.wait + self.pull

    @property
    def transfer(self) -> float:
        return self.stage + self.pull


class LookSums:
    """Several looks added up: the workers that made steps in them, and the servers that had rounds."""

    def __init__(self, workers: Mapping[str, Sequence[float]], servers: Mapping[str, Sequence[float]]) -> None:
        """Sums: of a worker steps, compute, data, stage, wait and pull; of a server rounds and seconds in rules."""
        self._workers, self._servers = workers, servers
        self._sorted: dict[str, list[float]] = {}

    @functools.cached_property
    def workers(self) -> dict[str, WorkerMeans]:
        return {
            name: WorkerMeans(
                name=name,
                num_steps=int(steps),
                compute=compute / steps,
                data=data / steps,
                stage=stage / steps,
                wait=wait / steps,
                pull=pull / steps,
            )
            for name, (steps, compute, data, stage, wait, pull) in self._workers.items()
        }

    @functools.cached_property
    def apply_seconds(self) -> dict[str, float]:
        """Seconds of a round in the rules of each server."""
        return {name: seconds / rounds for name, (rounds, seconds) in self._servers.items()}

    def usual(self, phase: str, name: str) -> float:
        """The median of the other workers."""
        known = self._sorted.get(phase)
        if known is None:
            known = self._sorted[phase] = sorted(float(getattr(one, phase)) for one in self.workers.values())
        place = bisect.bisect_left(known, float(getattr(self.workers[name], phase)))
        low, high = ((len(known) - 2) // 2, (len(known) - 1) // 2)
        return (known[low + (low >= place)] + known[high + (high >= place)]) / 2

    def __add__(self, other: LookSums) -> LookSums:
        return LookSums(_added(self._workers, other._workers), _added(self._servers, other._servers))


def add_up(looks: Iterable[JobFigures]) -> LookSums:
    """Adds up some looks, each by its steps and rounds."""
    workers: dict[str, list[float]] = {}
    servers: dict[str, list[float]] = {}
    for look in looks:
        for member in look.members:
            if member.role == "worker":
                if steps := member.num_steps:
                    sums = workers.get(member.name)
                    if sums is None:
                        sums = workers[member.name] = [0.0] * 6
                    sums[0] += steps
                    sums[1] += member.compute * steps
                    sums[2] += member.data * steps
                    sums[3] += member.stage * steps
                    sums[4] += member.wait * steps
                    sums[5] += member.pull * steps
            elif rounds := member.num_rounds:
                sums = servers.setdefault(member.name, [0.0, 0.0])
                sums[0] += rounds
                sums[1] += member.apply * rounds
    return LookSums(workers, servers)


class Window:
    """The last seconds, as a whole and in two halves: what is true of all three lasts."""

    def __init__(self, history: Sequence[JobFigures]) -> None:
        self.history = history
        self.looks = recent(history[_begin_of_steps(history) :] or history[-1:])
        self.is_enough = len(self.looks) >= LEAST_LOOKS and self.looks[-1].at - self.looks[0].at >= LEAST_SECONDS
        self._half = len(self.looks) // 2
        self.halves = (add_up(self.looks[: self._half]), add_up(self.looks[self._half :]))
        self.whole = self.halves[0] + self.halves[1]

    @property
    def since(self) -> float:
        return self.looks[0].at

    @property
    def parts(self) -> tuple[LookSums, ...]:
        return (self.whole, *self.halves)

    @functools.cached_property
    def fives(self) -> list[tuple[float, LookSums]]:
        """The whole history in fives, the newest first: when each began, and its sums."""
        ends = range(len(self.history), 4, -5)
        return [(self.history[end - 5].at, add_up(self.history[end - 5 : end])) for end in ends]

    @functools.cached_property
    def awaited(self) -> tuple[dict[str, float], ...]:
        """Of each of `parts`: in what part of its looks a round waits for this member alone. So it is about the part
        of the time in which it does.
        """
        first, second = (_alone(looks) for looks in (self.looks[: self._half], self.looks[self._half :]))
        whole = {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
        sizes = (len(self.looks), self._half, len(self.looks) - self._half)
        return tuple(
            {name: count / size for name, count in counts.items()}
            for counts, size in zip((whole, first, second), sizes, strict=True)
        )

    @functools.cached_property
    def mean_total(self) -> float:
        """Of a step, over all workers."""
        return statistics.fmean(one.total for one in self.whole.workers.values()) if self.whole.workers else 0.0


def recent(history: Sequence[JobFigures], seconds: float = WINDOW_SECONDS) -> list[JobFigures]:
    """The looks of the last seconds."""
    return [look for look in history if history[-1].at - look.at < seconds]


def _begin_of_steps(history: Sequence[JobFigures]) -> int:
    """After the first look with steps in it: what comes before is the start of the job, as are its first steps."""
    for number, look in enumerate(history):
        if any(member.num_steps for member in look.members):
            return number + 1
    return len(history)


def _alone(looks: Sequence[JobFigures]) -> dict[str, int]:
    """In how many of these looks a round waits for this member alone."""
    found: dict[str, int] = {}
    for look in looks:
        for name in {w.for_whom[0] for w in look.waits if w.what in ("round", "lag") and len(w.for_whom) == 1}:
            found[name] = found.get(name, 0) + 1
    return found


def _added(one: Mapping[str, Sequence[float]], two: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    both = {**two, **one}
    for name in one.keys() & two.keys():
        both[name] = [a + b for a, b in zip(one[name], two[name], strict=True)]
    return both
