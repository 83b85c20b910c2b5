"""A worker's numbers and the job's, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from syncline.core.wire.control import GivenStats
from syncline.stats import JobStats, WireStats, apply_seconds

if TYPE_CHECKING:
    from syncline.worker.job import Job


def job_stats(job: Job, answer: GivenStats, wire: WireStats) -> JobStats:
    """What `job.stats()` says, by the coordinator's answer. `wire`: of the way to the coordinator."""
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
    )
