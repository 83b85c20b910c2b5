"""Rows about serving: `syncline serve` beside other servers of the same module. wrk is the client of all of them.

All servers are up all the time and take turns. Each gets the same body, `{"input": ...}`, a picture of 28 by 28, and
computes with one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.adapters import python_of
from benchmarks.match import take_pairs
from benchmarks.memory import check_memory_is_told, pss_bytes, return_what_is_freed
from benchmarks.processor import check_is_measured, seconds_of
from benchmarks.row import LEAST_PAIRS, Effort, NotMeasured, Reach, Row, Samples
from benchmarks.sides import ROOT
from benchmarks.words import MIB
from syncline.errors import ConnectionLost, WaitTimeout

PEERS = ROOT / "benchmarks" / "serve_peers"
CONNECTIONS, REPLICAS = 64, 2
_CALLED = {"litserve": "LitServe", "ray": "Ray Serve"}
TURN_SECONDS, ROW_SECONDS, START_SECONDS = 2.0, 240.0, 120.0
#: Of a side, for one figure of the latency of one connection.
NUM_TURNS = 6
_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer %s"
wrk.body = %s
done = function(summary, latency)
  for i = 1, #latency do
    local value, count = latency(i)
    io.write(string.format("at %%d us: %%d\\n", value, count))
  end
end
"""
#: A model's kernels. With more, threads wait for each other where cores are busy, and chance decides.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_LARGE_BYTES = 512 * MIB


class Load(NamedTuple):
    """What wrk says of one run."""

    num_requests: int
    num_per_second: float
    p50_seconds: float
    p99_seconds: float
    processor_seconds: float = 0.0  # of the server's processes, for one request
    latencies: Mapping[int, int] = {}  # microseconds -> requests


class ServerProcess:
    """A server in a process of its own, up when this is made."""

    def __init__(self, folder: pathlib.Path, name: str, command: Sequence[str], *, port: int = 0) -> None:
        """`port`: where it listens; 0: it says so itself."""
        self._log = (folder / f"{name}.log").open("w+b")
        self._name, self._folder = name, folder
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=folder,
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
        self.port = port
        try:
            self._wait_until_up()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/predict"

    @property
    def pid(self) -> int:
        return self._process.pid

    def pids(self) -> list[int]:
        """It and all processes that it has started."""
        children: dict[int, list[int]] = {}
        for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(path.parent.name))
        found = [self.pid]
        for pid in found:
            found += children.get(pid, [])
        return found

    def said(self) -> str:
        return (self._folder / f"{self._name}.log").read_text("utf-8", "replace")

    def _wait_until_up(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None:
                raise ConnectionLost(f"{self._name} ended with {self._process.returncode}: {self.said()[-2000:]}")
            if time.monotonic() > until:
                raise WaitTimeout(f"{self._name} was not up after {START_SECONDS:g} s: {self.said()[-2000:]}")
            time.sleep(0.1)

    def _is_up(self) -> bool:
        if not self.port:
            found = re.search(r"version \S+ at https?://[^:]+:(\d+)", self.said())
            self.port = int(found[1]) if found else 0
            return bool(found)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("POST", "/predict", body())
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def close(self) -> None:
        """With all the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def body() -> str:
    """A picture as JSON, with as many digits as a picture has."""
    rows = [[[(7 * x + 3 * y) % 256 / 256 for x in range(28)] for y in range(28)]]
    return json.dumps({"input": rows})


def ours(folder: pathlib.Path, model: str, name: str = "ours", *words: str) -> ServerProcess:
    """`syncline serve` as it is by default."""
    command = [sys.executable, "-m", "syncline", "serve", f"{PEERS / 'model.py'}:{model}", "--port", "0"]
    return ServerProcess(folder, name, [*command, "--name", name, "--runs", str(folder / "runs"), *words])


def peer(folder: pathlib.Path, name: str, model: str) -> ServerProcess:
    """One of the applications in `serve_peers`; NotMeasured where its environment was not made."""
    python = sys.executable
    if name != "bare":
        python = str(python_of("serve-peers"))
        if not pathlib.Path(python).exists():
            raise NotMeasured("needs its environment: sh tools/setup_serve_peers.sh")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    return ServerProcess(folder, name, [python, str(PEERS / f"{name}_app.py"), model, str(port)], port=port)


def wrk(folder: pathlib.Path, url: str, *, connections: int, seconds: float, token: str = "") -> Load:
    """Asks for so long. ConnectionLost: an answer was not 200, or none came."""
    script = folder / "post.lua"
    script.touch(0o600)
    script.write_text(_SCRIPT % (token, json.dumps(body())))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency", "--timeout", "30s"]
    done = subprocess.run([*command, "-s", str(script), url], capture_output=True, text=True, check=False)
    return read_load(done.stdout + done.stderr)


def read_load(said: str) -> Load:
    """What wrk has printed."""
    rate, number = re.search(r"Requests/sec:\s+([\d.]+)", said), re.search(r"(\d+) requests in", said)
    quantiles = {found[1]: _seconds(found[2], found[3]) for found in re.finditer(r"(\d+)%\s+([\d.]+)(us|ms|s)", said)}
    if (
        rate is None
        or number is None
        or not {"50", "99"} <= quantiles.keys()
        or "Non-2xx" in said
        or "Socket errors" in said
    ):
        raise ConnectionLost(f"wrk: {said.strip()[-500:]}")
    latencies = {int(found[1]): int(found[2]) for found in re.finditer(r"^at (\d+) us: (\d+)$", said, re.MULTILINE)}
    return Load(int(number[1]), float(rate[1]), quantiles["50"], quantiles["99"], latencies=latencies)


def quantile(latencies: Mapping[int, int], part: float) -> float:
    """The seconds within which this part of the requests was answered."""
    wanted, seen = part * sum(latencies.values()), 0
    for value in sorted(latencies):
        seen += latencies[value]
        if seen >= wanted:
            break
    return value / 1e6


def _seconds(number: str, unit: str) -> float:
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def check_wrk() -> None:
    if shutil.which("wrk") is None:
        raise NotMeasured("needs wrk: apt install wrk")


@contextlib.contextmanager
def up(*starts: Callable[[pathlib.Path], ServerProcess]) -> Iterator[tuple[pathlib.Path, list[ServerProcess]]]:
    """Servers that are up inside."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))
        servers = []
        for start in starts:
            servers.append(start(folder))
            stack.callback(servers[-1].close)
        yield folder, servers


def _pairs(
    effort: Effort,
    first: Callable[[pathlib.Path], ServerProcess],
    second: Callable[[pathlib.Path], ServerProcess],
    connections: int,
    of: Callable[[Load], float],
) -> Samples:
    check_wrk()
    longer = dataclasses.replace(
        effort,
        turn_seconds=max(effort.turn_seconds, TURN_SECONDS),
        row_seconds=max(effort.row_seconds, ROW_SECONDS),
    )
    with up(first, second) as (folder, servers):
        sides = dict(zip(("ours", "reference"), servers, strict=True))

        def take(side: str) -> float:
            pids = sides[side].pids()
            before = seconds_of(pids)
            load = wrk(folder, sides[side].url, connections=connections, seconds=longer.turn_seconds)
            spent = (seconds_of(pids) - before) / max(1, load.num_requests)
            return of(load._replace(processor_seconds=spent))

        take("ours"), take("reference")  # the first calls of a module are slow
        return take_pairs(take, longer, time.monotonic())


def throughput(name: str, model: str, beside: str, *, reach: Reach) -> Row:
    """Requests at 64 connections, dynamic batching on, beside another server with its own."""

    def measure(effort: Effort) -> Samples:
        return _pairs(
            effort,
            lambda folder: ours(folder, model, "ours", "--replicas", str(REPLICAS)),
            lambda folder: peer(folder, beside, model),
            CONNECTIONS,
            lambda load: 1 / load.num_per_second,
        )

    return Row(
        name=name,
        what=f"{model} served: time of a request at {CONNECTIONS} connections, 2 replicas",
        reference=f"{_CALLED[beside]}, which has two busy processes too",
        reach=reach,
        measure=measure,
    )


def processor(name: str, model: str, beside: str, *, reach: Reach) -> Row:
    """The processor time of a request, of all processes of a server as it is by default: what other programs use of
    the machine changes throughput, and this little.
    """

    def measure(effort: Effort) -> Samples:
        check_is_measured()
        return _pairs(
            effort,
            lambda folder: ours(folder, model),
            lambda folder: peer(folder, beside, model),
            CONNECTIONS,
            lambda load: load.processor_seconds,
        )

    return Row(
        name=name,
        what=f"{model} served: processor time of a request at {CONNECTIONS} connections, all processes",
        reference=_CALLED[beside],
        reach=reach,
        measure=measure,
        unit="processor",
    )


def batching(name: str, model: str, *, reach: Reach) -> Row:
    """Requests at 64 connections with dynamic batching, beside the same server without."""

    def measure(effort: Effort) -> Samples:
        return _pairs(
            effort,
            lambda folder: ours(folder, model),
            lambda folder: ours(folder, model, "single", "--max-batch", "1"),
            CONNECTIONS,
            lambda load: 1 / load.num_per_second,
        )

    return Row(
        name=name,
        what=f"{model} served: time of a request at {CONNECTIONS} connections, batches of up to 32",
        reference="the same with --max-batch 1",
        reach=reach,
        measure=measure,
    )


def one_connection(name: str, model: str, part: float, *, reach: Reach) -> Row:
    """The latency of one connection, beside a bare application under uvicorn that calls the module.

    A figure is that of all requests of `NUM_TURNS` short turns: 99 % of one turn would be a matter of few moments in
    which another program had the processor.
    """

    def measure(effort: Effort) -> Samples:
        check_wrk()
        with up(lambda folder: ours(folder, model), lambda folder: peer(folder, "bare", model)) as (folder, servers):
            sides = dict(zip(("ours", "reference"), servers, strict=True))
            figures: dict[str, list[float]] = {side: [] for side in sides}
            pools: dict[str, Counter[int]] = {side: Counter() for side in sides}

            def take(side: str) -> float:
                load = wrk(folder, sides[side].url, connections=1, seconds=TURN_SECONDS / 2)
                pools[side].update(load.latencies)
                return load.p50_seconds

            take("ours"), take("reference")  # the first calls of a module are slow
            began = time.monotonic()
            for number in range(effort.num_pairs):
                if number >= LEAST_PAIRS and time.monotonic() - began > max(effort.row_seconds, ROW_SECONDS):
                    break
                for pool in pools.values():
                    pool.clear()
                take_pairs(take, dataclasses.replace(effort, num_pairs=NUM_TURNS), time.monotonic())
                for side, pool in pools.items():
                    figures[side].append(quantile(pool, part))
            return Samples(figures["ours"], figures["reference"])

    return Row(
        name=name,
        what=f"{model} served: {100 * part:g} % of the requests of one connection, one replica, JSON",
        reference="a bare application under uvicorn that calls the module",
        reach=reach,
        measure=measure,
    )


_BARE_TORCH = "import torch; torch.zeros(1); print('up', flush=True); input()"


def replica_memory(name: str, *, reach: Reach) -> Row:
    """What the third replica of a model of 512 MiB adds, beside 5 % of the model and a bare torch process."""

    def measure(effort: Effort) -> Samples:
        check_memory_is_told()
        check_wrk()
        return_what_is_freed()
        with up(
            lambda folder: ours(folder, "Large", "two", "--replicas", "2"),
            lambda folder: ours(folder, "Large", "three", "--replicas", "3"),
        ) as (folder, (two, three)):
            for server in (two, three):  # each replica has answered
                wrk(folder, server.url, connections=8, seconds=2)
            bare = subprocess.Popen(
                [sys.executable, "-c", _BARE_TORCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                assert bare.stdout is not None and bare.stdout.readline() == b"up\n"
                added, allowed = [], []
                for _ in range(LEAST_PAIRS):
                    added.append(sum(map(pss_bytes, three.pids())) - sum(map(pss_bytes, two.pids())))
                    allowed.append(0.05 * _LARGE_BYTES + pss_bytes(bare.pid))
            finally:
                bare.communicate(b"\n")
            return Samples(added, allowed)

    return Row(
        name=name,
        what="memory of three replicas of a model of 512 MiB, less that of two (PSS of all processes)",
        reference="5 % of the model and a process that has imported torch",
        reach=reach,
        measure=measure,
        unit="bytes",
    )
