"""Aggregates the gradients of a round's workers otherwise than by a mean: see `core/aggregate.py`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from syncline import extensions
from syncline.core.aggregate import Aggregate, OwnAggregate, aggregated, own_of
from syncline.core.layout import INTEGERS
from syncline.errors import RuleError
from syncline.reduce.kernels import Numbers, sum_dtype
from syncline.server import numbers as of


@functools.cache
def _own(how: Aggregate) -> OwnAggregate | None:
    return own_of(how, extensions.load)


def aggregate_numbers(how: Aggregate, rows: Sequence[Numbers], weights: Sequence[float], into: Numbers) -> None:
    """Writes the aggregate of these rows, one of each worker, into `into`."""
    dtype = of.dtype_of(rows[0])
    # NumPy has no bfloat16, and integers become fractions.
    wide = sum_dtype(dtype, averages=True)
    wide_rows = rows if dtype == wide else [of.widened(row, wide) for row in rows]
    arrays = [of.bytes_of(row).view(wide).reshape(tuple(row.shape)) for row in wide_rows]
    found = aggregated(how, arrays, weights, _own(how))
    found = np.rint(found) if dtype in INTEGERS else found
    of.copy_into(into, of.numbers_in(np.ascontiguousarray(found, wide).reshape(-1).view(np.uint8), wide))
    if how.kind == "own" and not of.are_finite(into):
        raise RuleError(f"--aggregate {how.name}: it returned numbers beyond {of.dtype_of(into)}")
