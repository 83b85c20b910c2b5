"""What Prometheus scrapes: the figures of the newest look, in OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from syncline.stats import JobFigures, JobLook, MemberFigures

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_PHASES: Final = ("compute", "data", "stage", "wait", "pull", "apply")


def exposition(look: JobLook | None) -> bytes:
    """The text of an answer; before the first look there is nothing in it but its end."""
    registry = CollectorRegistry(auto_describe=False)
    if look is not None:
        registry.register(_Figures(look))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


class _Figures(Collector):
    def __init__(self, look: JobLook) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        figures = self._look.figures
        yield from _of_job(figures)
        yield from _of_members(figures.members)
        verdicts = GaugeMetricFamily("syncline_verdict", "1 while the verdict holds.", labels=["kind", "subject"])
        for verdict in self._look.verdicts:
            verdicts.add_metric([verdict.kind, verdict.subject], 1)
        yield verdicts


def _of_job(figures: JobFigures) -> Iterator[Metric]:
    info = InfoMetricFamily("syncline_job", "The job, its generation and the term of its coordinator.")
    info.add_metric([], {"generation": str(figures.generation), "term": str(figures.term)})
    yield info
    yield CounterMetricFamily("syncline_steps", "Steps of the job.", value=figures.step)
    yield CounterMetricFamily("syncline_run_seconds", "Time since the job has formed.", value=figures.seconds)
    yield GaugeMetricFamily("syncline_steps_per_second", "Steps of the job.", value=figures.steps_per_second)
    yield GaugeMetricFamily(
        "syncline_samples_per_second", "Samples read by all workers.", value=figures.samples_per_second
    )
    members = GaugeMetricFamily("syncline_members", "Members that are alive, by role.", labels=["role"])
    for role in ("worker", "server"):
        members.add_metric([role], sum(member.role == role for member in figures.members))
    yield members
    yield GaugeMetricFamily("syncline_members_gone", "Members that died and are waited for.", value=len(figures.gone))
    longest = max((wait.seconds for wait in figures.waits), default=0.0)
    yield GaugeMetricFamily("syncline_longest_wait_seconds", "The longest wait of members for others.", value=longest)
    readings = GaugeMetricFamily(
        "syncline_metric", "The newest reading of each metric of the script.", labels=["name"]
    )
    for name, value in figures.readings.items():
        readings.add_metric([name], value)
    yield readings
    if figures.staleness_counts:
        yield _staleness(figures.staleness_counts)


def _staleness(counts: tuple[int, ...]) -> Metric:
    buckets, total = [], 0
    for k, count in enumerate(counts):
        total += count
        bound = "+Inf" if k == len(counts) - 1 else str(float(0 if k == 0 else 2**k - 1))
        buckets.append((bound, total))
    histogram = HistogramMetricFamily("syncline_staleness_updates", "Updates that gradients are behind, per slice.")
    histogram.add_metric([], buckets=buckets, sum_value=None)
    return histogram


def _of_members(members: tuple[MemberFigures, ...]) -> Iterator[Metric]:
    def gauge(name: str, text: str, field: str, role: str = "") -> Metric:
        family = GaugeMetricFamily(name, text, labels=["member", "role", "host"])
        for member in members:
            value = getattr(member, field)
            if value is not None and (not role or member.role == role):
                family.add_metric([member.name, member.role, member.host], value)
        return family

    def counter(name: str, text: str, field: str, role: str = "") -> Metric:
        """Of one life: it begins at zero again when a member is started again."""
        family = CounterMetricFamily(name, text, labels=["member", "role", "host"])
        for member in members:
            if not role or member.role == role:
                family.add_metric([member.name, member.role, member.host], getattr(member.counts, field))
        return family

    yield gauge("syncline_member_memory_bytes", "Resident memory.", "memory_bytes")
    yield gauge("syncline_member_gpu_memory_bytes", "Memory held on GPUs.", "gpu_bytes")
    yield gauge("syncline_member_gpu_busy_ratio", "Part of the time in which its GPUs computed.", "gpu_busy")
    yield gauge("syncline_member_busy_cores", "Cores kept busy.", "cores")
    yield gauge("syncline_member_sent_bytes_per_second", "Bytes sent.", "sent_per_second")
    yield gauge("syncline_member_received_bytes_per_second", "Bytes received.", "received_per_second")
    yield counter("syncline_member_cpu_seconds", "Processor time used.", "cpu_seconds")
    yield counter("syncline_member_sent_bytes", "Bytes sent.", "sent_bytes")
    yield counter("syncline_member_received_bytes", "Bytes received.", "received_bytes")
    yield counter("syncline_worker_samples", "Samples read.", "num_samples", "worker")
    yield gauge("syncline_member_heard_seconds", "Time since it was last heard of.", "heard_seconds")
    yield gauge("syncline_member_rtt_seconds", "Round-trip time to the coordinator.", "rtt_seconds")
    yield gauge("syncline_worker_lag_steps", "Steps behind the fastest worker.", "lag", "worker")
    yield gauge("syncline_worker_samples_per_second", "Samples read.", "samples_per_second", "worker")
    times = GaugeMetricFamily(
        "syncline_member_step_seconds", "Where the time of a step goes, in the mean.", labels=["member", "phase"]
    )
    for member in members:
        for phase in _PHASES:
            value: Any = getattr(member, phase)
            if value:
                times.add_metric([member.name, phase], value)
    yield times
