"""A pull never returns a torn slice, beside a writer that never stops."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
    import itertools, pathlib
    import numpy as np, syncline
    job = syncline.init()
    N, PUSHES, PULLS, pulled_enough = 900_000, 70, 6, pathlib.Path("pulled-enough")
    job.kv.register({"x": np.zeros(N, np.float32)}, syncline.Rule("SGD", lr=1.0))
    assert job.kv.layout.num_slices == 1
    job.barrier("begin")
    if job.is_chief:
        gradient = np.ones(N, np.float32)
        for number in itertools.count():
            if number >= PUSHES and pulled_enough.exists():
                break
            job.kv.push({"x": gradient})
    else:
        out, versions = np.zeros(N, np.float32), []
        while len(versions) < PULLS or versions[-1] < PUSHES:
            pulled = job.kv.pull(out={"x": out})
            assert out.min() == out.max(), f"torn: {np.unique(out)}"
            assert out[0] == -pulled.versions["x"], (out[0], pulled.versions)
            versions.append(pulled.versions["x"])
            if len(versions) == PULLS:
                pulled_enough.touch()
        assert versions == sorted(versions)
        print("WHOLE", len(versions))
"""


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_torn_slice_beside_a_busy_writer(commands: Any, transport: str) -> None:
    """One slice, written as fast as can be, read all the while: every copy is of one version, the one it says."""
    options = ("-w", "2", "--policy", "async", "--window", "1", "--transport", transport, "--max-restarts", "0")
    result = commands.run("run", *options, commands.script(SCRIPT))
    assert result.code == 0, result.output
    assert int(result.output.partition("WHOLE ")[2].split()[0]) > 5
