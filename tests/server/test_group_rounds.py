"""Sums of a process group that begin with what a worker has staged, while it stages."""

from __future__ import annotations

import types
from typing import Any

import torch

from syncline.server.reduce.process_group import GroupRound
from syncline.server.reduce.reducer import CommitShare, Early, expected_commits
from syncline.server.tasks import StagedCommit


class InTheMoment(Early):
    """The worker stages slice 0 just when somebody looks whether it has."""

    def has_all(self, commits: Any, number: int) -> bool:
        contribution = StagedCommit(1, 0, 0)
        contribution.arrays = lambda part: torch.ones(4)
        self.note(("worker-0", 1), 5, contribution, {0})
        return super().has_all(commits, number)


def test_what_is_staged_in_the_moment_of_the_look_is_laid_with_its_bytes() -> None:
    """It was taken for staged, and not found: the round failed."""
    laid: list[Any] = []
    bucket = types.SimpleNamespace(
        numbers=[0], flat=torch.zeros(4), awaits=lambda own: [0],
        lay=lambda own, equal: laid.append([commit.item.arrays(None) for commit in own]),
    )  # fmt: skip
    sums: Any = types.SimpleNamespace(buckets=lambda expected: [bucket])
    expected = expected_commits([CommitShare("worker-0", 1, 5, 1.0, ((0, 1),))])
    circling = GroupRound(sums, expected, "worker-0", lambda tensor: tensor)  # type: ignore[arg-type, return-value]
    circling.go_on(InTheMoment())
    assert circling.num_begun == 1 and laid[0][0] is not None
