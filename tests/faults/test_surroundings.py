"""What is around a job goes wrong: a full disk, a clock that jumps."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.proof]


def test_a_journal_that_cannot_be_written_stops_changes_only(
    hurt: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    """A small tmpfs fills up: pushes go on; when there is space again, so do changes."""
    runs = tmp_path / "runs"
    runs.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(runs)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a tmpfs needs root")
    job = None
    try:
        job = hurt("-w", "3", "-s", "1", "--policy", "async")
        job.until_at_work("worker-2")
        filler = runs / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            for _ in range(1000):
                file.write(b"\0" * 4096)
        job.hit("worker-1")
        job.until("cannot be kept|the reconfiguration waits|make space")
        filler.unlink()
        job.until_back("worker-1")
        job.ends_well()
    finally:
        if job is not None:
            job.close()
        subprocess.run(["umount", "-l", str(runs)], check=False)


JUMPING = """
import random, time
_true = time.time
time.time = lambda: _true() + random.choice((-3600.0, 0.0, 3600.0))
"""


def test_a_wall_clock_that_jumps_an_hour_back_and_forth_kills_nobody(
    hurt: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    """Every look at it is off by an hour or not: who measured a deadline by it would evict at once, or never."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(JUMPING)
    flags = ("-w", "3", "-s", "2", "--replicas", "2", "--policy", "sync")
    job = hurt(*flags, PYTHONPATH=str(tmp_path / "clock"))
    job.until_at_work("worker-2")
    job.hit("worker-1")
    job.until_back("worker-1")
    output = job.ends_well()
    assert job.evicted() == ["worker-1"], output
