"""Running averages of parameters: `--average ema:DECAY`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.core.wire.traffic import StateEntry
from syncline.errors import ProtocolError
from syncline.reduce.kernels import Numbers, sum_dtype
from syncline.server import numbers as of
from syncline.store.weights import AVERAGE_KEY


class Averages:
    """Running averages of the pieces that gradient rules update. They start at the values before the first update.
    Half-precision parameters are averaged in single precision. Backups with the same values and updates have the same
    averages.
    """

    def __init__(self, parameters: Sequence[Numbers], is_averaged: Sequence[bool], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self._is_averaged = [
            averaged and of.is_floating(parameter) and decay > 0.0
            for parameter, averaged in zip(parameters, is_averaged, strict=True)
        ]
        self._averages: dict[int, Numbers] = {}
        self.is_on = any(self._is_averaged)

    def begin(self) -> None:
        """Before an update: starts averages that do not exist yet."""
        for index, parameter in enumerate(self._parameters):
            if self._is_averaged[index] and index not in self._averages:
                wide = sum_dtype(of.dtype_of(parameter), averages=True)
                self._averages[index] = of.widened(parameter, wide)

    def follow(self) -> None:
        """After an update: updates the averages."""
        for index, average in self._averages.items():
            of.blend(average, self._parameters[index], 1.0 - self._decay)

    def entries(self, part: int, index: int) -> Iterator[tuple[StateEntry, Numbers]]:
        """The average of one piece, in the form of rule state."""
        if (average := self._averages.get(index)) is not None:
            yield StateEntry(part, index, AVERAGE_KEY, of.dtype_of(average), tuple(average.shape)), average

    def load(self, entries: Sequence[tuple[StateEntry, Numbers]]) -> list[tuple[StateEntry, Numbers]]:
        """Loads averages from `entries` and returns the other entries. Missing averages start later."""
        found: dict[int, Numbers] = {}
        for entry, tensor in entries:
            if entry.key != AVERAGE_KEY:
                continue
            if not 0 <= entry.piece < len(self._parameters):
                raise ProtocolError(f"an average for piece {entry.piece}")
            parameter = self._parameters[entry.piece]
            if self._is_averaged[entry.piece]:
                found[entry.piece] = of.copy_of(tensor, parameter).reshape(parameter.shape)
        if found:
            self._averages = found
        return [(entry, tensor) for entry, tensor in entries if entry.key != AVERAGE_KEY]
