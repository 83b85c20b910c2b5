"""`syncline bench -H` between two hosts, which are network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.patience import JOB_PATIENCE

from benchmarks.namespaces import SERVER_ADDRESS, inside
from benchmarks.row import NotMeasured
from benchmarks.switch import switch


@pytest.mark.proof
def test_between_two_hosts():
    """The server and the far end of the floor are on the first host: both sides of `tls` cross the wire."""
    try:
        with switch(2, "1gbit") as over:
            first, _ = over.hosts
            words = ["-H", ",".join(over.hosts), "--remote", " ".join(inside("{host}")), "--bind", SERVER_ADDRESS]
            command = [sys.executable, "-m", "syncline", "bench", *words, "--quick", "--json", "--only", "tls"]
            before = over.sent_bytes()
            done = subprocess.run(
                [*inside(first), *command], capture_output=True, text=True, timeout=JOB_PATIENCE, check=False
            )
            sent = over.sent_bytes() - before
    except NotMeasured as reason:
        pytest.skip(str(reason))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["name"] == "tls" and len(row["ours_seconds"]) == len(row["floor_seconds"]) == 5
    assert sent > 2 * (5 + 5) * 2 * row["num_bytes"]  # two operations a turn at least, there and back
