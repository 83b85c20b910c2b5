"""`job.progress`: how much of the whole run is done, by what says how long it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from syncline.core.stopping import rules_of
from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.worker.job import Job


class Progress:
    """Of one worker; it asks nobody."""

    def __init__(self, job: Job, seconds: float) -> None:
        """`seconds`: how long the job has trained so far."""
        self._job = job
        self._rules = rules_of(job.config)
        self._began_at = time.monotonic() - seconds

    def now(self) -> float:
        """From 0 to 1; ConfigError where nothing says how long the run is."""
        known = []
        if self._job.samples.run_done >= 0:
            known.append(self._job.samples.run_done)
        if self._rules.max_steps:
            known.append(self._job.step / self._rules.max_steps)
        if self._rules.max_seconds:
            known.append((time.monotonic() - self._began_at) / self._rules.max_seconds)
        if not known:
            raise ConfigError(
                "job.progress: nothing says how long the run is; loop with `for epoch in loader.epochs(n):` or "
                "`for step in job.steps(n):`, or give --max-steps or --max-time at launch"
            )
        return min(1.0, max(known))
