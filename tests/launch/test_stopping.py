"""Jobs of real processes that end by a rule: exact steps, and the coordinator's last words."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
    import numpy as np
    import syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(1000, np.float32)}, syncline.Rule("SGD", lr=1.0))
    while not job.should_stop and job.own_step < 5000:
        job.kv.push({"x": np.ones(1000, np.float32)}).wait()
        job.report(score=job.own_step)
    job.barrier("over")
    print("END", job.step, float(job.kv.pull()["x"][0]))
"""


@pytest.mark.proof
def test_max_steps(commands: Any) -> None:
    result = commands.run(
        "run", "-w", "2", "-s", "2", "--max-steps", "9", "--stop", "scor>1e9", commands.script(SCRIPT)
    )
    assert result.code == 0, result.output
    assert result.output.count("END 9 -9.0") == 2
    assert "stopped by --max-steps 9: step 9" in result.output and "last readings: score" in result.output
    assert "--stop: nobody has reported 'scor'; reported are: score; did you mean 'score'?" in result.output
