"""How a job ends at the coordinator: one outcome, a profile if it was asked for, and everyone hears of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from syncline.coordinator.status import profile_lines
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


LOOK_SECONDS = 0.05
#: With a least number of workers there, this long for more of them before the job begins without.
GATHER_SECONDS = 3.0
#: How often a coordinator looks whether it still is the one.
TERM_SECONDS = 0.5


class Watching:
    """Looks, in a thread of its own."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._closed = threading.Event()
        self._enough_since: float | None = None
        self._empty_since: float | None = None
        self._checked_at = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS) and self._c.membership.outcome is None:
            try:
                self.look(time.monotonic())
            except FencedError as error:
                self._c.ending.superseded(str(error))
                return
            except SynclineError as error:
                self._c.log_line(f"{type(error).__name__}: {error}")
            except Exception as error:  # a bug of ours must end in a verdict, not in silence
                self._c.fail("coordinator", f"it has a bug: {type(error).__name__}: {error}")
                raise

    def look(self, now: float) -> None:
        with self._c.lock:
            if self._c.journal is not None and now - self._checked_at >= TERM_SECONDS:
                self._checked_at = now
                self._c.journal.check()  # while a coordinator slept, the next one may have begun
            if not self._c.membership.formed:
                self._look_at_start(now)
            else:
                for name, reason in self._c.liveness.dead(now):
                    self._c.evict(name, reason)
                self._look_for_stuck(now)
                self._c.pacing.tell()
                self._c.stopping.tell()
                self._c.validating.tell()
                self._c.stopping.look(now)
                self._look_for_deaf()
                self._look_for_quarantine()
                self._c.meeting.release()  # what a full disk may have held up
                self._look_for_emptiness(now)
                self._c.handing.look(now)
                self._c.sizing.look(now)
        self._c.ending.conclude()

    def _look_at_start(self, now: float) -> None:
        membership = self._c.membership
        if membership.may_form(True):
            self._enough_since = self._enough_since or now
            if now - self._enough_since >= GATHER_SECONDS:
                self._c.joining.form_if_ready(True)
        else:
            self._enough_since = None
        if now - self._c.began > self._c.config.start_seconds:
            membership.never_came(self._c.config.start_seconds)

    def _look_for_stuck(self, now: float) -> None:
        """A worker that lives and does not advance while others wait: it may be evaluating, but not for ever."""
        limit = self._c.config.stuck_seconds
        for wait in self._c.reporting.waits():
            for name in wait.for_whom if wait.seconds >= limit and wait.what != "server" else ():
                still = now - self._c.advanced.get(name, now)
                if still >= limit + self._c.pacing.patience(name):
                    self._c.evict(name, f"has not advanced for {still:.0f} s while others waited for it")

    def _look_for_deaf(self) -> None:
        """A server that beats, and that another one cannot reach: the one that is waited for is out."""
        limit = self._c.config.longest_deadline_seconds
        for name in self._c.membership.servers():
            beat = self._c.beats.get(name)
            for wait in beat[0].waits if beat is not None else ():
                if wait.what == "server" and wait.seconds >= limit:
                    for other in wait.for_whom:
                        self._c.evict(other, f"could not be reached by {name} for {wait.seconds:.0f} s")

    def _look_for_quarantine(self) -> None:
        """When nobody's pushes count any more, the job would run on for nothing."""
        entered = self._c.membership.state.entered
        beats = [self._c.beats[name][0] for name in entered if name in self._c.beats]
        if beats and len(beats) == len(entered) and all(beat.is_quarantined for beat in beats):
            first = min(entered)
            reason = (
                "all workers are quarantined: their pushes are not finite; look at the data and the learning rate"
            )
            self._c.membership.fail(first, reason)

    def _look_for_emptiness(self, now: float) -> None:
        """All workers are gone, and nobody says that they come back."""
        membership = self._c.membership
        if membership.workers() or "worker" in membership.awaited.values():
            self._empty_since = None
            return
        self._empty_since = self._empty_since or now
        if now - self._empty_since > self._c.config.start_seconds:
            last = next(reversed(self._c.evicted), "worker-0")
            reason = self._c.evicted.get(last, "is gone")
            membership.fail(
                last, f"{last} {reason}; nobody came in its place within {self._c.config.start_seconds:g} s"
            )
