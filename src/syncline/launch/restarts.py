"""Which members are restarted, after which pause, and when that ends. Pure: `now` is an argument."""

from __future__ import annotations

import dataclasses
import math
import signal

from syncline.worker.steps import CANNOT_RESUME, REMEDY

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 5.0
#: The coordinator has no pushes; its deaths within this time count.
COORDINATOR_SECONDS = 60.0
#: Exit code of an evicted process: not the script's fault.
EVICTED = 75
#: Exit code of a member that SIGTERM has made leave and that is to come back: as if the signal had ended it.
LEFT = 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True)
class Again:
    """The decision after a death. `number` of `most` restarts."""

    starts_again: bool
    number: int
    most: int
    pause_seconds: float

    def describe(self, name: str, reason: str) -> str:
        """One line for people."""
        if not self.starts_again:
            since = "within a minute" if name == "coordinator" else "without a push in between"
            return (
                f"{name} {reason}, for the {ordinal(self.number)} time {since}" if self.most else f"{name} {reason}"
            )
        when = f"in {self.pause_seconds:g} s" if self.pause_seconds else "at once"
        return f"{name} {reason}; starts again {when} ({self.number} of {self.most})"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th."""
    endings = {1: "st", 2: "nd", 3: "rd"} if number % 100 not in (11, 12, 13) else {}
    return f"{number}{endings.get(number % 10, 'th')}"


def pause_seconds(number: int) -> float:
    """The pause before the n-th start in a row: doubles from a quarter of a second."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * math.ldexp(1.0, min(number, 16) - 1))


def is_of_the_script(code: int) -> bool:
    """Whether a process ended by its own fault: not by a signal, not evicted, and with an error."""
    return code > 0 and code not in (EVICTED, CANNOT_RESUME)


class Restarts:
    """Deaths of each member without an acknowledged push in between."""

    def __init__(self, max_restarts: int) -> None:
        self._most = max_restarts
        self._deaths: dict[str, int] = {}
        self._settled: dict[str, int] = {}  # commits of past lives, as known at the last death
        self._of_coordinator: list[float] = []
        self.num_restarts = 0  # of all members

    def died(self, name: str, has_pushed: bool, now: float, *, settled: int = 0) -> Again:
        """A member's process has ended. `has_pushed`: this life had an acknowledged push or a slice. `settled`:
        counted commits of its past lives; for a life that ended soon after its first push this is known only later.
        """
        if name == "coordinator":
            self._of_coordinator = [at for at in self._of_coordinator if now - at < COORDINATOR_SECONDS] + [now]
            return self._decide(len(self._of_coordinator), 0.0)
        before = self._deaths.get(name, 0)
        if settled > self._settled.get(name, 0):  # the life before this one has pushed
            self._settled[name], before = settled, min(1, before)
        number = self._deaths[name] = 1 if has_pushed else before + 1
        return self._decide(number, pause_seconds(number))

    def has_pushed(self, name: str, settled: int) -> bool:
        """Whether the last life has pushed, once it is settled."""
        return settled > self._settled.get(name, 0)

    def _decide(self, number: int, pause: float) -> Again:
        again = number <= self._most
        self.num_restarts += again
        return Again(again, number, self._most, pause)


def why_not_again(name: str, reason: str, *, has_position: bool, others_have_finished: bool) -> str:
    """Why a worker is not restarted, in one line; empty if it is."""
    if others_have_finished:
        return f"{name} {reason}; the other workers have finished their work, so it is not restarted"
    if not has_position:
        return (
            f"{name} {reason}; it is not restarted, since its steps have no position and would be made twice. "
            f"The job goes on without it. {REMEDY}"
        )
    return ""
