"""Sums of a process group that begin with what a worker has staged, while it stages."""

from __future__ import annotations

import types
from typing import Any

import torch

from syncline.reduce.process_group import GroupRound
from syncline.reduce.rounds import EarlyStages
from syncline.reduce.slices import Contribution


class InTheMoment(EarlyStages):
    """The worker stages slice 0 just when somebody looks whether it has."""

    def has_all(self, contributions: Any, number: int) -> bool:
        self.note(("worker-0", 1), 5, lambda part: torch.ones(4), {0})
        return super().has_all(contributions, number)


def test_what_is_staged_in_the_moment_of_the_look_is_laid_with_its_bytes() -> None:
    """It was taken for staged, and not found: the round failed."""
    laid: list[Any] = []
    bucket = types.SimpleNamespace(
        flat=torch.zeros(4), touched_by=lambda own: [0],
        fill=lambda own, equal: laid.append([each.numbers(None) for each in own]),
    )  # fmt: skip
    buckets: Any = types.SimpleNamespace(of=lambda expected: [bucket])
    expected = [Contribution("worker-0", 1, 5, 1.0, ((0, 1),))]
    found = GroupRound(buckets, expected, "worker-0", lambda tensor: tensor)  # type: ignore[arg-type, return-value]
    found.advance(InTheMoment())
    assert found.num_begun == 1 and laid[0][0] is not None
