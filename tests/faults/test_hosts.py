"""Hosts that are cut off from each other, wholly, one way or now and then: the ledger stays right."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE


@pytest.fixture
def three_hosts() -> Iterator[list[tuple[str, str]]]:
    """Namespaces on one bridge: (name, address)."""
    if not shutil.which("nft"):
        pytest.skip("needs nftables")
    tag = secrets.token_hex(3)
    bridge = f"synb{tag}"
    hosts = [(f"syn{tag}{k}", f"10.78.0.{k + 1}") for k in range(3)]

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE)

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
    subprocess.run(["ip", "netns", "exec", host, "nft", *words], check=True, capture_output=True, timeout=PATIENCE)


def cut(host: str, direction: str, chance: int = 100) -> None:
    """Drops what comes into or goes out of a host, or so many percent of it; loopback is left alone."""
    nft(host, "add", "table", "inet", "cut")
    nft(host, "add", "chain", "inet", "cut", direction, f"{{ type filter hook {direction} priority 0; }}")
    what = ["iifname" if direction == "input" else "oifname", "!=", "lo"]
    often = [] if chance >= 100 else ["numgen", "random", "mod", "100", "<", str(chance)]
    nft(host, "add", "rule", "inet", "cut", direction, *what, *often, "drop")


def mend(host: str) -> None:
    nft(host, "delete", "table", "inet", "cut")


def spanned(hurt: Callable[..., Any], hosts: list[tuple[str, str]], policy: str, *, may_lose: bool = False) -> Any:
    """The coordinator, a server and a worker on the first host, a server and a worker on each of the others."""
    flags = [
        "-H", ",".join(f"{name}:1" for name, _ in hosts), "-s", "3", "--replicas", "2", "--policy", policy,
        "--remote", "ip netns exec {host}", "--bind", hosts[0][1],
    ]  # fmt: skip
    script = ["--may-lose"] if may_lose else []
    return hurt(*flags, prefix=["ip", "netns", "exec", hosts[0][0]], script=script)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("directions", [("input",), ("output",), ("input", "output")], ids="+".join)
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_host_that_is_cut_off_is_evicted_and_hears_of_it_when_it_is_back(
    hurt: Callable[..., Any], three_hosts: list[tuple[str, str]], directions: tuple[str, ...], policy: str
) -> None:
    """One-way and two-way partitions: a server and a worker on the other side must not go on by themselves.

    Both are lost at once, which may be in one step: that is outside of what is promised, and is said then.
    """
    job = spanned(hurt, three_hosts, policy, may_lose=True)
    job.until_at_work("worker-0", "worker-1", "worker-2")
    for direction in directions:
        cut(three_hosts[2][0], direction)
    job.until(r"worker-2 \(incarnation \d+\) is out")
    job.until(r"server-2 \(incarnation \d+\) is out")
    time.sleep(2.0)
    mend(three_hosts[2][0])
    job.until_back("worker-2")
    job.until_back("server-2")
    output = job.ends_well(may_lose=True)
    (*_, accounts) = re.findall(r"ledger: \d+ acknowledged, (\d+) lost, 0 doubled(.*)", output)
    was_said = "a worker and a server died in one step, which may be applied to some slices only" in output
    assert was_said or accounts == ("0", ""), output
    assert sorted(job.evicted()) == ["server-2", "worker-2"], output
    for member in ("server-2", "worker-2"):
        # It hears of it from the coordinator or, a worker, from a server, and says so. Where it is
        # slow to hear of it, the launcher has ended it.
        heard = re.search(rf"syncline: {member}(: FencedError| was evicted): ", output)
        how = "was evicted" if heard else "was evicted, and ended by the launcher"
        assert f"syncline: {member} {how}; starts again" in output, output


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_link_that_loses_packets_costs_time_and_nothing_else(
    hurt: Callable[..., Any], three_hosts: list[tuple[str, str]], policy: str
) -> None:
    job = spanned(hurt, three_hosts, policy)
    job.until_at_work("worker-0", "worker-1", "worker-2")
    cut(three_hosts[1][0], "input", chance=5)
    cut(three_hosts[2][0], "output", chance=5)
    time.sleep(8.0)
    mend(three_hosts[1][0])
    mend(three_hosts[2][0])
    output = job.ends_well()
    assert not job.evicted() and "starts again" not in output, output
