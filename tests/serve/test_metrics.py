"""What serving processes count, and what they count together."""

from __future__ import annotations

from syncline.serve.metrics import EARLIER, ServingMetrics, added_up


def counted(*requests: tuple[str, int], seconds: float = 0.01) -> ServingMetrics:
    metrics = ServingMetrics()
    for version, status in requests:
        metrics.count(version, status)
        metrics.latency.observe(seconds)
        metrics.batch_rows.observe(2)
    return metrics


def test_processes_are_added_up() -> None:
    first = counted(("1", 200), ("1", 200), ("", 400)).totals(num_queued=3, num_connections=5)
    second = counted(("1", 200), ("2", 200), seconds=4.0).totals(num_queued=1, num_connections=7)
    both = added_up([first, second], ["1", "2"])
    assert both.requests == (("", 400, 1), ("1", 200, 3), ("2", 200, 1)) and both.num_requests == 5
    assert both.latency.count == both.batch_rows.count == 5 and both.batch_rows.total == 10
    assert both.latency.quantile(0.5) == 0.01 and both.latency.quantile(0.99) == 5.0
    assert (both.num_queued, both.num_connections) == (4, 12)
    assert (both.ended().num_queued, both.ended().num_connections) == (0, 0) and both.ended().num_requests == 5
    text = both.text(current="2", loaded=["1", "2"], num_replicas=2).decode().splitlines()
    assert 'syncline_requests_total{version="1",status="200"} 3' in text and "syncline_replicas 2" in text
    assert added_up([], []).num_requests == 0


def test_versions_that_are_gone_are_counted_together() -> None:
    """Else there would be more lines with every version. No count ever falls."""
    metrics = counted(("1", 200), ("2", 200), ("3", 200), ("3", 500), ("", 404))
    metrics.forget(["3"])
    metrics.count("1", 200)  # it had begun before
    metrics.forget(["3"])
    totals = metrics.totals(num_queued=0, num_connections=0)
    assert totals.requests == (("", 404, 1), ("3", 200, 1), ("3", 500, 1), (EARLIER, 200, 3))
    assert added_up([totals], []).requests == (("", 404, 1), (EARLIER, 200, 4), (EARLIER, 500, 1))
