"""The values of several ranks become one, block by block, in the order of the ranks: rings and collectives use it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.net.memory import aligned_zeros

Bytes = npt.NDArray[np.uint8]
BLOCK_BYTES = 256 << 10
_NUMPY: dict[str, Callable[..., Any]] = {
    "average": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply,
}  # fmt: skip
_TORCH = {"average": "add", "sum": "add", "min": "minimum", "max": "maximum", "product": "mul"}
#: What overflows is the script's own affair, wherever it happens to be added up.
_QUIET = np.errstate(all="ignore")


class Reducer:
    """One op on one dtype, over `count` ranks in all."""

    def __init__(self, dtype: str, op: str, count: int) -> None:
        self._dtype, self._count, self._is_average = dtype, count, op == "average"
        # NumPy has no bfloat16, and is slow with float16.
        torch = sys.modules.get("torch") if dtype in ("bfloat16", "float16") else None
        self._torch: Any = torch
        self._numpy = np.dtype(dtype) if torch is None else None
        self._merge = getattr(torch, _TORCH[op]) if torch is not None else _NUMPY[op]

    def _typed(self, data: Bytes) -> Any:
        if self._torch is not None:
            return self._torch.from_numpy(data).view(getattr(self._torch, self._dtype))
        return data.view(self._numpy)

    @_QUIET
    def merge(self, into: Bytes, earlier: Bytes) -> None:
        """What earlier ranks have, and what is here, is here."""
        target = self._typed(into)
        self._merge(self._typed(earlier), target, out=target)

    def finish(self, data: Bytes) -> None:
        """Of numbers of all ranks: where they are averaged, this makes the average."""
        if self._is_average:
            target = self._typed(data)
            (self._torch.div if self._torch is not None else np.divide)(target, self._count, out=target)

    @_QUIET
    def small(self, sources: Sequence[Bytes]) -> Bytes:
        """All sources, in new memory."""
        result = sources[0].copy()
        total = self._typed(result)
        for source in sources[1:]:
            self._merge(total, self._typed(source), out=total)
        self.finish(result)
        return result

    @_QUIET
    def few(self, sources: Sequence[Any], out: Any = None) -> Any:
        """The same of arrays of numbers, two at least; `out` may be one of them."""
        is_pair = len(sources) == 2
        total = self._merge(sources[0], sources[1], out=out if is_pair else None)
        for source in sources[2:]:
            self._merge(total, source, out=total)
        if self._is_average:
            np.divide(total, self._count, out=total)
        if out is not None and not is_pair:
            out[...] = total
        return total

    @_QUIET
    def reduce(self, sources: Sequence[Bytes], targets: Sequence[Bytes], *, is_all: bool = True) -> None:
        """All sources, into every target; a target may be a source. `is_all`: these are all ranks."""
        size = len(sources[0])
        in_place = targets[0] is sources[0]
        scratch = aligned_zeros(min(BLOCK_BYTES, size)) if not in_place else None
        for start in range(0, size, BLOCK_BYTES):
            end = min(size, start + BLOCK_BYTES)
            blocks = [source[start:end] for source in sources]
            found = blocks[0] if scratch is None else scratch[: end - start]
            if scratch is not None and len(blocks) == 1:
                found[...] = blocks[0]
            total = self._typed(found)
            for k, block in enumerate(blocks[1:]):
                self._merge(total if k else self._typed(blocks[0]), self._typed(block), out=total)
            if is_all:
                self.finish(found)
            for target in targets:
                if target is not sources[0] or scratch is not None:
                    target[start:end] = found
