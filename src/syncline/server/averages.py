"""`--average ema:D`: an average that follows the parameters of a slice, as one more state of its rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from syncline.core.wire.traffic import StateEntry
from syncline.errors import ProtocolError
from syncline.store.weights import AVERAGE_KEY


class Averages:
    """Of the pieces of one slice whose rules change them bit by bit. It begins with the values before the first
    update; halves are averaged in single precision. A backup that has the same values and updates has the same
    average."""

    def __init__(self, parameters: Sequence[torch.Tensor], is_averaged: Sequence[bool], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self._is_averaged = [
            averaged and parameter.is_floating_point() and decay > 0.0
            for parameter, averaged in zip(parameters, is_averaged, strict=True)
        ]
        self._averages: dict[int, torch.Tensor] = {}
        self.is_on = any(self._is_averaged)

    def begin(self) -> None:
        """Before an update: where there is none yet, it begins with what is there."""
        for index, parameter in enumerate(self._parameters):
            if self._is_averaged[index] and index not in self._averages:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._averages[index] = parameter.detach().to(wide, copy=True)

    def follow(self) -> None:
        """After an update."""
        for index, average in self._averages.items():
            average.lerp_(self._parameters[index].detach().to(average.dtype), 1.0 - self._decay)

    def entries(self, part: int, index: int) -> Iterator[tuple[StateEntry, torch.Tensor]]:
        """Of one piece, as its rule's state is told."""
        if (average := self._averages.get(index)) is not None:
            dtype = str(average.dtype).removeprefix("torch.")
            yield StateEntry(part, index, AVERAGE_KEY, dtype, tuple(average.shape)), average

    def load(self, entries: Sequence[tuple[StateEntry, torch.Tensor]]) -> list[tuple[StateEntry, torch.Tensor]]:
        """Takes over what there is of averages; what is left is of rules. Where nothing is, it goes on by itself."""
        found: dict[int, torch.Tensor] = {}
        for entry, tensor in entries:
            if entry.key != AVERAGE_KEY:
                continue
            if not 0 <= entry.piece < len(self._parameters):
                raise ProtocolError(f"an average for piece {entry.piece}")
            parameter = self._parameters[entry.piece]
            if self._is_averaged[entry.piece]:
                found[entry.piece] = tensor.to(parameter.device, copy=True).view_as(parameter)
        if found:
            self._averages = found
        return [(entry, tensor) for entry, tensor in entries if entry.key != AVERAGE_KEY]
