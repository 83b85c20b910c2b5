"""A worker's reports to the coordinator: heartbeats and progress. Also assembles `job.stats()`."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

import msgspec

from syncline.config import JobConfig
from syncline.core.wire.control import AskStats, CommittedSteps, GivenStats, Heartbeat, Report
from syncline.core.wire.message import Message
from syncline.errors import SynclineError
from syncline.net.link import Link
from syncline.stats import JobStats, WireStats, apply_seconds
from syncline.usage import TellsStats
from syncline.worker.checkpoint.boundary import Boundary
from syncline.worker.collectives.verbs import Collectives
from syncline.worker.data.samples import WorkerSamples
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.metrics import Measures
from syncline.worker.stages import StageProcesses
from syncline.worker.steps import WorkerLife


class ReportingJob(Protocol):
    """What reporting needs of the job."""

    name: str
    config: JobConfig
    exchange: ServersExchange
    boundary: Boundary
    samples: WorkerSamples
    collectives: Collectives
    measures: Measures
    life: WorkerLife
    stages: StageProcesses | None
    own_step: int
    committed: CommittedSteps

    @property
    def step(self) -> int: ...
    @property
    def samples_taken(self) -> int: ...
    def rates(self) -> dict[str, float]: ...
    def ask(self, message: Message, /) -> Message: ...


def job_stats(job: ReportingJob, answer: GivenStats, wire: WireStats) -> JobStats:
    """Assembles `job.stats()` from the coordinator's answer. `wire`: statistics of the coordinator's connection."""
    servers, exchange = tuple(answer.servers), job.exchange
    pushes = sum(server.staleness_count for server in servers)
    stale = sum(server.staleness_sum for server in servers)
    among = job.collectives.stats()
    busy, own_times = answer.sample_seconds, exchange.times.times()
    return JobStats(
        name=job.name,
        step=job.step,
        own_step=job.own_step,
        seconds=answer.seconds,
        samples=answer.samples,
        samples_per_second=answer.samples / busy if busy else 0.0,
        own_samples=job.samples_taken,
        shares=answer.shares,
        epochs=tuple(answer.epochs),
        staleness_mean=stale / pushes if pushes else 0.0,
        staleness_max=max((server.staleness_max for server in servers), default=0),
        damping_mean=sum(server.damping_sum for server in servers) / pushes if pushes else 1.0,
        lag_max=max((server.lag_max for server in servers), default=0),
        num_late=sum(server.num_late for server in servers),
        num_refused=exchange.finite.num_refused,
        is_quarantined=exchange.finite.is_quarantined,
        replicas=max(1, job.config.replicas),
        ack="replicated" if job.config.replicas > 1 else "memory",
        num_revoked=answer.num_revoked,
        times=msgspec.structs.replace(own_times, apply=apply_seconds(servers) * own_times.num_steps),
        servers=servers,
        wire=exchange.stats() + among + wire,
        wire_to_workers=among,
        pushed=answer.pushed,
        own_pushed=exchange.pushed_bytes,
        num_cuts=max((server.num_cuts for server in servers), default=0),
        cut_seconds_max=max((server.cut_seconds_max for server in servers), default=0.0),
    )


REPORT_SECONDS = 0.5


class WorkerReporting:
    """Sends a job's reports: with heartbeats, and from a timer thread where there are none.

    A report right before a heartbeat wakes the coordinator once for both, which is most of what it costs there.
    """

    def __init__(self, job: ReportingJob, link: Link) -> None:
        self._job, self._link = job, link
        self._has_begun = self._has_beats = False
        self._reported_at, self._reported_step = 0.0, -1
        self._stats = TellsStats(lambda: job.exchange.stats() + job.collectives.stats(), job.exchange.peers)

    def begin(self, closed: threading.Event) -> None:
        """Reports periodically until `closed` is set. Until here the job knows nothing of its earlier lives."""
        self._has_begun = True
        threading.Thread(target=self._report_regularly, args=(closed,), name="report", daemon=True).start()

    def beat(self) -> Heartbeat:
        self._has_beats = True
        if self._has_begun:
            self._report_if_due(0.9 * REPORT_SECONDS)  # a heartbeat may come a little early
        exchange, stages = self._job.exchange, self._job.stages
        samples, seconds = exchange.times.measured
        return Heartbeat(
            step=exchange.num_landed,
            waits=exchange.waits.told() + (stages.waits(self._job.name) if stages is not None else []),
            num_refused=exchange.finite.num_refused,
            is_quarantined=exchange.finite.is_quarantined,
            samples=samples,
            work_seconds=seconds,
            boundary=self._job.boundary.last,
            stride=self._job.boundary.stride,
            stats=self._stats.due(),
        )

    def stats(self) -> JobStats:
        self.report()
        answer = self._job.ask(AskStats())
        assert isinstance(answer, GivenStats)
        return job_stats(self._job, answer, self._link.stats())

    def report(self) -> None:
        """Reports this worker's progress, if a coordinator is connected."""
        job = self._job
        epoch, step, steps = job.samples.progress
        with contextlib.suppress(SynclineError):
            times, taken, seconds = job.exchange.times.times(), job.samples.taken, job.samples.seconds
            pushed = job.exchange.pushed_bytes
            self._link.tell(
                Report(
                    job.own_step, taken, seconds, epoch, step, steps, times, job.step, pushed,
                    job.life.has_position, job.rates(), job.samples.run_done >= 1.0, job.committed,
                    list(job.stages.stats()) if job.stages is not None else [],
                )
            )  # fmt: skip

    def _report_if_due(self, seconds: float) -> None:
        """Reports if it was not done for so long, and there is something new."""
        now, step = time.monotonic(), self._job.own_step
        if step != self._reported_step and now - self._reported_at >= seconds and self._link.is_open:
            self._reported_at, self._reported_step = now, step
            self.report()

    def _report_regularly(self, closed: threading.Event) -> None:
        while not closed.wait(REPORT_SECONDS):
            self._job.exchange.waits.look()
            self._job.measures.flush()
            # A heartbeat that waits for its answer holds up no report for long.
            self._report_if_due(3 * REPORT_SECONDS if self._has_beats else REPORT_SECONDS)
