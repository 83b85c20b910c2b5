"""Samples of a job whose members are killed, and of one whose workers disagree about them."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from tests.proof.chaotic import play


@pytest.mark.proof
def test_every_sample_counts_once_whoever_is_killed(tmp_path: pathlib.Path) -> None:
    lost, doubled, kills = play(tmp_path, "sync", seed=1, samples=1000, every="1s")
    assert (lost, doubled) == (0, 0) and kills


@pytest.mark.proof
def test_a_worker_whose_data_set_has_another_length_ends_the_job(commands: Any) -> None:
    """A new life of it would find the same; the others, who go on without it, would end well."""
    script = commands.script(
        """
        import numpy as np
        import syncline, syncline.data

        job = syncline.init()
        job.kv.register({"w": np.zeros(2)}, syncline.Rule("Add"))
        source = syncline.data.ArraySource(np.arange(20 + job.rank))
        for batch in syncline.data.batches(source, 4):
            job.kv.push_pull({"w": np.ones(2)}).wait()
        """
    )
    result = commands.run("run", "-w", "2", "--policy", "async", script)
    assert result.code == 1, result.output
    assert re.search(
        r"the job has failed: worker-\d has 2\d samples .*, worker-\d has 2\d .*: all workers must read",
        result.output,
    ), result.output
    assert "starts again" not in result.output
