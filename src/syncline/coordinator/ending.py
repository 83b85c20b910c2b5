"""How a job ends at the coordinator: one outcome, a profile if it was asked for, and everyone hears of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from syncline.coordinator.profile import profile_lines
from syncline.core.membership import Outcome
from syncline.core.wire.control import AskServerStats, GivenServerStats, Over
from syncline.errors import FencedError, JobFailed, StoreError, SynclineError
from syncline.net.rpc import Call, Endpoint

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator

#: How long the end of a job waits for the servers' own numbers, for its profile.
PROFILE_SECONDS = 3.0


class Ending:
    """The end, once."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self.ended_at: float | None = None

    def conclude(self) -> None:
        """Once there is an outcome, everyone hears of it, once."""
        with self._c.lock:
            outcome = self._c.membership.outcome
            if outcome is None or self.ended_at is not None:
                return
            self.ended_at = time.monotonic()
            self._c.handing.end()
            self._c.stopping.end()
            self._c.bests.end()
            if told := self._c.reporting.pushed_told():
                self._c.last_word(f"pushed per step, by all workers: {told}")
            if told := self._c.reporting.saves().told():
                self._c.last_word(f"checkpoints: {told}")
            endpoints, joining = list(self._c.endpoints.values()), self._c.joining.take_waiting()
            try:
                self._c.keep()
            except (StoreError, FencedError) as error:
                self._c.log_line(str(error))
        if outcome.failed:
            self._c.log_line(f"JobFailed: the job has ended: {outcome.reason}")
        for request in joining:
            request.refuse(JobFailed(outcome.reason))
        if self._c.config.profile and not outcome.failed:
            self._profile_first(lambda: self._tell_all(outcome, endpoints))
        else:
            self._tell_all(outcome, endpoints)

    def _profile_first(self, then: Callable[[], None]) -> None:
        """Shows where the time went, if the servers say so soon; the job ends in any case, once."""
        once = threading.Lock()

        def end(calls: Sequence[Call] = ()) -> None:
            if once.acquire(blocking=False):
                timer.cancel()
                try:
                    self._profile(calls)
                finally:
                    then()

        timer = threading.Timer(PROFILE_SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            self._c.reporting.ask_servers(AskServerStats(), end)
        except SynclineError:
            end()

    def _profile(self, calls: Sequence[Call]) -> None:
        servers = [call.answer.stats for call in calls if isinstance(call.answer, GivenServerStats)]
        with self._c.lock:
            times = {name: report.times for name, report in self._c.reports.items()}
        for line in profile_lines(times, servers, self._c.config):
            self._c.log_line(line)

    def _tell_all(self, outcome: Outcome, endpoints: Sequence[Endpoint]) -> None:
        for endpoint in endpoints:
            if endpoint.is_open:
                endpoint.mention(Over(outcome.failed, outcome.culprit, outcome.reason))
        self._c.ended(outcome)
        self._c.over.set()

    def superseded(self, reason: str) -> None:
        """A newer coordinator has this job: this one ends, and says nothing to anybody."""
        self._c.log_line(f"FencedError: {reason}; this coordinator ends")
        self._c.ended(Outcome(True, "coordinator", reason))
        self._c.over.set()
