"""`async:gather=N`: a slice holds pushes, and applies the weighted mean of every N of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from syncline.core.layout import Segment, Slice
from syncline.core.rule import PLAIN, Option
from syncline.core.wire.traffic import StateEntry
from syncline.errors import ProtocolError
from syncline.reduce.kernels import Numbers, divide, narrow, sum_dtype
from syncline.server import numbers as of

#: Keys of held pushes among the state of a slice, when it is copied to another server.
_PREFIX = "syncline.gather."
_SUM, _WEIGHT, _GROUP, _OPTIONS = (_PREFIX + name for name in ("sum", "weight", "group", "options"))
Overrides = Mapping[int, Mapping[str, Option]]


class Gathered:
    """The pushes that one slice holds: Σ wᵢgᵢ and Σ wᵢ, and how many there are.

    A backup gets the same pushes in the same order, so it holds the same numbers. The hyperparameters of a group are
    those of its last push.
    """

    def __init__(self, segment: Segment, part: Slice, parameters: Sequence[Numbers], rules: Sequence[str]) -> None:
        """`rules`: the name of the rule of each piece."""
        self._part, self._parameters, self._rules = part, parameters, rules
        self._assigns = [name == "Assign" for name in rules]
        self._is_sum = segment.reduce == "sum"
        self._sums: dict[int, Numbers] = {}  # by piece
        self._weights: dict[int, float] = {}  # by piece that is assigned: of those that pushed it
        self._weight, self.count = 0.0, 0
        self._overrides: Overrides = {}

    def take(
        self, gradients: Sequence[Numbers | None], overrides: Overrides, scale: float, weight: float, group: int
    ) -> tuple[list[Numbers | None], Overrides]:
        """Adds a push to the group. When it is complete, returns its mean and its hyperparameters, else nothing.

        `group`: how many pushes make it complete; 1 without gradients flushes what is held. `scale`: the factor on
        gradients, but not on deltas and values that are assigned.
        """
        if any(gradient is not None for gradient in gradients):
            self._add(gradients, scale, weight)
            self._weight += weight
            self.count += 1
            self._overrides = overrides
        if not self.count or self.count < group:
            return [], {}
        found, overrides = self._mean(), self._overrides
        self._weight, self.count, self._overrides = 0.0, 0, {}
        self._sums, self._weights = {}, {}
        return found, overrides

    def _add(self, gradients: Sequence[Numbers | None], scale: float, weight: float) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            assigns = self._assigns[index]
            factor = weight if self._rules[index] in PLAIN else scale * weight
            wide = self._wide
            if index not in self._sums:
                self._sums[index] = of.zeros(gradient.shape, wide, gradient)
            of.add_to(self._sums[index], gradient, factor)
            if assigns:
                self._weights[index] = self._weights.get(index, 0.0) + weight

    @property
    def _wide(self) -> str:
        return sum_dtype(self._part.dtype, averages=True)

    def _mean(self) -> list[Numbers | None]:
        found: list[Numbers | None] = [None] * len(self._parameters)
        for index, total in self._sums.items():
            by = self._weights[index] if self._assigns[index] else (1.0 if self._is_sum else self._weight)
            if by != 1.0:
                divide(total, by)
            own = self._part.dtype
            mean = total if self._wide == own else of.empty(total.shape, own, total)
            narrow(total, mean)
            found[index] = mean
        return found

    # -- when the slice is copied -------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[StateEntry, Numbers]]:
        """What is held, in the form of rule state."""
        if not self.count:
            return
        number = self._part.id
        for index, total in self._sums.items():
            yield StateEntry(number, index, _SUM, of.dtype_of(total), tuple(total.shape)), total
        for index, weight in self._weights.items():
            yield StateEntry(number, index, _WEIGHT, "float64", (1,)), of.as_numbers([weight])
        yield StateEntry(number, 0, _GROUP, "float64", (2,)), of.as_numbers([self.count, self._weight])
        said = msgspec.json.encode({str(group): dict(options) for group, options in self._overrides.items()})
        yield StateEntry(number, 0, _OPTIONS, "uint8", (len(said),)), of.as_numbers(np.frombuffer(said, np.uint8))

    def load(self, entries: Sequence[tuple[StateEntry, Numbers]]) -> list[tuple[StateEntry, Numbers]]:
        """Holds what is in these entries, and returns the others."""
        self._sums, self._weights, self._weight, self.count, self._overrides = {}, {}, 0.0, 0, {}
        for entry, tensor in entries:
            if not entry.key.startswith(_PREFIX):
                continue
            if not 0 <= entry.piece < len(self._parameters):
                raise ProtocolError(f"held pushes of piece {entry.piece} of slice {self._part.id}")
            if entry.key == _SUM:
                parameter = self._parameters[entry.piece]
                size = of.number_of_items(parameter)
                if of.number_of_items(tensor) != size or of.dtype_of(tensor) != self._wide:
                    raise ProtocolError(f"held pushes of {entry.dtype}{list(entry.shape)} for slice {self._part.id}")
                self._sums[entry.piece] = of.copy_of(tensor, parameter).reshape(parameter.shape)
            elif entry.key == _WEIGHT:
                self._weights[entry.piece] = float(tensor[0])
            elif entry.key == _GROUP:
                self.count, self._weight = int(tensor[0]), float(tensor[1])
            else:
                said = msgspec.json.decode(of.bytes_of(tensor).tobytes(), type=dict[str, dict[str, Option]])
                self._overrides = {int(group): options for group, options in said.items()}
        return [(entry, tensor) for entry, tensor in entries if not entry.key.startswith(_PREFIX)]
