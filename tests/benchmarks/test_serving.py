"""Rows about serving: what wrk says is read, and a server that cannot be measured is no figure."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.row import NotMeasured
from benchmarks.serving import PEERS, ServerProcess, body, check_wrk, peer, quantile, read_load
from syncline.errors import ConnectionLost

SAID = """Running 2s test @ http://127.0.0.1:1/predict
  1 threads and 64 connections
  Latency Distribution
     50%    2.50ms
     75%    4.00ms
     90%  900.00us
     99%    1.20s
  1000 requests in 2.00s, 100.00KB read
Requests/sec:    500.25
Transfer/sec:     50.00KB
at 2400 us: 49
at 2500 us: 940
at 1200000 us: 11
"""


def test_what_wrk_says() -> None:
    load = read_load(SAID)
    assert (load.num_requests, load.num_per_second, load.p50_seconds, load.p99_seconds) == (1000, 500.25, 0.0025, 1.2)
    assert quantile(load.latencies, 0.5) == 0.0025 and quantile(load.latencies, 0.99) == 1.2


@pytest.mark.parametrize(
    "said",
    [
        SAID + "  Non-2xx or 3xx responses: 3\n",
        SAID + "  Socket errors: connect 0, read 3, write 0, timeout 0\n",
        "unable to connect to 127.0.0.1:1 Connection refused\n",
    ],
)
def test_a_load_with_errors_is_no_figure(said: str) -> None:
    """A server that refuses requests is fast."""
    with pytest.raises(ConnectionLost, match="wrk"):
        read_load(said)


def test_what_is_missing_is_said(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotMeasured, match="needs wrk"):
        check_wrk()
    monkeypatch.setenv("SYNCLINE_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(NotMeasured, match=r"sh tools/setup_serve_peers\.sh"):
        peer(tmp_path, "litserve", "LeNet")


def test_a_server_that_does_not_start_says_why(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConnectionLost, match="nothing ended with 7: gone"):
        ServerProcess(tmp_path, "nothing", ["sh", "-c", "echo gone; exit 7"])


def test_all_sides_serve_the_same_models() -> None:
    assert (PEERS / "model.py").is_file() and body().startswith('{"input": [[[0.0, ')
