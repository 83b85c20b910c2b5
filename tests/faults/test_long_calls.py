"""A worker inside one long call: it is not silent as long as another of its threads can run."""

from __future__ import annotations

import pathlib
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.proof]
LEDGER = pathlib.Path(__file__).parents[2] / "examples" / "chaos_ledger.py"

#: The ledger, and once, between two steps of the first life of worker-1, the call.
HOGS = """
    import ctypes, os, runpy, sys, threading, time
    import syncline
    what, ledger = sys.argv[1], sys.argv[2]
    sys.argv[1:] = sys.argv[3:]
    if what == "matmul":
        import torch  # before the job: loading its libraries keeps the interpreter's lock
    true_sleep, steps = time.sleep, 0

    def matmul():
        torch.set_num_threads(1)
        def once(size):
            one = torch.ones(size, size)
            began = time.monotonic()
            torch.mm(one, one)
            return time.monotonic() - began
        once(500)
        size = int(1000 * (5.0 / once(1000)) ** (1 / 3))
        return once(min(size, 12_000))

    def holds_the_lock():
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(5_000_000)  # PyDLL: the interpreter's lock is kept all the while
        return time.monotonic() - began

    def sleep(seconds):
        global steps
        if threading.current_thread() is threading.main_thread() and seconds == 0.02:
            steps += 1
            if steps == 20 and syncline.current_job().name == "worker-1" and not os.path.exists("called"):
                open("called", "w").close()
                took = {"matmul": matmul, "lock": holds_the_lock}[what]()
                print(f"CALLED {what} {took:.1f} s", flush=True)
        true_sleep(seconds)

    time.sleep = sleep
    runpy.run_path(ledger, run_name="__main__")
"""


def start(hurt: Callable[..., Any], what: str, *flags: str) -> Any:
    script = pathlib.Path("hogs.py")
    job = hurt("-w", "2", "-s", "2", "--replicas", "2", *flags, ledger=script, before=[what, str(LEDGER)])
    job.until(r"CALLED \w+ [\d.]+ s")
    return job


@pytest.fixture(autouse=True)
def hogs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "hogs.py").write_text(textwrap.dedent(HOGS))


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_heartbeats_do_not_starve_behind_a_long_torch_call(hurt: Callable[..., Any], policy: str) -> None:
    """torch lets go of the interpreter's lock: five seconds in one matmul are no silence, whatever the deadline."""
    job = start(hurt, "matmul", "--policy", policy, "--deadline-seconds", "1")
    output = job.ends_well()
    took = re.search(r"CALLED matmul ([\d.]+) s", output)
    assert took is not None and float(took[1]) > 1.5, output
    assert job.evicted() == [], output


def test_who_keeps_the_interpreters_lock_for_longer_than_its_deadline_is_out_and_comes_back(
    hurt: Callable[..., Any],
) -> None:
    """No thread of such a process can beat, and nobody can tell it from one that is stopped. It hears of it after the
    call, ends, and starts again; nothing is lost."""
    job = start(hurt, "lock", "--policy", "sync")
    job.until_back("worker-1")
    output = job.ends_well()
    assert job.evicted() == ["worker-1"], output
    # The launcher gives an evicted process a few seconds to end by itself.
    assert re.search(r"syncline: worker-1 was evicted(, and ended by the launcher)?; starts again", output), output


def test_a_longer_deadline_lets_it_be(hurt: Callable[..., Any]) -> None:
    job = start(hurt, "lock", "--policy", "sync", "--deadline-seconds", "9")
    output = job.ends_well()
    assert job.evicted() == [], output
