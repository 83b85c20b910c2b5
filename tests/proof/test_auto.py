"""`make proof`: `-w auto:1:4` on two cores, with a model that keeps a core busy, settles at two, and says why."""

from __future__ import annotations

import os
import pathlib
import re
import sys

import pytest
from tests import forked

SCRIPT = pathlib.Path(__file__).parent / "busy.py"


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_as_many_workers_as_pay(tmp_path: pathlib.Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("there is one core")
    command = [sys.executable, "-m", "syncline", "run", "-w", "auto:1:4", "-s", "1", "--policy", "async", str(SCRIPT)]
    done = forked.run(
        [*command, "--seconds", "75"], cwd=tmp_path, capture_output=True, text=True, timeout=900,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    reasons = [line for line in said.splitlines() if "samples/s" in line and "one more" in line]
    print("\n".join(reasons))
    wanted = re.findall(r"the job scales to (\d+) worker", said)
    assert wanted and wanted[-1] == "2", said
    assert any(re.search(r"3 workers do .*less than the 25% that would pay", line) for line in reasons), said
