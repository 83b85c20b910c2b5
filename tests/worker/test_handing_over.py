"""Slices go from server to server and back, again and again, under `async` pushes and pulls of several workers.

Every push takes 1 from every element: what is pulled is the same all over a slice, or it is torn; it never grows, or
an older one has landed over a newer one; and in the end it is minus the number of acknowledged pushes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.worker.wires import go_between_processes, serve_in_threads

from syncline import Rule
from syncline.core.wire.control import Retire
from syncline.testing import LocalJob, local_job
from syncline.worker.job import Job

SLICE, NUM_SLICES, WORKERS = 1 << 12, 12, 3
ITEMS = SLICE // 4
SGD = Rule("SGD", lr=1.0)


@pytest.fixture(params=["shm", "sockets", pytest.param("in process", marks=pytest.mark.proof)])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Connections as between processes, and servers with threads of their own; nothing in them may break."""
    broken: list[Exception] = []
    if request.param == "in process":
        serve_in_threads(monkeypatch.setattr, broken.append)
    else:
        go_between_processes(monkeypatch.setattr, broken.append, shares=request.param == "shm")
    yield request.param
    assert not broken, broken


def work(job: Job, over: threading.Event, window: int) -> int:
    """Pushes and pulls until it is over; the number of pushes that were acknowledged."""
    grads, out = {"x": np.ones(NUM_SLICES * ITEMS, np.float32)}, {"x": np.zeros(NUM_SLICES * ITEMS, np.float32)}
    last, pushes, tickets = np.zeros(NUM_SLICES), 0, list[Any]()
    while not over.is_set():
        tickets.append(job.kv.push_pull(grads, out=out))
        pushes += 1
        if len(tickets) > window:
            tickets.pop(0).wait()
            last = check(out["x"], last)
        if pushes % 5 == 0 and not window:
            last = check(job.kv.pull(out=out)["x"], last)
    for ticket in tickets:
        ticket.wait()
    return pushes


def check(values: Any, last: Any) -> Any:
    parts = values.reshape(NUM_SLICES, ITEMS)
    assert (parts == parts[:, :1]).all(), f"torn: {[np.unique(part) for part in parts]}"
    assert (parts[:, 0] <= last).all(), f"went back: {last} to {parts[:, 0]}"
    return parts[:, 0].copy()


def hand_over(jobs: LocalJob, name: str) -> None:
    """As by SIGTERM: this server's slices go to others, it ends; then it comes back and gets some of them."""
    jobs.process.links[name].call(Retire(), PATIENCE)
    jobs.kill(name)
    jobs.add_server(name)


def run(seconds: float, window: int, replicas: int) -> int:
    num_moves, over = 0, threading.Event()
    settings = {"replicas": replicas, "window": window, "slice_bytes": SLICE, "wait_seconds": PATIENCE}
    beside = ThreadPoolExecutor(1, thread_name_prefix="Thread-workers")
    with local_job(workers=WORKERS, servers=3, policy="async", **settings) as jobs, beside:
        begin = {"x": np.zeros(NUM_SLICES * ITEMS, np.float32)}
        # Before anybody goes: torch takes its time with the first rule of a process.
        jobs.run(lambda job: job.kv.register(begin, SGD, reduce="sum"), PATIENCE)
        pushed = beside.submit(jobs.run, lambda job: work(job, over, window), 2 * PATIENCE)
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until and not pushed.done():
                time.sleep(0.05)
                hand_over(jobs, f"server-{num_moves % 3}")
                num_moves += 1
        finally:
            over.set()
            numbers = pushed.result()  # nobody may use a job while it is closed; and what a worker raised comes first
        values = jobs[0].kv.pull()["x"]
        assert (values == -float(sum(numbers))).all(), (np.unique(values), numbers)
    return num_moves


@pytest.mark.slow
@pytest.mark.parametrize(("window", "replicas"), [pytest.param(0, 2, marks=pytest.mark.proof), (2, 1)])
def test_servers_hand_over_under_pushes_and_pulls(wire: str, window: int, replicas: int) -> None:
    assert run(1.0, window, replicas)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_servers_hand_over_for_long(wire: str) -> None:
    for window in (0, 2):
        for replicas in (1, 2):
            assert run(60.0, window, replicas) > 20
