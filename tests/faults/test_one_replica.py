"""One replica, and its server dies: the slices come back from a worker's copy, and what that cost is said."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow
RESTORED = r"\d+ slices? came back from the copy of worker-\d.*, with fresh rule state; (\d+) acknowledged updates?"


@pytest.fixture(autouse=True)
def who_is_silent_is_slow(tmp_path: pathlib.Path) -> None:
    """Members are killed here, and none is stopped: a machine may stand still for seconds."""
    patient = {"deadline": 60.0, "longest_deadline": 120.0, "start": 300.0, "coordinator": 300.0}
    text = "".join(f"{name}_seconds = {seconds}\n" for name, seconds in patient.items())
    (tmp_path / "syncline.toml").write_text(text)


def ways() -> list[Any]:
    quick = {("1", "auto")}
    found = [(servers, transport) for servers in ("1", "2") for transport in ("auto", "shm", "tcp")]
    return [pytest.param(*way, marks=[] if way in quick else [pytest.mark.proof]) for way in found]


@pytest.mark.parametrize(("servers", "transport"), ways())
def test_in_sync_the_freshest_copy_is_exact(hurt: Callable[..., Any], servers: str, transport: str) -> None:
    """With a rule that has no state nothing is lost at all, even of the only server."""
    flags = ("-w", "2", "-s", servers, "--replicas", "1", "--policy", "sync", "--transport", transport)
    job = hurt(*flags, only_kills=True)
    job.until_at_work("worker-0", "worker-1")
    job.until_stepped()
    job.hit("server-0")
    job.until_back("server-0")
    job.until(RESTORED)
    output = job.ends_well()
    assert re.findall(RESTORED, output) == ["0"], output
    assert job.evicted() == ["server-0"], output


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("servers", ["1", "2"])
@pytest.mark.parametrize("policy", ["bounded:2", "async"])
def test_otherwise_the_loss_is_counted_and_nothing_is_doubled(
    hurt: Callable[..., Any], policy: str, servers: str, transport: str
) -> None:
    flags = ("-w", "3", "-s", servers, "--replicas", "1", "--policy", policy, "--transport", transport)
    job = hurt(*flags, script=["--may-lose"], only_kills=True)
    job.until_at_work("worker-2")
    job.until_stepped()  # before that, no worker has a copy
    job.hit("server-0")
    job.until_back("server-0")
    job.until(RESTORED)
    output = job.ends_well(may_lose=True)
    revoked = sum(map(int, re.findall(RESTORED, output)))
    lost = int(re.findall(r"ledger: \d+ acknowledged, (\d+) lost, 0 doubled", output)[-1])
    assert lost <= revoked, output


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_two_replicas_lose_nothing_by_either_transport(hurt: Callable[..., Any], policy: str, transport: str) -> None:
    flags = ("-w", "2", "-s", "2", "--replicas", "2", "--policy", policy, "--transport", transport)
    job = hurt(*flags, only_kills=True)
    job.until_at_work("worker-1")
    job.hit("server-0")
    job.until_back("server-0")
    assert "revoked" not in job.ends_well()
