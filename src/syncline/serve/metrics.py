"""What serving processes count, as OpenMetrics text."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Collection, Iterable, Sequence

import msgspec

_LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Instead of the names of versions that are no longer in memory: there may be any number of them.
EARLIER = "earlier"


class ServingHistogram:
    """Counts by upper bounds. One thread observes; any may read."""

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        self._bounds = tuple(bounds)
        self._counts = list(counts) or [0] * (len(bounds) + 1)
        self._sum = total

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def counts(self) -> tuple[int, ...]:
        """By bound; the last one has none."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._sum

    def quantile(self, part: float) -> float:
        """The upper bound under which this part of the values lies; 0.0 if there are none."""
        wanted, seen = part * self.count, 0
        for bound, number in zip((*self._bounds, self._bounds[-1]), self._counts, strict=True):
            seen += number
            if seen and seen >= wanted:
                return bound
        return 0.0

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, number in zip((*self._bounds, None), self._counts, strict=True):
            total += number
            yield f'{name}_bucket{{le="{"+Inf" if bound is None else f"{float(bound)!r}"}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class ServingTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has counted, or several together."""

    requests: tuple[tuple[str, int, int], ...] = ()  #: version, status, and how many
    latency_counts: tuple[int, ...] = (0,) * (len(_LATENCIES) + 1)
    latency_sum: float = 0.0
    batch_counts: tuple[int, ...] = (0,) * (len(_BATCHES) + 1)
    batch_sum: float = 0.0
    num_queued: int = 0
    num_connections: int = 0

    @property
    def latency(self) -> ServingHistogram:
        return ServingHistogram(_LATENCIES, self.latency_counts, self.latency_sum)

    @property
    def batch_rows(self) -> ServingHistogram:
        return ServingHistogram(_BATCHES, self.batch_counts, self.batch_sum)

    @property
    def num_requests(self) -> int:
        return sum(number for _, _, number in self.requests)

    def ended(self) -> ServingTotals:
        """What stays of them when the process has ended."""
        return msgspec.structs.replace(self, num_queued=0, num_connections=0)

    def text(self, *, current: str, loaded: Collection[str], num_replicas: int) -> bytes:
        """OpenMetrics 1.0."""
        lines = ["# TYPE syncline_requests counter", "# HELP syncline_requests Answered inference requests."]
        lines += [
            f'syncline_requests_total{{version="{version}",status="{status}"}} {number}'
            for version, status, number in self.requests
        ]
        for name, help, histogram in (
            ("syncline_request_seconds", "From the whole request to its answer.", self.latency),
            ("syncline_batch_rows", "Rows of each call of the model.", self.batch_rows),
        ):
            lines += [f"# TYPE {name} histogram", f"# HELP {name} {help}", *histogram.lines(name)]
        for name, help, value in (
            ("syncline_queue_requests", "Requests that wait for a batch.", self.num_queued),
            ("syncline_connections", "Open HTTP connections.", self.num_connections),
            ("syncline_replicas", "Processes that answer.", num_replicas),
        ):
            lines += [f"# TYPE {name} gauge", f"# HELP {name} {help}", f"{name} {value}"]
        lines += ["# TYPE syncline_version_loaded gauge", "# HELP syncline_version_loaded 1: answers; 0: in memory."]
        lines += [f'syncline_version_loaded{{version="{name}"}} {int(name == current)}' for name in loaded]
        return ("\n".join(lines) + "\n# EOF\n").encode()


def added_up(parts: Iterable[ServingTotals], loaded: Collection[str]) -> ServingTotals:
    """The sum of several processes. Requests of versions that are no longer `loaded` are summed up as `earlier`."""
    parts = list(parts)
    requests: dict[tuple[str, int], int] = {}
    for part in parts:
        for version, status, number in part.requests:
            key = (version if not version or version in loaded else EARLIER, status)
            requests[key] = requests.get(key, 0) + number
    return ServingTotals(
        requests=tuple((*key, number) for key, number in sorted(requests.items())),
        latency_counts=_columns([part.latency_counts for part in parts], len(_LATENCIES) + 1),
        latency_sum=sum(part.latency_sum for part in parts),
        batch_counts=_columns([part.batch_counts for part in parts], len(_BATCHES) + 1),
        batch_sum=sum(part.batch_sum for part in parts),
        num_queued=sum(part.num_queued for part in parts),
        num_connections=sum(part.num_connections for part in parts),
    )


def _columns(rows: Sequence[Sequence[int]], width: int) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * width


class ServingMetrics:
    """Requests by version and status, latency, batch sizes, refusals: of this process."""

    def __init__(self) -> None:
        self.latency = ServingHistogram(_LATENCIES)
        self.batch_rows = ServingHistogram(_BATCHES)
        self._requests: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def count(self, version: str, status: int) -> None:
        with self._lock:
            self._requests[version, status] = self._requests.get((version, status), 0) + 1

    def forget(self, loaded: Collection[str]) -> None:
        """Sums up what was counted for versions that are not `loaded`."""
        with self._lock:
            for version, status in list(self._requests):
                if version and version not in loaded and version != EARLIER:
                    number = self._requests.pop((version, status))
                    self._requests[EARLIER, status] = self._requests.get((EARLIER, status), 0) + number

    def totals(self, *, num_queued: int, num_connections: int) -> ServingTotals:
        with self._lock:
            requests = tuple((*key, number) for key, number in sorted(self._requests.items()))
        return ServingTotals(
            requests=requests,
            latency_counts=self.latency.counts,
            latency_sum=self.latency.total,
            batch_counts=self.batch_rows.counts,
            batch_sum=self.batch_rows.total,
            num_queued=num_queued,
            num_connections=num_connections,
        )
