"""Every test gives back what it took: processes, threads, file descriptors."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.forked import SERVER
from tests.patience import PATIENCE

from syncline.launch.compiler import leave_out_the_compiler
from syncline.net import handshake

# Nothing asserts on seconds: a busy machine is no failure. `make proof` looks at more examples of what is random.
settings.register_profile("syncline", deadline=None, max_examples=40)
settings.register_profile("proof", deadline=None, max_examples=200)
settings.load_profile("syncline")

#: A thread of a test may be slow to shake hands; tests of that deadline set their own.
handshake.SECONDS = PATIENCE

gc.disable()  # until all tests are collected: much is made, and next to nothing is thrown away

GRACE_SECONDS = 60.0
#: Libraries keep some threads for the life of the process.
KEPT_THREADS = ("pytest", "MainThread", "asyncio", "Thread-", "QueueFeeder", "pin_memory", "rich")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-seeds", action="store_true", help="train with three seeds: figures for the docs")


def pytest_collection_finish() -> None:
    """What the tests have loaded by now stays: it is not looked through again and again. Nor is torch's compiler
    loaded, as in any script that joins a job."""
    leave_out_the_compiler()
    gc.enable()
    gc.collect()
    gc.freeze()


def _processes() -> set[int]:
    return {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} if os.path.isdir("/proc") else set()


def _children(others: set[int]) -> set[int]:
    """Living processes that this one has started, without those of these numbers."""
    found: set[int] = set()
    for number in _processes() - others:
        try:
            with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and not SERVER.is_its_own(number):
            found.add(number)
    return found


def _ours() -> list[str]:
    return [t.name for t in threading.enumerate() if not t.name.startswith(KEPT_THREADS)]


def _descriptors() -> dict[str, str]:
    if not os.path.isdir("/proc/self/fd"):
        return {}
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(("socket:", "pipe:", "/memfd:syncline")) and not SERVER.is_its_way(number):
            found[number] = target
    return found


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a thread of ours, a socket, a pipe or shared memory behind."""
    threads, processes, descriptors = set(_ours()), _processes(), set(_descriptors().items())
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    collect_at = deadline - GRACE_SECONDS + 0.3
    while True:
        left = {
            "threads": sorted(set(_ours()) - threads),
            "processes": sorted(_children(processes)),
            "descriptors": sorted(set(_descriptors().items()) - descriptors),
        }
        if not any(left.values()):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: { {key: value for key, value in left.items() if value} }")
        time.sleep(0.01)
        if time.monotonic() > collect_at:
            gc.collect()  # what only a cycle holds is not a leak
            collect_at = time.monotonic() + 0.3
