"""One slice as reducers see it: which of its pieces were pushed, and how contributions become its sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from syncline.core.layout import ITEM_BYTES, Ranges, Segment, Slice, covers, in_ranges
from syncline.core.slice_state import Identity
from syncline.reduce.kernels import Numbers, divide, narrow, sum_dtype, weighted_sum

#: Finds the staged numbers of a slice; None if nothing is staged.
FindNumbers = Callable[[Slice], Numbers | None]


def nothing_staged(part: Slice) -> None:
    """Nothing is staged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's part of a round. Two are equal if sums depend on them in the same way."""

    worker: str
    incarnation: int
    clock: int
    weight: float
    pushed: Ranges  #: ids of the pushed parameters
    numbers: FindNumbers = dataclasses.field(default=nothing_staged, compare=False, repr=False)

    @property
    def life(self) -> Identity:
        return self.worker, self.incarnation


#: The contributions to a sum, in the order in which they are added.
Contributions = Sequence[Contribution]


class SliceReduction:
    """How the gradients of several workers become the sum or mean of one slice.

    Numbers are slice-shaped: arrays in host memory, or tensors on any device.
    """

    def __init__(self, segment: Segment, part: Slice) -> None:
        self.part, self.number = part, part.id
        self.pieces = segment.pieces(part)
        self._ids = [segment.first_parameter + piece.parameter for piece in self.pieces]
        rules = [segment.rule_of(segment.parameters[piece.parameter]) for piece in self.pieces]
        self._assigns = [rule.name == "Assign" for rule in rules]
        self._averages = [segment.reduce == "mean" or assigns for assigns in self._assigns]
        #: In which it is added up, and the size of such a sum.
        self.wide_dtype = sum_dtype(part.dtype, averages=any(self._averages))
        self._item_bytes = ITEM_BYTES[part.dtype]
        self.num_items = part.num_bytes // self._item_bytes
        self.wide_bytes = self.num_items * ITEM_BYTES[self.wide_dtype]
        self._last_has: tuple[Ranges, Sequence[bool]] = ((), [False] * len(self._ids))

    @property
    def is_assigned(self) -> bool:
        """Whether all its pieces are buffers, which are pushed at the step and not during backward."""
        return all(self._assigns)

    # -- which pieces are pushed --------------------------------------------------------------------------

    def has(self, pushed: Ranges) -> Sequence[bool]:
        """Which pieces are pushed; cached."""
        known = self._last_has
        if known[0] != pushed:
            if self._ids and covers(pushed, self._ids[0], self._ids[-1] + 1):
                has: Sequence[bool] = (True,) * len(self._ids)
            else:
                has = [in_ranges(pushed, number) for number in self._ids]
            known = self._last_has = (pushed, has)
        return known[1]

    def touched_by(self, pushed: Ranges) -> bool:
        return any(self.has(pushed))

    def pushed_pieces(self, contributions: Contributions) -> list[int]:
        """The pieces that any of these contributions has."""
        pushed = [self.has(each.pushed) for each in contributions]
        return [index for index in range(len(self.pieces)) if any(has[index] for has in pushed)]

    # -- sums ---------------------------------------------------------------------------------------------

    def _view(self, numbers: Numbers, index: int) -> Numbers:
        """One piece of slice-shaped numbers."""
        piece = self.pieces[index]
        start = piece.offset // self._item_bytes
        return numbers[start : start + piece.num_items]

    def add_up(self, contributions: Contributions, wide: Numbers, equal: float | None) -> None:
        """Writes the sum of these contributions into `wide`: weighted, unless all have the weight `equal`. Pieces
        that none of them has become zeros.
        """
        sources = []
        for each in contributions:
            if each.weight > 0 and any(has := self.has(each.pushed)):
                numbers = each.numbers(self.part)
                assert numbers is not None, "pushed, and not staged"
                sources.append((numbers, each.weight, has))
        weighted = [equal is None and averages for averages in self._averages]
        if sources and all(all(has) for _, _, has in sources) and len(set(weighted)) == 1:
            weighted_sum([(numbers, weight) for numbers, weight, _ in sources], wide, weighted=weighted[0])
            return
        wide[...] = 0
        for index, is_weighted in enumerate(weighted):
            here = [(self._view(numbers, index), weight) for numbers, weight, has in sources if has[index]]
            if here:
                weighted_sum(here, self._view(wide, index), weighted=is_weighted)

    def finish(
        self, contributions: Contributions, wide: Numbers, into: Numbers, weight: float, equal: float | None
    ) -> None:
        """Divides the sum of all contributions where a mean is wanted, and copies it into `into`, in the dtype of the
        slice. `weight`: of the whole round; for `Assign`, the weight of those that pushed counts instead.
        """
        pushed = [(self.has(each.pushed), each.weight) for each in contributions]
        divisors = list[float]()
        for index, (averages, assigns) in enumerate(zip(self._averages, self._assigns, strict=True)):
            weights = [each for has, each in pushed if has[index]]
            total = sum(weights) if assigns else weight
            divisors.append((total / (equal or 1.0)) if averages and weights else 1.0)
        if len(set(divisors)) == 1:
            if divisors[0] != 1.0:
                divide(wide, divisors[0])
        else:
            for index, divisor in enumerate(divisors):
                if divisor != 1.0:
                    divide(self._view(wide, index), divisor)
        narrow(wide, into)
