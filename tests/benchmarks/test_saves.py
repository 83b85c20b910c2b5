"""The rows about checkpoints in small: both sides save and load, and figures come out."""

from __future__ import annotations

import pytest

from benchmarks.row import Effort, Outcome, Reach
from benchmarks.saves import checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("load", [False, True])
def test_a_small_checkpoint_has_a_figure(fast: Effort, load: bool) -> None:
    row = checkpoint("c", 1 << 20, load=load, reach=Reach("printed"))
    assert Outcome(row, row.measure(fast)).ratio > 0
