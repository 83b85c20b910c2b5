"""The norm of a push over all its gradients: `--aggregate norm-clipped` limits it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from syncline.core.layout import FLOATS, Layout, Ranges, Segment, in_ranges

Bytes = npt.NDArray[np.uint8]
#: Squares are added up in double precision, so many bytes at a time.
_BLOCK_BYTES = 1 << 18


def squared_norm(pushed: Ranges, layout: Layout, arena: Callable[[Segment, int], Bytes], slot: int) -> float:
    """Of the gradients in the arena; values that are assigned are none."""
    total = 0.0
    for segment in layout.segments:
        for index, parameter in enumerate(segment.parameters):
            is_gradient = parameter.dtype in FLOATS and segment.rule_of(parameter).name != "Assign"
            if is_gradient and in_ranges(pushed, segment.first_parameter + index):
                begin = segment.offsets[index]
                data = arena(segment, slot)[begin : begin + parameter.num_bytes]
                for start in range(0, data.size, _BLOCK_BYTES):
                    values = _as_doubles(data[start : start + _BLOCK_BYTES], parameter.dtype)
                    total += float(values.dot(values))
    return min(total, sys.float_info.max)


def _as_doubles(data: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bfloat16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(dtype).astype(np.float64)
