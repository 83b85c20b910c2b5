"""Memory: read from the system, as bytes beyond another process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import footprint, memory
from benchmarks.row import Effort, NotMeasured, Outcome, Reach, Row
from syncline.errors import ConnectionLost

MIB = 1 << 20
REACH = Reach("at most", 2.0)
TOLD = os.path.exists("/proc/self/smaps_rollup")
told = pytest.mark.skipif(not TOLD, reason="the system does not tell PSS")


def test_pss_is_read_in_bytes():
    text = "5581-7ffd ---p 00000000 00:00 0  [rollup]\nRss:      9000 kB\nPss:      1234 kB\nPss_Anon:  17 kB\n"
    assert memory._read(text) == 1234 * 1024
    with pytest.raises(NotMeasured, match="needs a system that tells PSS"):
        memory._read("Rss: 9000 kB\n")


@told
def test_what_this_process_takes_counts():
    before = memory.pss_bytes(os.getpid())
    taken = np.ones(32 * MIB, np.uint8)
    assert memory.pss_bytes(os.getpid()) - before > 0.9 * taken.nbytes


@told
def test_a_process_that_is_gone_is_named():
    with pytest.raises(ConnectionLost, match="the memory of process 999999999 cannot be read: No such"):
        memory.pss_bytes(999_999_999)


def test_a_system_that_does_not_tell_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: Effort):
    monkeypatch.setattr(memory, "_path", lambda pid: str(tmp_path / "absent"))
    for row in (
        footprint.server_memory("s", MIB, transport="shm", num_staged=0, reach=REACH),
        footprint.worker_memory("w", (784, 10), reach=REACH),
    ):
        with pytest.raises(NotMeasured, match=r"needs a system with /proc/PID/smaps_rollup"):
            row.measure(fast)


def test_the_bytes_of_an_mlp():
    """Weights and biases, four bytes each."""
    assert footprint.mlp_bytes((784, 4, 10)) == 4 * (784 * 4 + 4 + 4 * 10 + 10)


def test_what_a_row_compares_with_is_in_its_words():
    over_tcp = footprint.server_memory("t", 64 * MIB, transport="tcp", num_staged=1, reach=REACH)
    assert over_tcp.unit == "bytes" and over_tcp.reference.endswith("plus one model that is staged: 256 MiB")
    assert footprint.worker_memory("w", (784, 2688, 2688, 2688, 10), reach=REACH).reference == "parameters: 63 MiB"


SMALL = {
    "server": footprint.server_memory("s", 16 * MIB, transport="shm", num_staged=0, reach=REACH),
    "worker": footprint.worker_memory("w", (784, 2048, 2048, 10), reach=REACH),
}


@told
@pytest.mark.proof
@pytest.mark.parametrize("row", [pytest.param(SMALL[name], id=name) for name in ("server", "worker")])
def test_a_small_model_takes_about_what_it_should(row: Row, fast: Effort):
    """Another process's memory, or that of the idle one, would be far off."""
    samples = row.measure(fast)
    assert set(samples.reference) <= {48.0 * MIB, float(footprint.mlp_bytes((784, 2048, 2048, 10)))}
    assert 0.7 < Outcome(row, samples).ratio < 2.0
