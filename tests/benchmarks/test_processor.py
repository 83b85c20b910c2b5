"""The processor time of a side: of all its processes, per operation."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks import processor
from benchmarks.processor import ProcessorMeter, seconds_of

pytestmark = pytest.mark.skipif(not processor.is_measured(), reason="only Linux tells it")

#: Says what it has used, in nanoseconds, and its id, and waits.
SAYS = "import os, sys, time; print(time.process_time_ns(), os.getpid(), flush=True); sys.stdin.read()"
#: Starts another that does so, and passes on its words.
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAYS!r}])"


def test_what_a_process_has_started_counts() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            used, started = map(int, process.stdout.readline().split())
            own = time.clock_gettime((~process.pid << 3) | 2)
            assert seconds_of([process.pid]) >= own + used / 1e9
            assert seconds_of([process.pid, started]) < seconds_of([process.pid]) + used / 1e9, "it counts once"
        finally:
            process.communicate()
    assert seconds_of([process.pid]) == 0.0, "it has ended"


def test_a_meter_tells_what_was_used_since_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([5.0, 6.0, 9.0])
    monkeypatch.setattr(processor, "seconds_of", lambda pids: next(told))
    meter = ProcessorMeter(lambda: [os.getpid()])
    meter.read(1)
    assert (meter.read(4), meter.read(2)) == (0.25, 1.5)
