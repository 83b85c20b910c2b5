"""Metrics and stop rules: merges the workers' reports into readings, and tells all workers what the rules decide."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.coordinator.job import JobContext
from syncline.coordinator.leases import LeaseService
from syncline.core.media import GiveMedia, check_item
from syncline.core.members import Member
from syncline.core.membership import JobState
from syncline.core.metrics import MOST_METRICS, Merging, Metrics, Reading, Steer, told
from syncline.core.stopping import Rules, Steering, Stopping, is_reported_late, rules_of
from syncline.core.wire.message import Done
from syncline.errors import ProtocolError, StoreError
from syncline.net.rpc import Endpoint, Request

#: How often the counts of the rules are kept. Decisions are kept at once.
KEEP_SECONDS = 1.0


class StopRules:
    """The stop rules of a job, under the job's lock.

    `core/stopping` decides; this class keeps a decision and sends it.
    """

    def __init__(self, job: JobContext, leases: LeaseService) -> None:
        self._job, self._leases = job, leases
        self._told: dict[str, tuple[Endpoint, int]] = {}  # which decision a worker has heard, over which connection
        self._parsed: tuple[JobConfig, Rules] | None = None
        self._timer: threading.Timer | None = None
        self._kept_at, self._is_kept = 0.0, True

    @property
    def state(self) -> Steering:
        return self._job.membership.state.steering

    @property
    def rules(self) -> Rules:
        """The rules of the current settings; the chief's script may have added some at the start."""
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

    # -- training time ------------------------------------------------------------------------------------

    def start(self) -> None:
        """The job has started, or continues under this coordinator: the training clock runs."""
        with self._job.lock:
            self._job.clock.start(self._job.config.coordinator_seconds)
            Stopping(self.rules, self.state).begin()
            self.announce()
            left = self.rules.max_seconds - self._job.clock.seconds()
            if self.rules.max_seconds and not self.has_stopped and self._job.membership.outcome is None:
                self._timer = threading.Timer(max(0.0, left), self._time_is_over)
                self._timer.daemon = True
                self._timer.start()

    def _time_is_over(self) -> None:
        self._decide(lambda stopping: stopping.pass_time(self._job.clock.seconds(), self._job.step()))

    # -- deciding -----------------------------------------------------------------------------------------

    def add_readings(self, fresh: Mapping[str, Reading], step: int) -> None:
        """Applies the rules to new readings, and to the step of the worker that reported them."""
        for name, reading in fresh.items():
            self._job.note_reading(name, reading.step, reading.value)
        newest = {**self._readings, **fresh}
        self._decide(lambda stopping: stopping.take(fresh, newest, step))
        self._is_kept = self._is_kept and not fresh
        self.tick(time.monotonic())

    def reach_step(self, step: int) -> None:
        """All workers have reached this step; in rounds the report of one is enough."""
        self._decide(lambda stopping: stopping.reach(step))

    def _decide(self, ask: Callable[[Stopping], list[str]]) -> None:
        """Keeps a decision before it is announced. If it cannot be kept, the rules decide again later."""
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
                self._job.event(event, "stop")
            self.announce()
        if self.has_stopped:
            self._leases.answer_requests()  # workers may wait for more samples

    def tick(self, now: float) -> None:
        """Runs periodically: keeps what the rules count, and names once the metrics that no worker reports."""
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
        """Tells the rules' decision to each worker that has not heard it over its current connection."""
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
        """Under the lock, at the end of the job: reports what stopped it, the last readings, and missing metrics."""
        self.close()
        if self.state.stop is not None:
            self._job.final_event(f"stopped by {self.state.stop}")
        if _finite(self._readings):
            self._job.final_event(f"last readings: {told(_finite(self._readings))}")
        unmet = Stopping(self.rules, self.state).unmet(self._readings)
        for sentence in [*self._unreported(), *unmet] if self._job.membership.formed else ():
            self._job.event(sentence)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # -- checkpoints --------------------------------------------------------------------------------------

    def for_manifest(self) -> dict[str, Any]:
        """Under the lock: the state of the rules, for a manifest's `steering`."""
        found: dict[str, Any] = msgspec.to_builtins(self.state)
        return found


class Participants(Set[str]):
    """The workers in the rounds, as they are at any time. Every report makes one, so it copies nothing."""

    __slots__ = ("_state",)

    def __init__(self, state: JobState) -> None:
        self._state = state

    def __contains__(self, name: object) -> bool:
        return name in self._state.entered and name in self._state.members

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._state.entered if name in self._state.members)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class MetricService:
    """The readings of a job, under the job's lock."""

    def __init__(self, job: JobContext, stop_rules: StopRules) -> None:
        self._job, self._stop_rules = job, stop_rules
        self._merging = Merging(job.membership.state.metrics)
        self._steps: dict[str, int] = {}  # of each worker, by its reports
        self._furthest = 0  # of these
        self._has_told_of_left_out = False

    @property
    def newest(self) -> dict[str, Reading]:
        return self._job.membership.state.metrics.readings

    def values(self) -> dict[str, float]:
        """The newest finite value of each metric, for manifests and for people."""
        return _finite(self.newest)

    def handle_metrics(self, request: Request, message: Metrics) -> None:
        """A worker reports its metrics. The reply says what the stop rules want."""
        name, incarnation = request.peer.name, request.peer.incarnation
        with self._job.lock:
            if self._merging.is_new(name, incarnation, message.number):
                if message.is_whole:
                    values = {n: value for n, (value, _) in message.values.items()}
                    found = [self._merging.whole(values, message.step, message.errors)]
                else:
                    validated = self._job.membership.state.validations.metrics
                    told = {n: v for n, v in message.values.items() if n not in validated}
                    found = self._merging.take(name, told, message.step, self._participants(), message.errors)
                self._tell_of_left_out()
                self._note_step(name, message.step)
                for fresh in found or [{}]:
                    self._stop_rules.add_readings(fresh, message.step)
                self._stop_rules.reach_step(self._step())
            steer = self._job.membership.state.steering.steer
        request.reply(steer)

    def _tell_of_left_out(self) -> None:
        """Under the lock: says once that there are too many names, of all workers together."""
        if self._merging.left_out and not self._has_told_of_left_out:
            self._has_told_of_left_out = True
            self._job.event(
                f"the job has {MOST_METRICS:,} metrics: {self._merging.left_out!r} and all further names are left out"
            )

    def handle_media(self, request: Request, message: GiveMedia) -> None:
        """A worker gives images, histograms and texts."""
        for item in message.items:
            if wrong := check_item(item):
                raise ProtocolError(f"{request.peer.name} reports media that cannot be shown: {wrong}")
        with self._job.lock:
            for item in message.items:
                self._job.note_media(request.peer.name, item)
        if request.number:
            request.reply(Done())

    def add_merged(self, values: Mapping[str, float], step: int, errors: Mapping[str, float] = {}) -> None:
        """Adds readings that are merged already. The stop rules have seen them when this returns."""
        with self._job.lock:
            self._stop_rules.add_readings(self._merging.whole(values, step, errors), step)

    def member_is_out(self, member: Member) -> None:
        """A reading that waited for this member may be complete now."""
        with self._job.lock:
            participants = self._participants()
            self._steps = {name: step for name, step in self._steps.items() if name in participants}
            self._furthest = max(self._steps.values(), default=0)
            fresh = self._merging.gone(participants)
            if fresh:
                self._stop_rules.add_readings(fresh, max(reading.step for reading in fresh.values()))
            self._stop_rules.reach_step(self._step())

    def _step(self) -> int:
        """The step of the job by the workers' reports: the slowest worker's, if workers take local steps."""
        if self._job.config.steps_locally:
            return min((self._steps.get(name, 0) for name in self._participants()), default=0)
        return self._furthest

    def _note_step(self, name: str, step: int) -> None:
        """The furthest is looked for among all workers only where it may have gone back."""
        before, self._steps[name] = self._steps.get(name, 0), step
        if step >= self._furthest:
            self._furthest = step
        elif before == self._furthest:
            self._furthest = max(self._steps.values())

    def _participants(self) -> Participants:
        return Participants(self._job.membership.state)


def _finite(readings: Mapping[str, Reading]) -> dict[str, float]:
    return {name: reading.value for name, reading in readings.items() if math.isfinite(reading.value)}
