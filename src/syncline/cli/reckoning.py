"""The figures of `syncline chaos`, from the workers' recorded steps, the kills, and the observed status."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from syncline.cli.witness import Step

#: The lives of each worker in order, each with its steps.
Lives = Mapping[str, Sequence[Sequence[Step]]]


class Kill(NamedTuple):
    """A kill: time, member, its incarnation, and the coordinator's term."""

    at: float
    role: str
    name: str
    incarnation: int
    term: int


class Look(NamedTuple):
    """An observed change of status: the term, the members at work, all members, with incarnations."""

    at: float
    term: int
    at_work: Mapping[str, int]
    there: Mapping[str, int]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Some durations in seconds."""

    count: int = 0
    p50: float = 0.0
    p99: float = 0.0
    longest: float = 0.0


class RoleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of killing one role."""

    kills: int
    stall: Times  #: from the kill to the next step of every other worker, the slowest of them
    out: Times  #: from the kill until the member was out of the job
    back: Times  #: from the kill until it was at work again, under a new incarnation
    not_back: int  #: until the end


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run."""

    seconds: float  #: from the first step to the last
    steps: int
    samples: int  #: handed out for steps that were made, in all lives
    gaps: Times  #: between two steps of a worker, within one life
    roles: dict[str, RoleFigures]
    num_revoked: int | None  #: acknowledged updates lost with a server; None: unknown

    @property
    def rate(self) -> float:
        """Samples per second; without a loader, steps per second."""
        return (self.samples or self.steps) / self.seconds if self.seconds else 0.0


def times_of(durations: Sequence[float]) -> Times:
    if not durations:
        return Times()
    ranked = sorted(durations)
    return Times(count=len(ranked), p50=_rank(ranked, 0.5), p99=_rank(ranked, 0.99), longest=ranked[-1])


def _rank(ranked: Sequence[float], share: float) -> float:
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def reckon(lives: Lives, kills: Sequence[Kill], looks: Sequence[Look], num_revoked: int | None = None) -> Figures:
    """All figures of one run."""
    everything = [step for several in lives.values() for life in several for step in life]
    seconds = max((s.at for s in everything), default=0.0) - min((s.at for s in everything), default=0.0)
    ends = [life[-1] for several in lives.values() for life in several if life]
    gaps = [
        (after.at - before.at) / max(1, after.number - before.number)
        for several in lives.values()
        for life in several
        for before, after in itertools.pairwise(life)
    ]
    return Figures(
        seconds=seconds,
        steps=sum(step.number for step in ends),
        samples=sum(step.samples for step in ends),
        gaps=times_of(gaps),
        roles={role: _of_role([k for k in kills if k.role == role], lives, looks) for role in _roles(kills)},
        num_revoked=num_revoked,
    )


def _roles(kills: Sequence[Kill]) -> list[str]:
    return [role for role in ("worker", "server", "coordinator") if any(kill.role == role for kill in kills)]


def _of_role(kills: Sequence[Kill], lives: Lives, looks: Sequence[Look]) -> RoleFigures:
    stalls = [stall for kill in kills if (stall := _stall(kill, lives)) is not None]
    outs = [out for kill in kills if (out := _out(kill, looks)) is not None]
    backs = [_back(kill, lives, looks) for kill in kills]
    return RoleFigures(
        kills=len(kills),
        stall=times_of(stalls),
        out=times_of(outs),
        back=times_of([back for back in backs if back is not None]),
        not_back=sum(back is None for back in backs),
    )


def _stall(kill: Kill, lives: Lives) -> float | None:
    """The longest time until another worker made its next step; of those that stepped again."""
    longest = None
    for name, several in lives.items():
        if name == kill.name:
            continue
        for life in several:
            if life and life[0].at < kill.at < life[-1].at:
                following = next(step.at for step in life if step.at >= kill.at)
                longest = max(longest or 0.0, following - kill.at)
    return longest


def _out(kill: Kill, looks: Sequence[Look]) -> float | None:
    for look in looks:
        gone = look.term > kill.term if kill.role == "coordinator" else look.there.get(kill.name) != kill.incarnation
        if look.at > kill.at and gone:
            return look.at - kill.at
    return None


def _back(kill: Kill, lives: Lives, looks: Sequence[Look]) -> float | None:
    if kill.role == "worker":
        firsts = [life[0].at for life in lives.get(kill.name, ()) if life and life[0].at > kill.at]
        return min(firsts) - kill.at if firsts else None
    for look in looks:
        if look.at > kill.at:
            again = look.term > kill.term
            if kill.role == "server":
                again = look.at_work.get(kill.name, 0) > kill.incarnation
            if again:
                return look.at - kill.at
    return None
