"""Rows about serving beside something else: a flood of connections, and a job that is followed."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import pathlib
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.match import play, take_pairs
from benchmarks.memory import check_memory_is_told, pss_bytes
from benchmarks.row import Effort, Reach, Row, Samples
from benchmarks.serving import PEERS, ServerProcess, check_wrk, ours, up, wrk
from benchmarks.sides import JobSide
from benchmarks.task import Task
from benchmarks.words import MIB
from syncline.errors import ConnectionLost, WaitTimeout

#: Of a flood: connections, over so many seconds; clients; and what the server may grow by.
NUM_FLOODING, FLOOD_SECONDS, NUM_CLIENTS, MOST_GROWTH = 10_000, 10, 10, 256 * MIB
#: A turn of a followed job has several cuts.
TRAINING_SECONDS, ROW_SECONDS = 6.0, 600.0
#: Of a followed job whose answers are watched: updates, and the pause between two of them.
NUM_UPDATES, UPDATE_SECONDS, REFRESH_SECONDS = 200, 0.15, 2.0
#: Of a followed job whose commits are watched: parameters, how long it runs, and how long commits may wait for a cut.
NUM_PARAMETERS, HELD_SECONDS, MOST_HELD_SECONDS = 4 << 20, 60.0, 0.02


def flood(name: str, *, reach: Reach) -> Row:
    """The p99 of clients while connections without a token, slow heads, bodies of 1 GB and random bytes come to their
    port, or to a closed one.
    """

    def measure(effort: Effort) -> Samples:
        check_wrk()
        check_memory_is_told()
        token = secrets.token_hex(16)

        def start(folder: pathlib.Path) -> ServerProcess:
            path = folder / "token"
            path.touch(0o600)
            path.write_text(token)
            return ours(folder, "LeNet", "ours", "--token-file", str(path))

        with up(start) as (folder, (server,)), socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # and does not listen
            ports = {"ours": server.port, "reference": closed.getsockname()[1]}

            def take(side: str) -> float:
                words = [str(ports[side]), str(NUM_FLOODING), str(FLOOD_SECONDS)]
                flooding = subprocess.Popen([sys.executable, str(PEERS / "flood.py"), *words])
                try:
                    load = wrk(folder, server.url, connections=NUM_CLIENTS, seconds=FLOOD_SECONDS, token=token)
                finally:
                    flooding.kill()
                    flooding.wait()
                return load.p99_seconds

            wrk(folder, server.url, connections=NUM_CLIENTS, seconds=1, token=token)
            before = pss_bytes(server.pid)
            longer = dataclasses.replace(effort, row_seconds=max(effort.row_seconds, ROW_SECONDS))
            samples = take_pairs(take, longer, time.monotonic())
            if (grown := pss_bytes(server.pid) - before) > MOST_GROWTH:
                raise ConnectionLost(f"the server has grown by {grown / MIB:.0f} MiB")
            return samples

    return Row(
        name=name,
        what=f"p99 of {NUM_CLIENTS} clients of LeNet while {NUM_FLOODING:,} unwanted connections come",
        reference="the same while they come to a closed port",
        reach=reach,
        measure=measure,
    )


class FollowedSide(JobSide):
    """A job that a server follows from the first turn that counts."""

    folder = pathlib.Path()
    server: ServerProcess | None = None

    def start(self, folder: pathlib.Path, path: str) -> None:
        self.folder = folder
        super().start(folder, path)

    def follow(self, model: str) -> None:
        words = ("--follow", str(self.folder / "ours" / "job.json"), "--refresh", f"{REFRESH_SECONDS:g}s")
        self.server = ours(self.folder, model, "follower", *words)

    def stop(self) -> None:
        super().stop()
        if self.server is not None:
            self.server.close()


def followed(name: str, model: str, served: str, what: str, *, reach: Reach) -> Row:
    """The time of a step of a job that a server follows, beside a job that is not followed."""

    def measure(effort: Effort) -> Samples:
        longer = dataclasses.replace(
            effort,
            turn_seconds=max(effort.turn_seconds, TRAINING_SECONDS),
            row_seconds=max(effort.row_seconds, ROW_SECONDS),
        )
        task = Task(kind="train_told", model=model, num_threads=1)
        settings: dict[str, Any] = {"workers": 2, "transport": "shm", "page": "off", "sink": ["off"]}
        own = FollowedSide(task, **settings)

        def watch(side: str, num_operations: int) -> None:
            if not side:
                own.follow(served)

        return play(own, JobSide(task, side="reference", **settings), longer, watch=watch)

    return Row(
        name=name,
        what=f"a step of {what}, 2 workers, followed every {REFRESH_SECONDS:g} s",
        reference="the same without a server that follows",
        reach=reach,
        measure=measure,
    )


_SCRIPT = f"""
import sys, time
import numpy as np, syncline
job = syncline.init()
one = {{"value": np.full(1, -1.0, np.float32)}}
job.kv.register({{"value": np.zeros(1, np.float32)}}, syncline.Rule("SGD", lr=1.0))
with open(sys.argv[1], "w") as file:
    for number in range(1, {NUM_UPDATES + 1}):
        time.sleep({UPDATE_SECONDS})
        job.kv.push_pull(one).wait()
        print(number, time.monotonic(), file=file, flush=True)
"""
_BUSY_SCRIPT = f"""
import sys, time
import numpy as np, syncline
job = syncline.init()
ones = {{"value": np.full({NUM_PARAMETERS}, -1.0, np.float32)}}
job.kv.register({{"value": np.zeros({NUM_PARAMETERS}, np.float32)}}, syncline.Rule("SGD", lr=1.0))
open("began", "w").close()
until = time.monotonic() + {HELD_SECONDS}
while time.monotonic() < until:
    job.kv.push_pull(ones).wait()
stats = job.stats()
with open(sys.argv[1], "w") as file:
    print(stats.num_cuts, stats.cut_seconds_max, job.step, file=file)
"""
_MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(%d))

    def forward(self, x):
        return x + self.value[:1]

example = torch.zeros(1, 1)
"""


def follow_latency(name: str, *, reach: Reach) -> Row:
    """The longest time from an applied update to an answer that uses it."""

    def measure(effort: Effort) -> Samples:
        with _job(_SCRIPT, 1, 1, "applied") as (folder, job):
            return Samples([max(_latencies(folder, job))], [REFRESH_SECONDS + 1.0])

    return Row(
        name=name,
        what=f"from an applied update to an answer that uses it, the longest of {NUM_UPDATES}, --refresh "
        f"{REFRESH_SECONDS:g}s",
        reference="--refresh and a second",
        reach=reach,
        measure=measure,
    )


def follow_hold(name: str, *, reach: Reach) -> Row:
    """The longest time that commits were held for a cut of a follower."""

    def measure(effort: Effort) -> Samples:
        with _job(_BUSY_SCRIPT, NUM_PARAMETERS, 2, "told") as (folder, job):
            server = _follower(folder, job, "began")
            try:
                job.wait(HELD_SECONDS + 60)
            finally:
                server.close()
            log = (folder / "job.log").read_text()
            if not (folder / "told").exists():
                raise ConnectionLost(f"the job has not ended well: {log[-1000:]}")
            num_cuts, longest, _ = map(float, (folder / "told").read_text().split())
            if num_cuts < 0.25 * HELD_SECONDS / REFRESH_SECONDS:
                raise WaitTimeout(f"the job gave {num_cuts:g} cuts only: {server.said()[-1000:]}")
            return Samples([longest], [MOST_HELD_SECONDS])

    return Row(
        name=name,
        what=f"the longest that commits were held for a cut, {NUM_PARAMETERS * 4 / MIB:g} MiB pushed by 2 workers "
        f"for {HELD_SECONDS:g} s, --refresh {REFRESH_SECONDS:g}s",
        reference=f"{1000 * MOST_HELD_SECONDS:g} ms",
        reach=reach,
        measure=measure,
    )


@contextlib.contextmanager
def _job(
    script: str, num_parameters: int, num_workers: int, told: str
) -> Iterator[tuple[pathlib.Path, subprocess.Popen[bytes]]]:
    """A job that runs inside, and its folder, where `model.py` is too."""
    with tempfile.TemporaryDirectory(prefix="syncline-") as text:
        folder = pathlib.Path(text)
        (folder / "train.py").write_text(script)
        (folder / "model.py").write_text(_MODEL % num_parameters)
        command = [sys.executable, "-m", "syncline", "run", "--name", "j", "-w", str(num_workers), "-s", "2"]
        with (folder / "job.log").open("w") as output:
            job = subprocess.Popen(
                [*command, "--page", "off", "train.py", told],
                cwd=folder,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
            try:
                yield folder, job
            finally:
                job.terminate()
                job.wait()


def _follower(folder: pathlib.Path, job: subprocess.Popen[bytes], begun: str) -> ServerProcess:
    """A server that follows the job, from the time on when the file `begun` is there."""
    until = time.monotonic() + 60
    while not (folder / begun).exists():
        if job.poll() is not None or time.monotonic() > until:
            raise ConnectionLost(f"the job did not begin: {(folder / 'job.log').read_text()[-1000:]}")
        time.sleep(0.05)
    command = [sys.executable, "-m", "syncline", "serve", "model.py:Net", "--follow", "j", "--port", "0"]
    return ServerProcess(folder, "server", [*command, "--refresh", f"{REFRESH_SECONDS:g}s"])


def _latencies(folder: pathlib.Path, job: subprocess.Popen[bytes]) -> list[float]:
    server = _follower(folder, job, "applied")
    began = time.monotonic()  # updates of before had no server
    answered: dict[int, float] = {}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        value, until = 0, began + 120
        while value < NUM_UPDATES:
            if time.monotonic() > until:
                raise WaitTimeout(f"the answer was {value} after two minutes: {server.said()[-1000:]}")
            connection.request("POST", "/predict", json.dumps({"input": [0.0]}))
            now = round(json.loads(connection.getresponse().read())["output"][0])
            answered.update(dict.fromkeys(range(value + 1, now + 1), time.monotonic()))
            value = now
            time.sleep(0.01)
    finally:
        connection.close()
        server.close()
    applied = {int(one): float(at) for one, at in map(str.split, (folder / "applied").read_text().splitlines())}
    return [answered[number] - max(at, began) for number, at in applied.items()]
