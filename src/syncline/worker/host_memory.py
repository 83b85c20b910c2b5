"""Named arrays of one registration, for adapters whose arrays are in host memory.

`values` lie in flat memory that commits and pulls write. What is pushed is copied into the arena.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.core.layout import Ranges, to_ranges
from syncline.core.rule import Rule
from syncline.errors import LayoutError
from syncline.net.memory import aligned_zeros
from syncline.worker.arrays import Bytes, copy, dtype_of, to_bytes
from syncline.worker.exchange.finite import LOOK_BYTES, copy_finite
from syncline.worker.job import Job

HostArray = npt.NDArray[Any]
Rules = Rule | Mapping[str, Rule]


class HostMemory:
    """The job's values of these arrays, by the caller's names; in the job each name begins with a prefix."""

    def __init__(
        self, job: Job, named: Mapping[str, HostArray], rules: Rules, prefix: str = "", reduce: str = "mean"
    ) -> None:
        """Registers the arrays. Late and restarted workers get the job's values by that."""
        if not named:
            raise LayoutError("there are no parameters to register; give at least one array")
        self._exchange, self._who = job.exchange, job.name
        own = [(prefix + name, array) for name, array in named.items()]
        by_name = {prefix + n: r for n, r in rules.items()} if isinstance(rules, Mapping) else rules
        known = job.kv.register(own, by_name, reduce)
        layout = self._exchange.layout
        self.segment = layout.where[own[0][0]][0]
        self.flat: Bytes = aligned_zeros(self.segment.num_bytes)
        self.values: dict[str, HostArray] = {}
        self.groups: dict[str, int] = {}  #: the number of each name's rule in the segment
        self.indices: dict[str, int] = {}  #: the position of each name in the segment
        self._places: dict[str, tuple[int, int, int]] = {}  # id, and first and last byte
        self._like: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for name, array in named.items():
            _, index = layout.where[prefix + name]
            parameter, begin = self.segment.parameters[index], self.segment.offsets[index]
            end = begin + parameter.num_bytes
            self.flat[begin:end] = to_bytes(known[prefix + name])
            self.values[name] = self.flat[begin:end].view(array.dtype).reshape(array.shape)
            self._places[name] = (layout.parameter_id(prefix + name), begin, end)
            self._like[name] = (array.dtype, tuple(array.shape))
            self.groups[name], self.indices[name] = parameter.group, index
        self.ids: Ranges = to_ranges(place[0] for place in self._places.values())

    def check(self, given: Mapping[str, HostArray], what: str) -> None:
        """Raises LayoutError for a name that is not registered, or another shape or type."""
        for name, array in given.items():
            like = self._like.get(name)
            if like is None:
                known = ", ".join(list(self._like)[:8])
                raise LayoutError(
                    f"{self._who} gives {what} of {name!r}, which is not registered; there are: {known}"
                )
            if array.dtype != like[0] or array.shape != like[1]:
                raise LayoutError(
                    f"{self._who} gives {what} of {name!r} as {_words(array.dtype, array.shape)}, "
                    f"the job has {_words(*like)}"
                )

    def ids_of(self, names: Mapping[str, HostArray]) -> Ranges:
        if len(names) == len(self._places):
            return self.ids
        return to_ranges(self._places[name][0] for name in names)

    def fill(self, given: Mapping[str, HostArray]) -> bool:
        """Copies arrays into the arena of the next commit. Returns whether all were found finite by that."""
        arena = self._exchange.arena(self.segment.index)
        pairs, total = [], 0
        for name, array in given.items():
            _, begin, end = self._places[name]
            pairs.append((arena[begin:end], to_bytes(array), dtype_of(array)))
            total += end - begin
        if total >= LOOK_BYTES and self._exchange.checks_finite:
            return copy_finite(pairs)
        copy([(target, source) for target, source, _ in pairs])
        return False

    def fill_difference(self, minuend: Mapping[str, HostArray], subtrahend: Mapping[str, HostArray]) -> None:
        """Writes differences of all arrays into the arena of the next commit."""
        for name, target in self.in_arena(list(self._places)).items():
            np.subtract(minuend[name], subtrahend[name], out=target)

    def in_arena(self, names: Sequence[str]) -> dict[str, HostArray]:
        """The places of these arrays in the arena of the next commit."""
        arena, found = self._exchange.arena(self.segment.index), {}
        for name in names:
            _, begin, end = self._places[name]
            dtype, shape = self._like[name]
            found[name] = arena[begin:end].view(dtype).reshape(shape)
        return found


def _words(dtype: Any, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def norm(arrays: Mapping[str, HostArray]) -> float:
    """The global norm of some arrays."""
    total = 0.0
    for array in arrays.values():
        wide = array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
        total += float(np.vdot(wide, wide))
    return math.sqrt(total)


def copied(arrays: Mapping[str, HostArray]) -> dict[str, HostArray]:
    return {name: np.array(array) for name, array in arrays.items()}
