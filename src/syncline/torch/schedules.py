"""Learning rates as functions of the run's progress, independent of who makes the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from syncline.errors import ConfigError
from syncline.torch.optimizer import DistributedOptimizer
from syncline.worker.job import Job

#: The factor on a learning rate at this progress of the run (0 to 1).
Factor = Callable[[float], float]
Groups = Sequence[dict[str, Any]]


class Schedule:
    """What `schedule` returns. There is nothing to step and nothing to save: it is a function of `job.progress`."""

    def __init__(self, factors: Factor | Sequence[Factor], groups: Groups) -> None:
        self._factors = factors
        self._base: list[float] = []
        self.last_progress: float | None = None  #: at the last step
        self.last_factors: list[float] = []  #: of each group, there
        self._take_base(groups)

    @property
    def last_factor(self) -> float | None:
        """Of the first group, at the last step."""
        return self.last_factors[0] if self.last_factors else None

    def apply(self, job: Job, groups: Groups) -> None:
        """Sets each group's learning rate for the current progress. `DistributedOptimizer.step` calls it."""
        self._take_base(groups)
        progress = job.progress
        self.last_factors = [self._factor(index, progress) for index in range(len(groups))]
        self.last_progress = progress
        for group, base, factor in zip(groups, self._base, self.last_factors, strict=True):
            group["lr"] = base * factor

    def _take_base(self, groups: Groups) -> None:
        """Records the base of new groups: the given rate, even if a scheduler has changed it."""
        if not callable(self._factors) and len(self._factors) != len(groups):
            raise ConfigError(
                f"schedule: {len(self._factors)} functions for {len(groups)} parameter groups: give one for each "
                "group, or one function for all"
            )
        for group in groups[len(self._base) :]:
            group.setdefault("initial_lr", group["lr"])
            self._base.append(float(group["initial_lr"]))

    def _factor(self, index: int, progress: float) -> float:
        function = self._factors if callable(self._factors) else self._factors[index]
        try:
            factor = float(function(progress))
        except (TypeError, ValueError) as error:
            error.add_note(f"raised by the schedule of parameter group {index} at progress {progress:.4f}")
            raise
        if not (math.isfinite(factor) and factor >= 0):
            raise ConfigError(
                f"schedule: the function of parameter group {index} returned {factor} at progress {progress:.4f}: it "
                "must be a number from 0 on, which the group's learning rate is multiplied by"
            )
        return factor

    def __repr__(self) -> str:
        at = "no step yet" if self.last_progress is None else f"progress={self.last_progress:.4f}"
        return f"Schedule({at}, factors={[round(factor, 6) for factor in self.last_factors]})"


def schedule(opt: DistributedOptimizer, fn: Factor | Sequence[Factor]) -> Schedule:
    """From now on, at every step, each group's learning rate is the one it has now times `fn(job.progress)`.

    `fn` takes the progress of the whole run, 0 to 1, and returns a factor; or it is a list of such functions, one for
    each parameter group. Where a torch scheduler has changed the learning rate, `initial_lr` counts. Say how long the
    run is: `loader.epochs(n)`, `job.steps(n)`, `--max-steps` or `--max-time`. There is nothing to step and nothing to
    save; a worker that starts again, and a job that is taken up, go on where the run is. Another call replaces this.
    """
    if not isinstance(opt, DistributedOptimizer):
        raise ConfigError(f"schedule takes a syncline.torch.DistributedOptimizer, not {type(opt).__name__}")
    if not callable(fn) and not (isinstance(fn, Sequence) and fn and all(callable(one) for one in fn)):
        raise ConfigError(f"schedule: {fn!r} must be a function of the progress, or a list of one for each group")
    made = Schedule(fn, opt.param_groups)
    opt.follow(made.apply)
    return made
