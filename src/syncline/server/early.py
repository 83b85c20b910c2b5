"""What workers have staged before their commits, as far as it is added up here before a round is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from syncline.core.forecast import Forecasts, Outcome, Share
from syncline.core.layout import Slice
from syncline.core.rounds import Commit
from syncline.core.slice_state import Identity
from syncline.server.work import Contribution, RoundWork, key_of

Counted = Sequence[Commit[Contribution]]


class _Staged(NamedTuple):
    clock: int
    arrays: Callable[[Slice], torch.Tensor | None]
    slices: set[int]


class Early:
    """Of each worker, what belongs to the clock that it spoke of last. One thread notes while another looks: what is
    noted is never changed, only replaced."""

    def __init__(self) -> None:
        self._staged: dict[Identity, _Staged] = {}

    def note(self, worker: Identity, clock: int, contribution: Contribution, slices: set[int]) -> None:
        known = self._staged.get(worker)
        before = known.slices if known is not None and known.clock == clock else set[int]()
        self._staged[worker] = _Staged(clock, contribution.arrays, before | slices)

    def has_all(self, commits: Counted, number: int) -> bool:
        """Whether all of these have staged this slice."""
        return all(number in self._of(commit).slices for commit in commits)

    def _of(self, commit: Commit[Contribution]) -> _Staged:
        found = self._staged.get((commit.worker, commit.incarnation))
        return found if found is not None and found.clock == commit.clock else _NONE

    def with_arrays(self, commits: Counted) -> Counted:
        """These commits, which are forecast, with what they have staged."""
        for commit in commits:
            commit.item.arrays = self._of(commit).arrays
        return commits


_NONE = _Staged(0, lambda part: None, set())


def forecast_commits(shares: Sequence[Share]) -> Counted:
    """The commits of a forecast, as far as they count."""
    counted = []
    for share in shares:
        item = Contribution(share.incarnation, 0, 0)
        item.pushed, item.weight = share.pushed, share.weight
        if share.weight > 0:
            counted.append(Commit(share.worker, share.incarnation, share.clock, item))
    return counted


def settle_forecast(forecasts: Forecasts, work: RoundWork, num_slices: int) -> Outcome:
    """A round is whole: what of its forecast has held. `num_slices`: of the round."""
    shares = [Share(*key_of(commit), commit.item.weight, commit.item.pushed) for commit in work.commits]
    changed = {number for commit in work.commits for number in commit.item.changed}
    is_early = all(commit.item.is_early for commit in work.commits)
    return forecasts.settle(shares, changed, num_slices, is_early=is_early, skip=work.skip)
