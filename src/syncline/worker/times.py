"""Where the time of a worker's steps goes: measured all the time, at the cost of a few clock readings per step."""

from __future__ import annotations

import time

from syncline.stats import StepTimes

PHASES = ("compute", "stage", "wait", "pull")


class StepClock:
    """Laps: the time since the last one goes to a phase. Used by the one thread that uses the exchange.

    compute: the script's own work. stage: gradients into the arena and on their way. wait: for the servers to answer.
    pull: new parameters into their place.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last: float | None = None
        self.num_steps = 0
        self.measured = (0, 0.0)  #: samples of all steps so far, and the time of work that they took

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._seconds[phase] += now - self._last
        self._last = now

    def pause(self) -> None:
        """What comes until the next lap is no part of a step: a rest, a barrier, a registration."""
        self._last = None

    def resume(self) -> None:
        """A step begins here: behind a rest, a barrier, a registration."""
        self._last = time.perf_counter()

    @property
    def work_seconds(self) -> float:
        """Time spent on steps, waits for others left out."""
        return sum(seconds for phase, seconds in self._seconds.items() if phase != "wait")

    def made_step(self, samples: int) -> None:
        """With so many samples in all so far. Read between two steps, samples and seconds would not fit together."""
        self.num_steps += 1
        self.measured = (samples, self.work_seconds)

    def times(self) -> StepTimes:
        return StepTimes(num_steps=self.num_steps, **self._seconds)
