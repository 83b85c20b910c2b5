"""Ends of members and of the job.

`JobWatch` finds members that are dead, stuck or unreachable, and evicts them. `JobEnding` tells all members the
outcome.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from syncline.coordinator.job import JobContext
from syncline.coordinator.leases import LeaseService
from syncline.coordinator.members import Announcer, JoinService, MemberService, PendingJoins
from syncline.coordinator.metrics import StopRules
from syncline.coordinator.scaling import PaceService
from syncline.coordinator.status import StatusService, profile_lines
from syncline.coordinator.validation import BestCheckpoint
from syncline.core.membership import Outcome
from syncline.core.wire.control import AskServerStats, GivenServerStats, Over
from syncline.errors import FencedError, JobFailed, StoreError, SynclineError
from syncline.net.rpc import Call, Endpoint

#: How long the end of a job waits for the servers' statistics, for its profile.
PROFILE_SECONDS = 3.0
#: The period of the checks.
CHECK_SECONDS = 0.05
#: Once the least number of workers is there, how long a job waits for more before it starts.
GATHER_SECONDS = 3.0
#: How often a coordinator checks that no newer one has taken over.
TERM_SECONDS = 0.5


class JobEnding:
    """Ends the job, once: reports its results, writes the state and tells all members."""

    def __init__(
        self,
        job: JobContext,
        pending: PendingJoins,
        leases: LeaseService,
        stop_rules: StopRules,
        best: BestCheckpoint,
        status: StatusService,
    ) -> None:
        self._job, self._pending, self._leases = job, pending, leases
        self._stop_rules, self._best, self._status = stop_rules, best, status

    def conclude(self) -> None:
        """If the job has an outcome, tells all members; only the first call does."""
        with self._job.lock:
            outcome = self._job.membership.outcome
            if outcome is None or self._job.ended_at is not None:
                return
            self._job.ended_at = time.monotonic()
            self._leases.report_at_end()
            self._stop_rules.report_at_end()
            self._best.report_at_end()
            if pushed := self._status.pushed_text():
                self._job.final_event(f"pushed per step, by all workers: {pushed}")
            if saves := self._status.save_counts().told():
                self._job.final_event(f"checkpoints: {saves}")
            endpoints, requests = list(self._job.endpoints.values()), self._pending.take_requests()
            try:
                self._job.keep()
            except (StoreError, FencedError) as error:
                self._job.log_line(str(error))
        if outcome.failed:
            self._job.log_line(f"JobFailed: the job has ended: {outcome.reason}")
        for request in requests:
            request.refuse(JobFailed(outcome.reason))
        if self._job.config.profile and not outcome.failed:
            self._profile_first(lambda: self._tell_all(outcome, endpoints))
        else:
            self._tell_all(outcome, endpoints)

    def _profile_first(self, then: Callable[[], None]) -> None:
        """Logs the profile if the servers answer in time. Calls `then` once in any case."""
        once = threading.Lock()

        def end(calls: Sequence[Call] = ()) -> None:
            if once.acquire(blocking=False):
                timer.cancel()
                try:
                    self._log_profile(calls)
                finally:
                    then()

        timer = threading.Timer(PROFILE_SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            self._job.ask_all_servers(AskServerStats(), end)
        except SynclineError:
            end()

    def _log_profile(self, calls: Sequence[Call]) -> None:
        servers = [call.answer.stats for call in calls if isinstance(call.answer, GivenServerStats)]
        with self._job.lock:
            times = {name: report.times for name, report in self._job.reports.items()}
            stages = {name: report.stages for name, report in self._job.reports.items() if report.stages}
        for line in profile_lines(times, servers, self._job.config, stages):
            self._job.log_line(line)

    def _tell_all(self, outcome: Outcome, endpoints: Sequence[Endpoint]) -> None:
        for endpoint in endpoints:
            if endpoint.is_open:
                endpoint.mention(Over(outcome.failed, outcome.culprit, outcome.reason))
        self._job.end(outcome)


class Periodic(Protocol):
    """A part that has something to do from time to time while the job runs."""

    def tick(self, now: float) -> None:
        """Under the lock."""


class JobWatch:
    """A thread that checks periodically which members are silent, stuck or unreachable, and evicts them."""

    def __init__(
        self,
        job: JobContext,
        members: MemberService,
        joins: JoinService,
        status: StatusService,
        pace: PaceService,
        announcers: Sequence[Announcer],
        periodic: Sequence[Periodic],
    ) -> None:
        self._job, self._members, self._joins, self._status = job, members, joins, status
        self._pace, self._announcers, self._periodic = pace, announcers, periodic
        self._closed = threading.Event()
        self._enough_since: float | None = None
        self._empty_since: float | None = None
        self._returning: dict[str, float] = {}  # workers that have left and are to come back: since when
        self._checked_at = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(CHECK_SECONDS) and self._job.membership.outcome is None:
            try:
                self.run_checks(time.monotonic())
            except FencedError as error:
                self._job.superseded(str(error))
                return
            except SynclineError as error:
                self._job.log_line(f"{type(error).__name__}: {error}")
            except Exception as error:  # our own bug: the job must fail visibly, not hang
                self._job.fail("coordinator", f"it has a bug: {type(error).__name__}: {error}")
                raise

    def run_checks(self, now: float) -> None:
        """Runs all checks once."""
        with self._job.lock:
            if self._job.journal is not None and now - self._checked_at >= TERM_SECONDS:
                self._checked_at = now
                self._job.journal.check()  # while this process was asleep, a newer coordinator may have started
            if not self._job.membership.formed:
                self._check_start(now)
            else:
                for name, reason in self._job.liveness.dead(now):
                    self._members.evict(name, reason)
                self._evict_stuck(now)
                for announcer in self._announcers:
                    announcer.announce()
                self._evict_unreachable()
                self._fail_if_all_quarantined()
                self._stop_waiting_for_returns(now)
                self._fail_if_empty(now)
                for part in self._periodic:
                    part.tick(now)
        self._job.conclude()

    def _check_start(self, now: float) -> None:
        """Starts the job with fewer workers than asked for, or fails it, when the time is over."""
        membership, start_seconds = self._job.membership, self._job.config.start_seconds
        if membership.may_form(True):
            self._enough_since = self._enough_since or now
            if now - self._enough_since >= GATHER_SECONDS:
                self._joins.form_if_ready(True)
        else:
            self._enough_since = None
        if now - self._job.began > start_seconds:
            membership.never_came(start_seconds)

    def _evict_stuck(self, now: float) -> None:
        """Evicts a worker that is alive but has not advanced for long while others wait for it."""
        limit = self._job.config.stuck_seconds
        for wait in self._status.waits():
            for name in wait.for_whom if wait.seconds >= limit and wait.what != "server" else ():
                still = now - self._job.advanced.get(name, now)
                if still >= limit + self._pace.patience(name):
                    self._members.evict(name, f"has not advanced for {still:.0f} s while others waited for it")

    def _evict_unreachable(self) -> None:
        """Evicts a server that sends heartbeats but cannot be reached by another server."""
        limit, members = self._job.config.longest_deadline_seconds, self._job.membership.state.members
        waiting = [(name, known.waits) for name, (known, _) in self._job.heartbeats.items() if known.waits]
        for name, waits in waiting:
            for wait in waits if name in members and members[name].role == "server" else ():
                if wait.what == "server" and wait.seconds >= limit:
                    for other in wait.for_whom:
                        self._members.evict(other, f"could not be reached by {name} for {wait.seconds:.0f} s")

    def _fail_if_all_quarantined(self) -> None:
        """Without a worker whose pushes count, the job would train nothing."""
        entered = self._job.membership.state.entered
        heartbeats = self._job.heartbeats
        if entered and all(name in heartbeats and heartbeats[name][0].is_quarantined for name in entered):
            first = min(entered)
            reason = (
                "all workers are quarantined: their pushes are not finite; look at the data and the learning rate"
            )
            self._job.membership.fail(first, reason)

    def _stop_waiting_for_returns(self, now: float) -> None:
        """A worker has left to come back, and has not: the others finish without it."""
        membership, seconds = self._job.membership, self._job.config.start_seconds
        self._returning = {name: self._returning.get(name, now) for name in membership.state.returning}
        for name, since in self._returning.items():
            if now - since > seconds:
                self._job.event(f"{name} left and has not come back within {seconds:g} s; the job goes on without it")
                membership.has_not_returned(name)
                self._job.try_keep()

    def _fail_if_empty(self, now: float) -> None:
        """All workers are gone, and the launcher has not announced that one comes back."""
        membership, start_seconds = self._job.membership, self._job.config.start_seconds
        if membership.has("worker") or "worker" in membership.awaited.values():
            self._empty_since = None
            return
        self._empty_since = self._empty_since or now
        if now - self._empty_since > start_seconds:
            last = next(reversed(self._job.evicted), "worker-0")
            reason = self._job.evicted.get(last, "is gone")
            membership.fail(last, f"{last} {reason}; no worker came in its place within {start_seconds:g} s")
