"""Rounds as reducers see them: what each worker contributes, what was staged early, and which round comes next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from syncline.core.slice_state import Identity
from syncline.reduce.kernels import Numbers
from syncline.reduce.slices import Contribution, Contributions, FindNumbers, SliceReduction, nothing_staged


class SliceSum(NamedTuple):
    """A slice, and its sum or mean over all workers in the dtype of the slice: bytes, or a tensor."""

    slice: SliceReduction
    numbers: Numbers


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """A complete round, and whom to call. All servers give their reducers the same rounds in the same order."""

    contributions: tuple[Contribution, ...]
    skip: bool  #: nothing of it counts, e.g. because gradients overflowed
    is_early: bool  #: every worker staged slices before its commit
    is_edited: bool  #: a worker changed gradients that it had staged
    summed: Callable[[Sequence[SliceSum]], None]  #: every slice that was pushed has its sum
    failed: Callable[[Exception], None]

    @property
    def counted(self) -> Contributions:
        """The contributions that are added up."""
        return [] if self.skip else [each for each in self.contributions if each.weight > 0]


def equal_weight(contributions: Contributions) -> float | None:
    """The weight of every contribution, if they all have the same. Then only the sum is divided, and no gradient is
    multiplied.
    """
    weights = {each.weight for each in contributions}
    return weights.pop() if len(weights) == 1 else None


def total_weight(contributions: Contributions) -> float:
    return sum(each.weight for each in contributions)


class _Staged(NamedTuple):
    clock: int
    numbers: FindNumbers
    slices: frozenset[int]


_NOTHING_STAGED = _Staged(0, nothing_staged, frozenset())


class EarlyStages:
    """The slices that each worker has staged before the commit of its current clock. One thread may write while
    others read: entries are replaced, never changed.
    """

    def __init__(self) -> None:
        self._staged: dict[Identity, _Staged] = {}

    def note(self, worker: Identity, clock: int, numbers: FindNumbers, slices: Iterable[int]) -> None:
        known = self._staged.get(worker, _NOTHING_STAGED)
        before = known.slices if known.clock == clock else frozenset[int]()
        self._staged[worker] = _Staged(clock, numbers, before.union(slices))

    def has_all(self, contributions: Contributions, number: int) -> bool:
        """Whether all of these workers have staged this slice."""
        return all(number in self._of(each).slices for each in contributions)

    def _of(self, contribution: Contribution) -> _Staged:
        found = self._staged.get(contribution.life, _NOTHING_STAGED)
        return found if found.clock == contribution.clock else _NOTHING_STAGED

    def with_numbers(self, contributions: Contributions) -> Contributions:
        """Expected contributions, with the numbers that are staged for them."""
        return [dataclasses.replace(each, numbers=self._of(each).numbers) for each in contributions]


class NextRound:
    """The next round of a generation, and whether its sums begin during backward.

    They do after two rounds in a row with the same workers, weights and parameters, whose gradients were staged
    during backward and not edited after it. The next round is expected to be like these two, and its gradients are
    added up as they become ready. If it turns out to be another round, all of it is added up again. All servers see
    the same rounds in the same order, so all of them expect the same.
    """

    def __init__(self) -> None:
        self.number = 0  #: of this round, in its generation
        self.expected: Contributions = ()  #: those that count; empty: sums begin when the round is complete
        self._like_last: tuple[Contribution, ...] = ()

    def settle(self, complete: Round) -> bool:
        """The round is complete. Returns whether sums that began for the expected round are valid for it."""
        is_plain = not complete.skip and not complete.is_edited
        is_like_last = is_plain and complete.contributions == self._like_last
        is_as_expected = is_like_last and bool(self.expected)
        following = tuple(
            Contribution(each.worker, each.incarnation, each.clock + 1, each.weight, each.pushed)
            for each in complete.contributions
        )
        self._like_last = following if is_plain else ()
        will_be_early = is_like_last and complete.is_early
        self.expected = [each for each in following if each.weight > 0] if will_be_early else ()
        self.number += 1
        return is_as_expected
