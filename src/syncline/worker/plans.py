"""What a caller gives again and again, the same arrays under the same names, is checked and described once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncline.core.layout import Layout, Ranges
from syncline.worker import arrays
from syncline.worker.arrays import Array, Bytes
from syncline.worker.copies import KeptArrays
from syncline.worker.copying import copy
from syncline.worker.exchange import Push
from syncline.worker.finite import LOOK_BYTES, copy_finite
from syncline.worker.sinks import ArraySink


class Given:
    """Arrays by name, as they were given: known again by the object, its shape and where its data lie.

    It does not keep them alive: a caller that pushes new arrays every time does not pay for the last ones.
    """

    def __init__(self, named: Mapping[str, Array]) -> None:
        self._items = [(name, _reference(array), array.shape, _place(array)) for name, array in named.items()]

    def is_again(self, named: Mapping[str, Array]) -> bool:
        if len(named) != len(self._items):
            return False
        for name, reference, shape, place in self._items:
            array = named.get(name)
            if reference() is not array or array is None or array.shape != shape or _place(array) != place:
                return False
        return True


def _reference(array: Array) -> Callable[[], Array | None]:
    try:
        return weakref.ref(array)
    except TypeError:  # a NumPy scalar
        return lambda: None


def _place(array: Array) -> Any:
    """NumPy cannot move the data of an array that others refer to; torch can."""
    return array.data_ptr() if hasattr(array, "data_ptr") else None


class PushPlan:
    """How some arrays go into the arena of one slot: those that do not lie there already are copied."""

    def __init__(
        self, grads: Mapping[str, Array], pushed: Ranges, targets: Sequence[tuple[str, Bytes, str]], look: bool
    ) -> None:
        self._given = Given(grads)
        self._targets = targets
        self._push = Push(pushed=pushed)
        num_bytes = sum(target.size for _, target, _ in targets)
        self._looks = look and len(targets) == len(grads) and num_bytes >= LOOK_BYTES

    @property
    def pushed(self) -> Ranges:
        return self._push.pushed

    def fits(self, grads: Mapping[str, Array]) -> bool:
        return self._given.is_again(grads)

    def fill(self, grads: Mapping[str, Array]) -> bool:
        """Copies what has to be; whether all of it was found to be finite by the way."""
        if self._looks:
            return copy_finite([(place, arrays.to_bytes(grads[name]), dtype) for name, place, dtype in self._targets])
        if self._targets:
            copy([(target, arrays.to_bytes(grads[name])) for name, target, _ in self._targets])
        return False

    def push(self, weight: float, is_finite: bool = False) -> Push:
        if weight == 1.0 and not is_finite:
            return self._push
        return Push(pushed=self._push.pushed, weight=weight, finite=self._push.pushed if is_finite else ())


class PullPlan:
    """Where pulled parameters go: the caller's own arrays, those that are strided by a copy at the end.

    The caller's arrays of the last pull are kept until the next one.
    """

    def __init__(
        self,
        out: Mapping[str, Array] | None,
        result: Mapping[str, Array],
        late: Mapping[str, Bytes],
        own: Mapping[str, Bytes],
        sink: ArraySink,
    ) -> None:
        """`own`: the memory of those results that were made for this pull."""
        self._given = Given(out) if out is not None else None
        self.result, self.late, self.own, self.sink = result, late, own, sink

    def fits(self, out: Mapping[str, Array] | None) -> bool:
        return out is not None and self._given is not None and self._given.is_again(out)

    def kept(self, layout: Layout) -> KeptArrays:
        """What was made for this pull, for as long as the caller keeps it: each result lies in its memory."""
        return KeptArrays(layout, {name: weakref.ref(data) for name, data in self.own.items()})
