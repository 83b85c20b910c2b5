"""Weights, gathered pushes and rates per worker, while members are killed: the ledger stays right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.proof]
WAYS = {
    "weights": (("--policy", "async"), ("--weigh",)),
    "weights-bounded": (("--policy", "bounded:2"), ("--weigh",)),
    "gather": (("--policy", "async:gather=2"), ()),
    "rates": (("--policy", "sync", "--lr-per-worker"), ("--own-rates",)),
}


@pytest.mark.parametrize(("servers", "transport"), [("1", "shm"), ("2", "tcp")])
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_worker_leaves_the_ledger_exact(
    hurt: Callable[..., Any], way: str, servers: str, transport: str
) -> None:
    flags, script = WAYS[way]
    job = hurt("-w", "3", "-s", servers, "--transport", transport, *flags, script=script, only_kills=True)
    job.until_at_work("worker-2")
    job.hit("worker-1")
    job.until_back("worker-1")
    job.ends_well()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_server_with_a_backup_leaves_the_ledger_exact(
    hurt: Callable[..., Any], way: str, transport: str
) -> None:
    flags, script = WAYS[way]
    shape = ("-w", "2", "-s", "2", "--replicas", "2", "--transport", transport)
    job = hurt(*shape, *flags, script=script, only_kills=True)
    job.until_at_work("worker-1")
    job.hit("server-0")
    job.until_back("server-0")
    assert "revoked" not in job.ends_well()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_in_sync_a_killed_server_comes_back_from_a_copy(hurt: Callable[..., Any], transport: str) -> None:
    """With one replica, and a rule without state."""
    flags, script = WAYS["rates"]
    job = hurt("-w", "2", "-s", "1", "--transport", transport, *flags, script=script, only_kills=True)
    job.until_at_work("worker-0", "worker-1")
    job.until_stepped()
    job.hit("server-0")
    job.until_back("server-0")
    job.ends_well()
