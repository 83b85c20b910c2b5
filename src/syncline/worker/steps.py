"""A worker's steps: whether they may be repeated after a restart, `job.progress`, and `job.steps(n)`.

A worker that dies is started again, and its script begins from the top. What it commits then counts only where the
job knows that it was not made before: in a loop over leases (a loader, `job.steps`), or after `job.resume_at`.

`job.steps(n)` is the loop of a script that has no data set: steps of the job are leased as samples are.
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

#: A worker's process ends with this when its script cannot go on in this life: it is no death.
CANNOT_RESUME = 76

REMEDY = (
    "To make a script restartable, loop over syncline.torch.DataLoader, or `for step in job.steps(n)`, or "
    "`for step in range(job.resume_at(), n)` (docs/guides/restarts.md)"
)


#: A learning rate that is off by more than this is taken for a schedule that began again.
MOST_TIMES = 2.0
RATES_REMEDY = (
    'Keep the schedule with the job, e.g. job.state["sched"] = scheduler, or make it a function of job.progress with '
    "syncline.torch.schedule (docs/guides/schedules.md)"
)


class CannotResume(SystemExit):
    """This worker leaves: its script began again, and what it would commit may have been made before. It is no
    `Exception`, so that a script's own handler does not swallow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(CANNOT_RESUME)
        self.reason = reason


class WorkerLife:
    """One life of a worker's name, from its joining to its end."""

    def __init__(self, given: GivenLife, *, in_rounds: bool) -> None:
        self.number = given.number  #: from 1 on
        self.step, self.own_step = given.step, given.own_step  #: of the job and of this name, when this life began
        self._in_rounds = in_rounds
        self.has_resumed = False  #: the script has said where it goes on
        self.has_position = True  #: whether the last commit had a position
        self._rates_before = dict(given.rates)  # of this name's earlier lives, that were not used again yet

    @property
    def needs_position(self) -> bool:
        """Whether commits without one would be made a second time: in rounds all workers make every step, otherwise
        each its own."""
        made = self.step if self._in_rounds else self.own_step
        return self.number > 1 and made > 0 and not self.has_resumed

    def commits(self, *, in_leases: bool) -> None:
        """A commit is about to be made; `in_leases`: with what was read of leases."""
        self.has_position = in_leases or self.has_resumed
        if not self.has_position and self.needs_position:
            made = f"{self.step} steps of the job" if self._in_rounds else f"{self.own_step} of its own steps"
            raise CannotResume(
                f"its script began again (life {self.number}) after {made}, and this step has no position: it may "
                f"have been made before. This worker leaves; other workers go on. {REMEDY}"
            )

    def uses_rates(self, rates: Mapping[str, float], *, has_restored: bool) -> None:
        """A step uses these learning rates. In a second life each is held, once, against the last one of the
        name and those of other workers, which may have gone on meanwhile.

        `has_restored`: the script got back some state of its own, and is taken to know what it does.
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
    """What was given to `job.resume_at`."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"job.resume_at({step!r}): give the number of the next step, an int from 0 on")
    return step


class RunProgress:
    """The progress of the run, as one worker knows it without asking."""

    def __init__(self, config: JobConfig, samples: WorkerSamples, step: Callable[[], int], seconds: float) -> None:
        """`step`: the job's steps so far. `seconds`: how long the job has trained so far."""
        self._samples, self._step = samples, step
        self._rules = rules_of(config)
        self._began_at = time.monotonic() - seconds

    def now(self) -> float:
        """From 0 to 1; ConfigError where nothing says how long the run is."""
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
    """The numbers of the steps that are this worker's to make. The loop is opened here and now.

    `enter`: a worker that joined late takes part in rounds after this; the others wait for it.
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
