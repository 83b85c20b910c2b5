"""Two hosts as two network namespaces, TLS between them, started by one `syncline run -H`."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

SCRIPT = """
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(300_000, np.float32)}, syncline.Rule("SGD", lr=1.0), reduce="sum")
    for _ in range(5):
        out = job.kv.push_pull({"x": np.full(300_000, 1.0 + job.rank, np.float32)}).wait()
    assert (out["x"] == -15.0).all(), out["x"]
    job.barrier("end")
    wires = [type(e.connection.stream).__name__ for e in job.exchange.routes.endpoints.values()]
    print("HOST", job.name, job.local_rank, wires, job.exchange.stats().bytes_sent > 4_000_000, flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Namespaces joined by a pair of virtual cards: 10.77.0.1 and 10.77.0.2."""
    tag = secrets.token_hex(3)
    one, two = f"syn{tag}a", f"syn{tag}b"
    try:
        try:
            ip("netns", "add", one)
            ip("netns", "add", two)
            ip("link", "add", f"v{tag}a", "netns", one, "type", "veth", "peer", "name", f"v{tag}b", "netns", two)
            for name, card, address in ((one, f"v{tag}a", "10.77.0.1/24"), (two, f"v{tag}b", "10.77.0.2/24")):
                ip("-n", name, "addr", "add", address, "dev", card)
                ip("-n", name, "link", "set", card, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not allowed here: {getattr(error, 'stderr', '') or error}")
        yield one, two
    finally:
        for name in (one, two):
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_one_command_two_hosts_and_tls_between_them(commands: Any, two_hosts: tuple[str, str]) -> None:
    """On its own host a worker shares memory with the server; the other one speaks TLS to it."""
    one, two = two_hosts
    script = commands.script(SCRIPT)
    process = subprocess.Popen(
        ["ip", "netns", "exec", one, sys.executable, "-m", "syncline", "run", "-H", f"{one}:1,{two}:1",
         "-s", "1", "--remote", "ip netns exec {host}", "--bind", "10.77.0.1", "--name", "hosts", script],
        cwd=commands.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    result = commands.finish(process)
    assert result.code == 0, result.output
    lines = sorted(line.rpartition("HOST ")[2] for line in result.output.splitlines() if "HOST " in line)
    assert lines == ["worker-0 0 ['PlainStream'] False", "worker-1 0 ['TlsStream'] True"]
    commands.check_nothing_left()


RING = """
    import numpy as np, syncline, time
    job = syncline.init(wait_seconds=120.0)
    job.kv.register({"x": np.zeros(3_000_000, np.float32)}, syncline.Rule("Adam", lr=0.1))
    draw = np.random.default_rng(job.rank)
    for step in job.steps(40):
        job.kv.push_pull({"x": draw.standard_normal(3_000_000).astype(np.float32)}).wait()
        if job.own_step == 5:
            print("under way", flush=True)
        time.sleep(0.1)
    job.barrier("end")
    found = np.asarray(job.kv.pull(["x"])["x"])
    print("HOST digest", int(found.view(np.uint32).astype(np.uint64).sum()), flush=True)
"""


@pytest.mark.proof
@pytest.mark.parametrize("victim", ["", "worker-1", "worker-2"])
def test_a_ring_over_hosts_with_two_workers_each(commands: Any, two_hosts: tuple[str, str], victim: str) -> None:
    """Sums are made inside hosts and go between them by TLS; whoever is killed comes back, and all have the same."""
    one, two = two_hosts
    process = subprocess.Popen(
        ["ip", "netns", "exec", one, sys.executable, "-m", "syncline", "run", "-H", f"{one}:2,{two}:2",
         "--exchange", "ring", "--remote", "ip netns exec {host}", "--bind", "10.77.0.1", "--name", "hosts",
         commands.script(RING)],
        cwd=commands.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if victim:
        commands.wait_for("under way", victim)
        os.kill(commands.members()[victim], signal.SIGKILL)
    result = commands.finish(process)
    assert result.code == 0, result.output
    lines = [line.rpartition("HOST ")[2] for line in result.output.splitlines() if "HOST digest" in line]
    assert len(lines) == 4 and len(set(lines)) == 1, result.output
    assert "could not add up" not in result.output
    assert not victim or f"{victim} was killed by SIGKILL" in result.output
    commands.check_nothing_left()


def test_a_host_that_cannot_be_reached_is_named(commands: Any) -> None:
    """The prefix fails on the other host: it is named before anything starts."""
    script = commands.script(SCRIPT)
    options = (
        "-H",
        "localhost:1,elsewhere:1",
        "--remote",
        "false {host}",
        "--bind",
        "127.0.0.1",
        "--max-restarts",
        "0",
    )
    result = commands.run("run", *options, script)
    assert result.code == 2
    assert "host elsewhere: false elsewhere " in result.output and " ended with exit code 1; " in result.output
    assert not (commands.folder / "runs").exists()
