"""Metrics at the coordinator: workers' reports become readings, which the stop rules see at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.coordinator.job import JobContext
from syncline.coordinator.leases import LeaseService
from syncline.core.members import Member
from syncline.core.metrics import Merging, Metrics, Reading, Steer, told
from syncline.core.stopping import Rules, Steering, Stopping, is_reported_late, rules_of
from syncline.errors import StoreError
from syncline.net.rpc import Endpoint, Request

#: Between two saves of what the rules count; what they decide is kept at once.
KEEP_SECONDS = 1.0


class StopRules:
    """All rules of a job. Everything here is under the coordinator's lock; what is decided is the core's."""

    def __init__(self, job: JobContext, leases: LeaseService) -> None:
        self._job, self._leases = job, leases
        self._told: dict[str, tuple[Endpoint, int]] = {}  # which number a worker has heard, over which connection
        self._parsed: tuple[JobConfig, Rules] | None = None
        self._timer: threading.Timer | None = None
        self._kept_at, self._is_kept = 0.0, True

    @property
    def state(self) -> Steering:
        return self._job.membership.state.steering

    @property
    def rules(self) -> Rules:
        """Of the settings that count: the chief's script may have said some when the job began."""
        config = self._job.config
        if self._parsed is None or self._parsed[0] is not config:
            self._parsed = (config, rules_of(config))
        return self._parsed[1]

    @property
    def _readings(self) -> dict[str, Reading]:
        return self._job.membership.state.metrics.readings

    @property
    def has_stopped(self) -> bool:
        return self.state.stop is not None

    # -- the time of training -----------------------------------------------------------------------------

    def start(self) -> None:
        """The job is whole, or goes on under this coordinator: its time runs."""
        with self._job.lock:
            self._job.clock.start(self._job.config.coordinator_seconds)
            Stopping(self.rules, self.state).begin()
            self.announce()
            left = self.rules.max_seconds - self._job.clock.seconds()
            if self.rules.max_seconds and not self.has_stopped and self._job.membership.outcome is None:
                self._timer = threading.Timer(max(0.0, left), self._pass_time)
                self._timer.daemon = True
                self._timer.start()

    def _pass_time(self) -> None:
        self._decide(lambda stopping: stopping.pass_time(self._job.clock.seconds(), self._job.step()))

    # -- deciding -----------------------------------------------------------------------------------------

    def add_readings(self, fresh: Mapping[str, Reading], step: int) -> None:
        """New readings; and the step of whoever brings them."""
        newest = {**self._readings, **fresh}
        self._decide(lambda stopping: stopping.take(fresh, newest, step))
        self._is_kept = self._is_kept and not fresh
        self.tick(time.monotonic())

    def reach_step(self, step: int) -> None:
        """All workers have come to this step; in rounds that is known by one of them."""
        self._decide(lambda stopping: stopping.reach(step))

    def _decide(self, ask: Callable[[Stopping], list[str]]) -> None:
        """What is decided is kept before anybody hears of it; what cannot be kept is decided again later."""
        with self._job.lock:
            before = msgspec.msgpack.encode(self.state)
            number = self.state.number
            events = ask(Stopping(self.rules, self.state))
            if self.state.number == number:
                return
            try:
                self._job.keep()
            except StoreError as error:
                self._job.membership.state.steering = msgspec.msgpack.decode(before, type=Steering)
                self._job.report_disk_error(error)
                return
            self._kept_at, self._is_kept = time.monotonic(), True
            for event in events:
                self._job.event(event)
            self.announce()
        if self.has_stopped:
            self._leases.answer_requests()  # whoever waits for more to read

    def tick(self, now: float) -> None:
        """Now and then: what was counted is kept; a metric that nobody reports is named, once."""
        with self._job.lock:
            if not self._is_kept and now - self._kept_at > KEEP_SECONDS and self._job.try_keep():
                self._kept_at, self._is_kept = now, True
            if self.state.untold and is_reported_late(
                self._job.membership.state.metrics.num_readings, self._leases.num_epochs
            ):
                self.state.untold = False
                for sentence in self._unreported():
                    self._job.event(sentence)

    def _unreported(self) -> list[str]:
        return Stopping(self.rules, self.state).unreported(self._readings)

    # -- telling ------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Whoever does not know what the rules want hears it: a new life of a name, or one over a new connection."""
        with self._job.lock:
            steer = self.state.steer
            if steer == Steer() or not self._job.membership.formed:
                return
            for name in self._job.membership.workers():
                endpoint = self._job.endpoints.get(name)
                if endpoint is not None and self._told.get(name) != (endpoint, steer.number):
                    endpoint.mention(steer)
                    self._told[name] = (endpoint, steer.number)

    def report_at_end(self) -> None:
        """Under the lock: the job is over. What has stopped it, what its metrics were, what nobody reported."""
        self.close()
        if self.state.stop is not None:
            self._job.final_event(f"stopped by {self.state.stop}")
        if _finite(self._readings):
            self._job.final_event(f"last readings: {told(_finite(self._readings))}")
        for sentence in self._unreported() if self._job.membership.formed else ():
            self._job.event(sentence)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # -- checkpoints --------------------------------------------------------------------------------------

    def for_manifest(self) -> dict[str, Any]:
        """Under the lock: what the rules remember, for a manifest's `steering`."""
        found: dict[str, Any] = msgspec.to_builtins(self.state)
        return found


class MetricService:
    """All readings of a job. Everything here is under the coordinator's lock."""

    def __init__(self, job: JobContext, stop_rules: StopRules) -> None:
        self._job, self._stop_rules = job, stop_rules
        self._merging = Merging(job.membership.state.metrics)
        self._steps: dict[str, int] = {}  # of every worker, by its reports

    @property
    def newest(self) -> dict[str, Reading]:
        return self._job.membership.state.metrics.readings

    def values(self) -> dict[str, float]:
        """The newest value of each metric, as far as it is a number: for a manifest, and to be shown."""
        return _finite(self.newest)

    def handle_metrics(self, request: Request, message: Metrics) -> None:
        """A worker's report; its answer is what the rules want by now."""
        name, incarnation = request.peer.name, request.peer.incarnation
        with self._job.lock:
            if self._merging.is_new(name, incarnation, message.number):
                if message.is_whole:
                    values = {n: value for n, (value, _) in message.values.items()}
                    found = [self._merging.whole(values, message.step)]
                else:
                    validated = self._job.membership.state.validations.metrics
                    told = {n: v for n, v in message.values.items() if n not in validated}
                    found = self._merging.take(name, told, message.step, self._taking_part())
                self._steps[name] = message.step
                for fresh in found or [{}]:
                    self._stop_rules.add_readings(fresh, message.step)
                self._stop_rules.reach_step(self._step())
            steer = self._job.membership.state.steering.steer
        request.reply(steer)

    def add_merged(self, values: Mapping[str, float], step: int) -> None:
        """Readings that were merged already, by whoever calls this: rules have seen them when it returns."""
        with self._job.lock:
            self._stop_rules.add_readings(self._merging.whole(values, step), step)

    def member_is_out(self, member: Member) -> None:
        """Somebody has left, or is out: a reading that waited for it may be whole."""
        with self._job.lock:
            self._steps = {name: step for name, step in self._steps.items() if name in self._taking_part()}
            fresh = self._merging.gone(self._taking_part())
            if fresh:
                self._stop_rules.add_readings(fresh, max(reading.step for reading in fresh.values()))
            self._stop_rules.reach_step(self._step())

    def _step(self) -> int:
        """The job's, by the reports of those who are there; where workers step by themselves, the slowest's."""
        if self._job.config.sync_every > 1:
            return min((self._steps.get(name, 0) for name in self._taking_part()), default=0)
        return max(self._steps.values(), default=0)

    def _taking_part(self) -> list[str]:
        entered = self._job.membership.state.entered
        return [name for name in self._job.membership.workers() if name in entered]


def _finite(readings: Mapping[str, Reading]) -> dict[str, float]:
    return {name: reading.value for name, reading in readings.items() if math.isfinite(reading.value)}
