"""What a serving process counts, as OpenMetrics text."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Sequence

_LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServingHistogram:
    """Counts by upper bounds. One thread observes; any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

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


class ServingMetrics:
    """Requests by version and status, latency, batch sizes, refusals."""

    def __init__(self) -> None:
        self.latency = ServingHistogram(_LATENCIES)
        self.batch_rows = ServingHistogram(_BATCHES)
        self._requests: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def count(self, version: str, status: int) -> None:
        with self._lock:
            self._requests[version, status] = self._requests.get((version, status), 0) + 1

    @property
    def num_requests(self) -> int:
        with self._lock:
            return sum(self._requests.values())

    def text(self, *, queue: int, connections: int, current: str, loaded: Iterable[str]) -> bytes:
        """OpenMetrics 1.0."""
        with self._lock:
            requests = sorted(self._requests.items())
        lines = ["# TYPE syncline_requests counter", "# HELP syncline_requests Answered inference requests."]
        lines += [
            f'syncline_requests_total{{version="{version}",status="{status}"}} {number}'
            for (version, status), number in requests
        ]
        for name, help, histogram in (
            ("syncline_request_seconds", "From the whole request to its answer.", self.latency),
            ("syncline_batch_rows", "Rows of each call of the model.", self.batch_rows),
        ):
            lines += [f"# TYPE {name} histogram", f"# HELP {name} {help}", *histogram.lines(name)]
        for name, help, value in (
            ("syncline_queue_requests", "Requests that wait for a batch.", queue),
            ("syncline_connections", "Open HTTP connections.", connections),
        ):
            lines += [f"# TYPE {name} gauge", f"# HELP {name} {help}", f"{name} {value}"]
        lines += ["# TYPE syncline_version_loaded gauge", "# HELP syncline_version_loaded 1: answers; 0: in memory."]
        lines += [f'syncline_version_loaded{{version="{name}"}} {int(name == current)}' for name in loaded]
        return ("\n".join(lines) + "\n# EOF\n").encode()
