"""`JaxModel` as `syncline serve` uses it: one after another, each with other weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import syncline.jax
from syncline.errors import StoreError


def test_all_versions_use_one_compiled_function() -> None:
    """A job that is followed gives a version every two seconds, and compiling takes longer than a call."""
    traced: list[int] = []

    def apply(params: Any, x: Any) -> Any:
        traced.append(len(x))  # when it is compiled only
        return x @ params["w"]

    first = syncline.jax.JaxModel(apply, {"w": jnp.ones((2, 3))})
    second = first.another_version()
    second.load({"w": np.full((2, 3), 5.0, np.float32)})
    rows = np.ones((3, 2), np.float32)
    assert second(rows).tolist() == [[10.0] * 3] * 3 and first(rows).tolist() == [[2.0] * 3] * 3
    assert traced == [4]
    third = second.another_version()
    third.load({"w": np.full((2, 3), 7.0, np.float32)})
    assert third(rows[:1]).tolist() == [[14.0] * 3] and second(rows[:1]).tolist() == [[10.0] * 3]
    assert traced == [4, 1]
    for weights, words in (
        ({}, "the checkpoint has no 'w'"),
        ({"w": rows[:2], "v": rows}, "the tree of parameters has no 'v'"),
        ({"w": rows}, r"'w' has shape \[3, 2\], the model's \[2, 3\]"),
    ):
        with pytest.raises(StoreError, match=words):
            first.load(weights)
