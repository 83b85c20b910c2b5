"""A worker's steps: whether they may repeat after a restart, `job.progress`, and `job.steps(n)`.

A worker that dies is restarted, and its script runs from the top. Its commits then count only if the job knows that
they are new: in a loop over leases (a loader, `job.steps`), or after `job.resume_at`.

`job.steps(n)` is the loop of a script without a data set: steps of the job are leased like samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from syncline.config import JobConfig
from syncline.core.leasing.loader import MOST_SAMPLES, Loader
from syncline.core.stopping import rules_of
from syncline.core.wire.control import GivenLife
from syncline.errors import ConfigError
from syncline.worker.data.loop import Loop, TakesSamples
from syncline.worker.data.samples import WorkerSamples

#: Exit code of a worker whose script cannot resume; it does not count as a death.
CANNOT_RESUME = 76
#: Exit code of a worker that ended with a ConfigError: it would do so again.
MISUSED = 77

REMEDY = (
    "To make a script restartable, loop over syncline.torch.DataLoader, or `for step in job.steps(n)`, or "
    "`for step in range(job.resume_at(), n)` (docs/guides/restarts.md)"
)


#: A learning rate that differs by more than this factor means that the schedule started over.
MOST_TIMES = 2.0
RATES_REMEDY = (
    'Keep the schedule with the job, e.g. job.state["sched"] = scheduler, or make it a function of job.progress with '
    "syncline.torch.schedule (docs/guides/schedules.md)"
)


class CannotResume(SystemExit):
    """This worker leaves: its restarted script would repeat steps. Not an `Exception`, so that scripts do not
    catch it by accident.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(CANNOT_RESUME)
        self.reason = reason


class WorkerLife:
    """One life of a worker's name, from its joining to its end."""

    def __init__(self, given: GivenLife, *, in_rounds: bool) -> None:
        self.number = given.number  #: from 1 on
        #: of the job and of this name at the start of this life
        self.step, self.own_step, self.local_steps = given.step, given.own_step, given.local_steps
        self._in_rounds = in_rounds
        self.has_resumed = False  #: the script has called `job.resume_at`
        self.has_position = True  #: whether the last commit had a position
        self._rates_before = dict(given.rates)  # of this name's earlier lives, not compared yet

    @property
    def needs_position(self) -> bool:
        """Whether commits without a position would be repeated: in rounds all workers make every step, otherwise
        each makes its own.
        """
        made = self.step if self._in_rounds else self.own_step
        return self.number > 1 and made > 0 and not self.has_resumed

    def commits(self, *, in_leases: bool) -> None:
        """Checks a commit before it is made. `in_leases`: it contains leased samples."""
        self.has_position = in_leases or self.has_resumed
        if not self.has_position and self.needs_position:
            made = f"{self.step} steps of the job" if self._in_rounds else f"{self.own_step} of its own steps"
            raise CannotResume(
                f"its script began again (life {self.number}) after {made}, and this step has no position: it may "
                f"have been made before. This worker leaves; other workers go on. {REMEDY}"
            )

    def uses_rates(self, rates: Mapping[str, float], *, has_restored: bool) -> None:
        """Checks the learning rates of a step. In a second life each is compared, once, with the last one of this
        name and with those of other workers, which may have moved on.

        `has_restored`: the script restored its own state, so nothing is checked.
        """
        if self.number < 2 or has_restored:
            return
        for name in sorted(self._rates_before.keys() & rates.keys()):
            before, now = self._rates_before.pop(name), rates[name]
            if all(max(was, now) > MOST_TIMES * min(was, now) for was in before):
                raise CannotResume(
                    f"its script began again (life {self.number}) with a learning rate of {now:.3g}, which was "
                    f"{before[0]:.3g} before: its schedule began again too. This worker leaves before it pushes; "
                    f"other workers go on. {RATES_REMEDY}"
                )


def checked_step(step: object) -> int:
    """Validates the argument of `job.resume_at`."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"job.resume_at({step!r}): give the number of the next step, an int from 0 on")
    return step


class RunProgress:
    """The progress of the run, as known to this worker."""

    def __init__(self, config: JobConfig, samples: WorkerSamples, step: Callable[[], int], seconds: float) -> None:
        """`step`: the job's steps so far. `seconds`: how long the job has trained so far."""
        self._samples, self._step = samples, step
        self._rules = rules_of(config)
        self._began_at = time.monotonic() - seconds

    def now(self) -> float:
        """Progress from 0 to 1; ConfigError if the length of the run is unknown."""
        known = []
        if self._samples.run_done >= 0:
            known.append(self._samples.run_done)
        if self._rules.max_steps:
            known.append(self._step() / self._rules.max_steps)
        if self._rules.max_seconds:
            known.append((time.monotonic() - self._began_at) / self._rules.max_seconds)
        if not known:
            raise ConfigError(
                "job.progress: nothing says how long the run is; loop with `for epoch in loader.epochs(n):` or "
                "`for step in job.steps(n):`, or give --max-steps or --max-time at launch"
            )
        return min(1.0, max(known))


def steps(job: TakesSamples, count: object, enter: Callable[[], object]) -> Iterator[int]:
    """Yields the numbers of the steps that this worker makes. Opens the loop at once.

    `enter`: makes a late worker take part in rounds; the others wait for it from then on.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_SAMPLES:
        raise ConfigError(f"job.steps({count!r}): give the number of steps, an int from 0 on")
    name = job.samples.name_steps()
    job.samples.begin_run(name, 0, 1)
    return _steps(job, Loop(job, name, 0, Loader(count, 1, is_steps=True)), enter) if count else iter(())


def _steps(job: TakesSamples, loop: Loop, enter: Callable[[], object]) -> Iterator[int]:
    with loop:
        if job.in_rounds and not loop.reading.is_finished:
            enter()  # before it asks which step is next
        while (piece := loop.next()) is not None:
            if loop.is_over:
                return
            loop.hand_out()
            yield int(piece.span.positions(piece.begin, piece.end)[0])
            loop.comes_back()
    job.samples.note_place(loop.reading.loader, 0, 1.0)
