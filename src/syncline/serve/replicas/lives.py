"""When a process starts again, and when a silent one is killed. Pure: `now` is an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Generic, TypeVar

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
#: A process that is not up yet may be silent for longer: it imports the model's file and loads versions.
_START_FACTOR = 12.0

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(slots=True)
class _Life:
    silence_seconds: float
    is_running: bool = False
    is_up: bool = False
    heard: float = 0.0
    start_at: float = 0.0
    num_failures: int = 0  # deaths in a row before it was up
    num_starts: int = 0


@dataclasses.dataclass(frozen=True)
class Due(Generic[K]):
    """Which processes to start and to kill now."""

    start: tuple[K, ...]
    kill: tuple[tuple[K, str], ...]  #: and why


class ProcessLives(Generic[K]):
    """Processes that must always run. One that dies starts again: at once, or after a pause if it was not up."""

    def __init__(self) -> None:
        self._lives: dict[K, _Life] = {}

    def add(self, key: K, silence_seconds: float) -> None:
        """One more process, that may be silent for so long."""
        self._lives[key] = _Life(silence_seconds)

    def started(self, key: K, now: float) -> None:
        life = self._lives[key]
        life.is_running, life.is_up, life.heard = True, False, now
        life.num_starts += 1

    def heard(self, key: K, now: float) -> None:
        self._lives[key].heard = now

    def up(self, key: K, now: float) -> None:
        life = self._lives[key]
        life.is_up, life.heard, life.num_failures = True, now, 0

    def ended(self, key: K, now: float) -> float:
        """Returns the pause before its next start, in seconds."""
        life = self._lives[key]
        pause = 0.0
        if not life.is_up:
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**life.num_failures)
            life.num_failures += 1
        life.is_running = life.is_up = False
        life.start_at = now + pause
        return pause

    def is_up(self, key: K) -> bool:
        return self._lives[key].is_up

    def num_restarts(self, key: K) -> int:
        return max(0, self._lives[key].num_starts - 1)

    def due(self, now: float) -> Due[K]:
        """What to start and what to kill. A process that is killed ends, and then starts again."""
        start = tuple(key for key, life in self._lives.items() if not life.is_running and life.start_at <= now)
        kill = []
        for key, life in self._lives.items():
            most = life.silence_seconds * (1.0 if life.is_up else _START_FACTOR)
            if life.is_running and now - life.heard > most:
                kill.append((key, f"it has said nothing for {now - life.heard:.1f} s"))
        return Due(start, tuple(kill))

    def skipped(self, passed: float) -> None:
        """The keeper itself was stopped for so long, and heard nothing: that is no fault of the others."""
        for life in self._lives.values():
            life.heard += passed
