"""mpirun and torchrun over two hosts that share nothing but a cable and a disk: two network namespaces."""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Callable, Sequence

import pytest
from tests.engines.conftest import Engine, finished_well, mpirun, torchrun
from tests.launch.test_namespaces import two_hosts

__all__ = ["two_hosts"]

pytestmark = pytest.mark.engines

#: Who speaks to whom by what: a rank shares a host with the servers, or speaks TLS to them.
WIRES = """
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(300_000, np.float32)}, syncline.Rule("SGD", lr=1.0), reduce="sum")
    for _ in range(5):
        out = job.kv.push_pull({"x": np.full(300_000, 1.0 + job.rank, np.float32)}).wait()
    assert (out["x"] == -15.0).all(), out["x"]
    job.barrier("end")
    wires = [type(e.connection.stream).__name__ for e in job.exchange.routes.endpoints.values()]
    print("HOST", job.name, wires, flush=True)
"""
PORT = 20_000 + os.getpid() % 10_000

#: Starts a job of two ranks, one on each of these hosts, with this environment: the code and what was shown.
Start = Callable[[Engine, tuple[str, str], dict[str, str]], tuple[int, str]]


def inside(host: str, *words: str) -> list[str]:
    """With a name of its own too: launchers tell hosts apart by their names."""
    named = f'hostname {host}; exec "$@"'
    return ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "sh", "-c", named, "sh", *words]


def by_mpirun(engine: Engine, hosts: tuple[str, str], environment: dict[str, str]) -> tuple[int, str]:
    """Its remote shell is a script that enters the other host, whose address is its first word."""
    engine.leave_out_torch()
    shell = engine.folder / "shell"
    shell.write_text(
        f'#!/bin/sh\nshift\nexec nsenter --net=/run/netns/{hosts[1]} unshare --uts sh -c "hostname {hosts[1]}; $*"\n'
    )
    shell.chmod(0o700)
    said = [
        word
        for name in ("SYNCLINE_TOKEN_FILE", "MASTER_ADDR", "PYTHONPATH", "XDG_CACHE_HOME", "PATH")
        for word in ("-x", name)
    ]
    command = mpirun("mpirun.openmpi", 2)
    options = ["-H", "10.77.0.1:1,10.77.0.2:1", "--mca", "plm_rsh_agent", str(shell), *said]
    words = inside(hosts[0], *command, *options, "python", "train.py")
    return engine.run(words, {**environment, "MASTER_ADDR": "10.77.0.1"})


def by_torchrun(engine: Engine, hosts: tuple[str, str], environment: dict[str, str]) -> tuple[int, str]:
    """An agent on each host; rank 0 is on the one that the store has chosen."""
    agents = []
    for number, host in enumerate(hosts, 1):
        words = torchrun(
            "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"10.77.0.1:{PORT}", "--rdzv-conf", f"is_host={int(number == 1)}",
            "--local-addr", f"10.77.0.{number}", "train.py",
        )  # fmt: skip
        agents.append(engine.start(inside(host, *words), environment))
    ends = [engine.finish(agent) for agent in agents]
    return max(code for code, _ in ends), "\n".join(output for _, output in ends)


def token(engine: Engine) -> dict[str, str]:
    path = engine.folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return {"SYNCLINE_TOKEN_FILE": str(path)}


@pytest.mark.parametrize("start", [by_mpirun, by_torchrun])
def test_ranks_on_two_hosts_meet_by_a_token_file_and_speak_tls(
    engine: Engine, two_hosts: tuple[str, str], start: Start
) -> None:
    """On the host of rank 0 a rank shares memory with the servers; the other one speaks TLS to them."""
    engine.script(WIRES)
    code, output = start(engine, two_hosts, token(engine))
    assert code == 0 and finished_well(output, 2), output
    wires: Sequence[str] = sorted(line.rpartition("HOST ")[2] for line in output.splitlines() if "HOST " in line)
    assert list(wires) == ["worker-0 ['PlainStream']", "worker-1 ['TlsStream']"], output
    engine.check_nothing_left()


def test_ranks_on_two_hosts_without_a_token_file_say_how_to_make_one(
    engine: Engine, two_hosts: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    engine.script(WIRES)
    code, output = by_mpirun(engine, two_hosts, {})
    assert code != 0 and "hands them no secret; make one with (umask 077; openssl rand -hex 32 > token)" in output
    assert "mpirun -x SYNCLINE_TOKEN_FILE" in output and not (tmp_path / "runs").exists(), output
    engine.check_nothing_left()
