"""Members that are killed, stopped, told to end, or cut off: the job goes on, and the ledger stays right."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

REPLICAS = ("-w", "3", "-s", "2", "--replicas", "2")


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("member", ["worker-1", "server-1", "coordinator"])
def test_a_killed_member_comes_back_and_nothing_is_lost(hurt: Callable[..., Any], member: str) -> None:
    job = hurt(*REPLICAS, "--policy", "sync", seconds=7.0)
    job.until(r"worker-2 has row")
    time.sleep(1.0)
    job.hit(member)
    output = job.ends_well()
    assert f"{member} was killed by SIGKILL" in output
    back = "the coordinator is back" if member == "coordinator" else rf"{member} \(incarnation \d+\) has joined"
    assert re.search(back, output), output


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("seconds", [1.0, 5.0, 30.0])
@pytest.mark.parametrize("member", ["worker-1", "server-1", "coordinator"])
def test_a_stopped_member_is_evicted_after_its_deadline_and_does_no_harm_when_it_goes_on(
    hurt: Callable[..., Any], member: str, seconds: float
) -> None:
    """SIGSTOP, then SIGCONT: it comes back with stale state, and must hear that it is out."""
    job = hurt(*REPLICAS, "--policy", "sync", seconds=seconds + 8.0)
    job.until(r"worker-2 has row")
    time.sleep(1.0)
    pid = job.pid(member)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    output = job.ends_well()
    evicted = re.search(rf"{member} \(incarnation \d+\) is out", output)
    assert bool(evicted) == (seconds > 4.0 and member != "coordinator"), output


@pytest.mark.slow
@pytest.mark.proof
def test_sigterm_lets_a_worker_finish_its_step_and_a_server_hand_over_its_slices(hurt: Callable[..., Any]) -> None:
    job = hurt("-w", "3", "-s", "2", "--replicas", "1", "--policy", "async", seconds=7.0)
    job.until(r"worker-2 has row")
    time.sleep(1.0)
    job.hit("worker-1", signal.SIGTERM)
    job.hit("server-1", signal.SIGTERM)
    output = job.ends_well()
    assert "server-1 has handed over its slices and leaves" in output
    assert " is out: " not in output and "starts again" not in output
    assert "revoked" not in output


@pytest.mark.slow
def test_one_replica_and_a_dead_server_the_job_goes_on_and_says_what_that_cost(hurt: Callable[..., Any]) -> None:
    """In sync the freshest copy is exact: with a rule that has no state, nothing is lost at all."""
    job = hurt("-w", "2", "-s", "2", "--replicas", "1", "--policy", "sync", seconds=7.0)
    job.until(r"worker-1 has row")
    time.sleep(1.0)
    job.hit("server-1")
    output = job.ends_well()
    assert re.search(r"slices came back from the copy of worker-\d, with fresh rule state; 0 acknowledged", output)


@pytest.mark.slow
@pytest.mark.proof
def test_one_replica_in_async_the_loss_is_counted_and_nothing_is_doubled(hurt: Callable[..., Any]) -> None:
    job = hurt("-w", "3", "-s", "2", "--replicas", "1", "--policy", "async", seconds=7.0, script=["--may-lose"])
    job.until(r"worker-2 has row")
    time.sleep(1.0)
    job.hit("server-1")
    job._process.wait(90)
    job._reader.join(10)
    assert job._process.returncode == 0, job.output
    assert re.search(r"ledger: \d+ acknowledged, \d+ lost, 0 doubled", job.output), job.output
    assert re.search(r"\d+ acknowledged updates were revoked", job.output), job.output


@pytest.mark.slow
@pytest.mark.proof
def test_a_journal_that_cannot_be_written_stops_changes_only(
    hurt: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    """A small tmpfs fills up: pushes go on; when there is space again, so do changes."""
    runs = tmp_path / "small"
    runs.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(runs)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a tmpfs needs root")
    try:
        job = hurt("-w", "3", "-s", "1", "--policy", "async", "--runs", str(runs), seconds=9.0)
        job.until(r"worker-2 has row")
        filler = runs / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        job.hit("worker-1")
        job.until("cannot be kept|the change waits|make space")
        filler.unlink()
        job.until(r"worker-1 \(incarnation \d+\) has joined")
        job._process.wait(90)
    finally:
        job.close()
        subprocess.run(["umount", "-l", str(runs)], check=False)


JUMPING = """
import random, time
_true = time.time
time.time = lambda: _true() + random.choice((-3600.0, 0.0, 3600.0))
"""


@pytest.mark.slow
@pytest.mark.proof
def test_a_wall_clock_that_jumps_an_hour_back_and_forth_kills_nobody(
    hurt: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    """Every look at it is off by an hour or not: who measured a deadline by it would evict at once, or never."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(JUMPING)
    job = hurt(*REPLICAS, "--policy", "sync", seconds=8.0, PYTHONPATH=str(tmp_path / "clock"))
    job.until(r"worker-2 has row")
    job.hit("worker-1")
    output = job.ends_well()
    assert re.findall(r"(\S+) \(incarnation \d+\) is out", output) == ["worker-1"], output


@pytest.fixture
def three_hosts() -> Iterator[list[tuple[str, str]]]:
    """Namespaces on one bridge: (name, address)."""
    if not shutil.which("nft"):
        pytest.skip("needs nftables")
    tag = secrets.token_hex(3)
    bridge = f"synb{tag}"
    hosts = [(f"syn{tag}{k}", f"10.78.0.{k + 1}") for k in range(3)]

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, timeout=10)

    try:
        try:
            run("ip", "netns", "add", bridge)
            run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", bridge, "link", "set", "br0", "up")
            for k, (name, address) in enumerate(hosts):
                run("ip", "netns", "add", name)
                run(
                    "ip", "link", "add", f"v{tag}{k}", "netns", name, "type", "veth", "peer", f"p{k}", "netns", bridge
                )
                run("ip", "-n", bridge, "link", "set", f"p{k}", "master", "br0")
                run("ip", "-n", bridge, "link", "set", f"p{k}", "up")
                run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", f"v{tag}{k}")
                run("ip", "-n", name, "link", "set", f"v{tag}{k}", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield hosts
    finally:
        for name in (bridge, *(name for name, _ in hosts)):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def nft(host: str, *words: str) -> None:
    subprocess.run(["ip", "netns", "exec", host, "nft", *words], check=True, capture_output=True, timeout=10)


def cut(host: str, direction: str, chance: int = 100) -> None:
    """Drops what comes into or goes out of a host, or so many percent of it; loopback is left alone."""
    nft(host, "add", "table", "inet", "cut")
    nft(host, "add", "chain", "inet", "cut", direction, f"{{ type filter hook {direction} priority 0; }}")
    what = ["iifname" if direction == "input" else "oifname", "!=", "lo"]
    often = [] if chance >= 100 else ["numgen", "random", "mod", "100", "<", str(chance)]
    nft(host, "add", "rule", "inet", "cut", direction, *what, *often, "drop")


def mend(host: str) -> None:
    nft(host, "delete", "table", "inet", "cut")


def spanned(hurt: Callable[..., Any], hosts: list[tuple[str, str]], seconds: float, policy: str) -> Any:
    """The coordinator, a server and a worker on the first host, a server and a worker on each of the others."""
    flags = [
        "-H", ",".join(f"{name}:1" for name, _ in hosts), "-s", "3", "--replicas", "2", "--policy", policy,
        "--remote", "ip netns exec {host}", "--bind", hosts[0][1],
    ]  # fmt: skip
    return hurt(*flags, seconds=seconds, prefix=["ip", "netns", "exec", hosts[0][0]])


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("directions", [("input",), ("output",), ("input", "output")], ids="+".join)
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_host_that_is_cut_off_is_evicted_and_hears_of_it_when_it_is_back(
    hurt: Callable[..., Any], three_hosts: list[tuple[str, str]], directions: tuple[str, ...], policy: str
) -> None:
    """One-way and two-way partitions: a server and a worker on the other side must not go on by themselves."""
    job = spanned(hurt, three_hosts, 25.0, policy)
    job.until(r"worker-2 has row")
    time.sleep(1.0)
    for direction in directions:
        cut(three_hosts[2][0], direction)
    job.until(r"worker-2 \(incarnation \d+\) is out")
    job.until(r"server-2 \(incarnation \d+\) is out")
    time.sleep(2.0)
    mend(three_hosts[2][0])
    output = job.ends_well()
    assert re.search(r"worker-2 \(incarnation \d+\) has joined", output), output


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_link_that_loses_packets_costs_time_and_nothing_else(
    hurt: Callable[..., Any], three_hosts: list[tuple[str, str]], policy: str
) -> None:
    job = spanned(hurt, three_hosts, 15.0, policy)
    job.until(r"worker-2 has row")
    cut(three_hosts[1][0], "input", chance=5)
    cut(three_hosts[2][0], "output", chance=5)
    time.sleep(8.0)
    mend(three_hosts[1][0])
    mend(three_hosts[2][0])
    job.ends_well()
