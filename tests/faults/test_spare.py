"""`sync:spare=1` with two servers and two replicas, real processes, one worker slow, and whoever dies in between.

In one process, with a server that dies: tests/server/test_spare_servers.py."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests import forked
from tests.patience import PATIENCE

LEDGER = pathlib.Path(__file__).parent / "spare_ledger.py"


@pytest.mark.proof
@pytest.mark.parametrize(
    "fault",
    [
        "",
        "worker-1@commit.decided#20=kill",
        "server-0@commit.decided#60=kill",
        "worker-3@commit.decided#5=kill",
        "worker-1@commit.told#20=kill",
        "server-0@replicate.sent#40=kill",
        "server-0@slice.applied#50=kill",
        "server-1@slice.applied#50=kill",
        "server-1@commit.answered#50=kill",
    ],
)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_step_counts_on_all_servers_or_was_late(hurt: Callable[..., Any], fault: str, transport: str) -> None:
    flags = ["-w", "4", "-s", "2", "--replicas", "2", "--policy", "sync:spare=1", "--transport", transport]
    job = hurt(*flags, ledger=LEDGER, fault=fault)
    job.until_at_work("worker-0", "worker-1", "worker-2", "worker-3")
    if fault:
        victim = fault.partition("@")[0]
        job.until(f"{victim} was killed by SIGKILL")
        job.until_back(victim)
    output = job.ends_well()
    (late,) = re.findall(r"late: (\d+)", output)
    assert int(late) > 0, output


@pytest.mark.proof
@pytest.mark.parametrize("fault", ["", "worker-1@commit.decided#20=kill"])
def test_slices_move_to_a_server_that_comes_and_back(hurt: Callable[..., Any], fault: str) -> None:
    """The job began with one server, so that whoever waits reads the answers; then there are two, then one again."""
    job = hurt("-w", "4", "-s", "1", "--policy", "sync:spare=1", ledger=LEDGER, fault=fault)
    job.until_at_work("worker-0", "worker-1", "worker-2", "worker-3")
    for servers in ("2", "1"):
        words = [sys.executable, "-m", "syncline", "scale", "hurt", "-s", servers]
        forked.run(words, cwd=job.folder, check=True, timeout=PATIENCE, capture_output=True)
        job.until(
            r"replica sets: \d+ slices? go(es)? from server-0" if servers == "2" else "has handed over its slices"
        )
        if fault and servers == "2":
            job.until("worker-1 was killed by SIGKILL")
            job.until_back("worker-1")
    job.ends_well()
