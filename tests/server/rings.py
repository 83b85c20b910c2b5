"""Rings inside one process, for tests: what they push, what their copies must be, and how one of them dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from syncline import Rule

#: How sums go in a ring of one host: by host leaders; straight to primaries, as they are, encoded, or over sockets.
WAYS: dict[str, dict[str, Any]] = {
    "by host leaders": {"num_cores": 64},
    "straight": {"num_cores": 1},
    "by host leaders for two": {"num_cores": 5},  # three have no cores to spare
    "encoded": {"codec": "bf16"},
    "sockets": {"transport": "tcp"},
}


def check_way(jobs: Any, way: str, num_workers: int) -> None:
    """Sums go this way in a ring that has come to so many."""
    has_reducers = way == "by host leaders" or (way == "by host leaders for two" and num_workers == 2)
    host_reducers = [server.ring.host_reducers.current for server in jobs.servers.values()]
    assert [reducer is not None for reducer in host_reducers] == [has_reducers] * num_workers


def copies(jobs: Any) -> dict[str, dict[int, Any]]:
    """Every server's slots, its own and those of others, by number."""
    found = {}
    for name, server in jobs.servers.items():
        others = {n: backup.slot for n, backup in server.hosting.backups.backups.items()}
        found[name] = {**others, **server.slices}
    return found


def check_all_equal(jobs: Any) -> None:
    """All have all slices, bit by bit the same, at the same version and with the same clocks."""
    (_, first), *others = copies(jobs).items()
    for name, slots in others:
        assert slots.keys() == first.keys(), name
        for number, slot in slots.items():
            assert np.array_equal(slot.memory, first[number].memory), f"slice {number} on {name}"
            assert slot.state.version == first[number].state.version
            assert slot.state.clocks == first[number].state.clocks


def push_cells(job: Any, count: int, acknowledged: dict[str, int], width: int = 64) -> None:
    """A one-hot ledger, twice: what counts of a step counts in both, on whatever slices and servers they are."""
    rank, zeros = int(job.name.rpartition("-")[2]), np.zeros((4, width), np.float32)
    job.kv.register({"here": zeros, "there": zeros}, Rule("Add"), reduce="sum")
    for number in range(count):
        cell = zeros.copy()
        cell[rank, number] = 1.0
        job.kv.push({"here": cell, "there": cell}).wait()
        acknowledged[job.name] = number + 1


def check_ledger(job: Any, acknowledged: dict[str, int]) -> list[int]:
    """The first steps of every worker, and no others, whole; all that were acknowledged. How many there are."""
    found = job.kv.pull(["here", "there"])
    here, there = np.asarray(found["here"]), np.asarray(found["there"])
    assert np.array_equal(here, there), "a step counts on all slices or on none"
    counts = [int(row.sum()) for row in here]
    for rank, (row, count) in enumerate(zip(here, counts, strict=True)):
        assert (row == (np.arange(row.size) < count)).all(), f"worker-{rank}"
        assert count >= acknowledged.get(f"worker-{rank}", 0), f"an acknowledged step of worker-{rank} is lost"
    return counts


def start(jobs: Any, work: Callable[[Any], None], gone: set[str]) -> list[threading.Thread]:
    """Every worker in a thread of its own; whoever is killed may fail as it likes."""
    errors: list[Exception] = []

    def run(job: Any) -> None:
        try:
            work(job)
        except Exception as error:
            if job.name not in gone:
                errors.append(error)
                raise

    threads = [threading.Thread(target=run, args=(job,), name=job.name, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    return threads


def kill(jobs: Any, number: int, gone: set[str]) -> None:
    """A process of a ring, with its worker and its server."""
    gone.add(f"worker-{number}")
    jobs.kill(f"worker-{number}")
