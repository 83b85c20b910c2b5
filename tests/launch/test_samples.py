"""Samples of a job whose members are killed: one quick run; `make proof` has more."""

from __future__ import annotations

import pathlib

import pytest
from tests.proof.chaotic import play


@pytest.mark.slow
def test_every_sample_counts_once_whoever_is_killed(tmp_path: pathlib.Path) -> None:
    lost, doubled, kills = play(tmp_path, "sync", seed=1, samples=2000, every="1s")
    assert (lost, doubled) == (0, 0) and kills
