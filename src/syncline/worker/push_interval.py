"""The number of local steps between two pushes of a worker, for `--sync-every H` and `--sync-every auto`."""

from __future__ import annotations

import numpy as np

from syncline.core.layout import OWN_PREFIX, Ranges
from syncline.core.rule import Rule
from syncline.core.sync_interval import SyncInterval
from syncline.stats import StepTimes
from syncline.worker.arrays import Bytes
from syncline.worker.host_memory import HostMemory
from syncline.worker.job import Job

_NAME = "sync_every"


class PushInterval:
    """With `auto`, each worker decides from its own times; in rounds, all of them make as many steps as the chief.

    There the chief's number is on the servers, under the rule `Assign`: it travels with the chief's push and with the
    answers of that round, so that all workers change to it at the same push.
    """

    def __init__(self, job: Job, prefix: str) -> None:
        self._job, self._clock = job, job.exchange.times
        self._interval = SyncInterval(job.config.sync_every)
        self._common: HostMemory | None = None
        self.flats: dict[int, Bytes] = {}  #: takes the chief's number from the answers, by segment
        if self._interval.is_auto and job.in_rounds:
            first = {_NAME: np.array([self._interval.steps], np.int64)}
            self._common = HostMemory(job, first, Rule("Assign"), f"{OWN_PREFIX}{prefix}")
            self.flats = {self._common.segment.index: self._common.flat}
            self._interval.steps = int(self._common.values[_NAME][0])
        self._times = StepTimes()  # at the end of the last push
        self._use(self._interval.steps)

    def _use(self, num_steps: int) -> None:
        self.num_steps = self._clock.steps_per_push = num_steps  #: H now

    def collect(self) -> Ranges:
        """Copies the chief's decision into the arena; returns its id, for the push."""
        if self._common is None or not self._job.is_chief:
            return ()
        self._common.fill({_NAME: np.array([self._interval.steps], np.int64)})
        return self._common.ids

    def pushed(self, num_steps: int) -> None:
        """A push of so many steps is answered: with `auto`, H may change."""
        before, now = self._times, self._clock.times()
        self._times = now
        self._interval.pushed(num_steps, now.compute - before.compute, now.exchange - before.exchange)
        if self._common is None:
            self._use(self._interval.steps)
            return
        self._use(int(self._common.values[_NAME][0]))
        if not self._job.is_chief:  # should it become the chief, it decides from there on
            self._interval.steps = self.num_steps
