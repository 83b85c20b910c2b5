"""`async:gather=N`: a slice holds pushes, and applies the weighted mean of every N of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch

from syncline.core.layout import Segment, Slice
from syncline.core.rule import PLAIN, Option
from syncline.core.wire.traffic import StateEntry
from syncline.errors import ProtocolError
from syncline.reduce.kernels import narrow, sum_dtype

#: Keys of held pushes among the state of a slice, when it is copied to another server.
_PREFIX = "syncline.gather."
_SUM, _WEIGHT, _GROUP, _OPTIONS = (_PREFIX + name for name in ("sum", "weight", "group", "options"))
Overrides = Mapping[int, Mapping[str, Option]]


class Gathered:
    """The pushes that one slice holds: Σ wᵢgᵢ and Σ wᵢ, and how many there are.

    A backup gets the same pushes in the same order, so it holds the same numbers. The hyperparameters of a group are
    those of its last push.
    """

    def __init__(
        self, segment: Segment, part: Slice, parameters: Sequence[torch.Tensor], rules: Sequence[str]
    ) -> None:
        """`rules`: the name of the rule of each piece."""
        self._part, self._parameters, self._rules = part, parameters, rules
        self._assigns = [name == "Assign" for name in rules]
        self._is_sum = segment.reduce == "sum"
        self._sums: dict[int, torch.Tensor] = {}  # by piece
        self._weights: dict[int, float] = {}  # by piece that is assigned: of those that pushed it
        self._weight, self.count = 0.0, 0
        self._overrides: Overrides = {}

    def take(
        self, gradients: Sequence[torch.Tensor | None], overrides: Overrides, scale: float, weight: float, group: int
    ) -> tuple[list[torch.Tensor | None], Overrides]:
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

    def _add(self, gradients: Sequence[torch.Tensor | None], scale: float, weight: float) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            assigns = self._assigns[index]
            factor = weight if self._rules[index] in PLAIN else scale * weight
            wide = self._wide
            if index not in self._sums:
                self._sums[index] = torch.zeros(gradient.shape, dtype=wide, device=gradient.device)
            self._sums[index].add_(gradient.to(wide), alpha=factor)
            if assigns:
                self._weights[index] = self._weights.get(index, 0.0) + weight

    @property
    def _wide(self) -> torch.dtype:
        kind: torch.dtype = getattr(torch, sum_dtype(self._part.dtype, averages=True))
        return kind

    def _mean(self) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for index, total in self._sums.items():
            by = self._weights[index] if self._assigns[index] else (1.0 if self._is_sum else self._weight)
            if by != 1.0:
                total.div_(by)
            own = self._parameters[index].dtype
            mean = total if total.dtype == own else torch.empty(total.shape, dtype=own, device=total.device)
            narrow(total, mean)
            found[index] = mean
        return found

    # -- when the slice is copied -------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[StateEntry, torch.Tensor]]:
        """What is held, in the form of rule state."""
        if not self.count:
            return
        number = self._part.id
        for index, total in self._sums.items():
            dtype = str(total.dtype).removeprefix("torch.")
            yield StateEntry(number, index, _SUM, dtype, tuple(total.shape)), total
        for index, weight in self._weights.items():
            yield StateEntry(number, index, _WEIGHT, "float64", (1,)), torch.tensor([weight], dtype=torch.float64)
        group = torch.tensor([self.count, self._weight], dtype=torch.float64)
        yield StateEntry(number, 0, _GROUP, "float64", (2,)), group
        said = msgspec.json.encode({str(group): dict(options) for group, options in self._overrides.items()})
        data = torch.from_numpy(np.frombuffer(said, np.uint8).copy())
        yield StateEntry(number, 0, _OPTIONS, "uint8", (len(said),)), data

    def load(self, entries: Sequence[tuple[StateEntry, torch.Tensor]]) -> list[tuple[StateEntry, torch.Tensor]]:
        """Holds what is in these entries, and returns the others."""
        self._sums, self._weights, self._weight, self.count, self._overrides = {}, {}, 0.0, 0, {}
        for entry, tensor in entries:
            if not entry.key.startswith(_PREFIX):
                continue
            if not 0 <= entry.piece < len(self._parameters):
                raise ProtocolError(f"held pushes of piece {entry.piece} of slice {self._part.id}")
            if entry.key == _SUM:
                parameter = self._parameters[entry.piece]
                if tensor.numel() != parameter.numel() or tensor.dtype != self._wide:
                    raise ProtocolError(f"held pushes of {entry.dtype}{list(entry.shape)} for slice {self._part.id}")
                self._sums[entry.piece] = tensor.to(parameter.device, copy=True).view(parameter.shape)
            elif entry.key == _WEIGHT:
                self._weights[entry.piece] = float(tensor)
            elif entry.key == _GROUP:
                self.count, self._weight = int(tensor[0]), float(tensor[1])
            else:
                said = msgspec.json.decode(tensor.numpy().tobytes(), type=dict[str, dict[str, Option]])
                self._overrides = {int(group): options for group, options in said.items()}
        return [(entry, tensor) for entry, tensor in entries if not entry.key.startswith(_PREFIX)]
