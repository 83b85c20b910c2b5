"""Pushes of many pieces, of the real sizes: nothing is missed where one piece ends and the next begins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from syncline.core.layout import FLOATS, ITEM_BYTES, Layout, Parameter, arrange
from syncline.core.rule import Rule
from syncline.worker.exchange import finite
from syncline.worker.exchange.finite import FinitePlan, Halves

#: Items of four bytes.
PIECE, LONG = finite.PIECE_BYTES // 4, finite.LONG_BYTES // 4
INFINITE = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}


def plan_of(*parameters: Parameter) -> tuple[FinitePlan, list[Any]]:
    """A plan for all of these, and their items as bits, which are all the smallest number above zero."""
    layout = Layout([arrange(parameters, [Rule("SGD", lr=1.0), Rule("Assign")], "mean")])
    segment = layout.segments[0]
    data = np.zeros(segment.num_bytes, np.uint8)
    items = []
    for parameter, begin in zip(segment.parameters, segment.offsets, strict=True):
        view = data[begin : begin + parameter.num_bytes].view(f"u{ITEM_BYTES[parameter.dtype]}")
        view[:] = 1
        items.append(view)
    return FinitePlan(((0, len(parameters)),), layout, lambda segment, slot: data, 0), items


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, LONG - 1, LONG, LONG + 1, 2 * LONG + 3])
@pytest.mark.parametrize("copied", [False, True])
def test_a_bad_number_on_either_side_of_a_border_is_found(size: int, copied: bool) -> None:
    """The first and the last of all, of every piece, and the middle ones, where the halves of a piece meet."""
    plan, [items] = plan_of(Parameter("x", "float32", (size,)))
    source = items.view(np.uint8)
    target = np.empty_like(source)

    def is_finite() -> bool:
        return finite.copy_finite([(target, source, "float32")]) if copied else plan.first_bad() is None

    borders = {0, PIECE // 2, PIECE, LONG // 2, LONG, LONG + PIECE, 2 * LONG, size // 2, size}
    assert is_finite()
    for place in sorted({place + step for place in borders for step in (-1, 0, 1)} & {*range(size)}):
        items[place] = INFINITE["float32"] | 1
        assert not is_finite(), f"item {place} of {size}"
        items[place] = 1
    assert is_finite()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("place", [0, -1])
def test_other_floats_are_found_at_both_ends_of_long_ones(dtype: str, place: int) -> None:
    plan, [items] = plan_of(Parameter("x", dtype, (finite.LONG_BYTES // FLOATS[dtype] + 5,)))
    assert plan.first_bad() is None
    items[place] = INFINITE[dtype]
    assert plan.first_bad() == "x"


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_are_not_looked_at(dtype: str) -> None:
    """All their bits may be set, which read as floats is NaN."""
    plan, [items] = plan_of(Parameter("x", dtype, (finite.LONG_BYTES,), 1))
    source = items.view(np.uint8)
    source[:] = 0xFF
    assert plan.is_empty and finite.copy_finite([(np.empty_like(source), source, dtype)])


def test_finite_numbers_whose_products_add_up_to_infinity_are_let_through() -> None:
    """No product of two overflows, only the sum of all: the quick look fails, the exact one must not."""
    plan, [x, y] = plan_of(Parameter("x", "float32", (LONG,)), Parameter("y", "float32", (LONG,)))
    values = x.view(np.float32)
    values[:] = 1e17
    with np.errstate(all="ignore"):
        assert math.isfinite(values[0] * values[1]) and not Halves(x.view(np.uint8)).is_finite()
    assert plan.first_bad() is None
    y[-1] = INFINITE["float32"]
    assert plan.first_bad() == "y"
