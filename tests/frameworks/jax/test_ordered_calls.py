"""Calls from compiled code: in order, with the values of their step, and none under way behind the barrier."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncline.jax.ordered_calls import ordered_call


def test_calls_that_do_not_depend_on_each_other_keep_their_order() -> None:
    seen: list[int] = []

    def note(number: int, slow: float) -> Any:
        def call(x: Any) -> list[Any]:
            time.sleep(slow)
            seen.append(number)
            return [x]

        return call

    @jax.jit
    def step(x: Any) -> Any:
        first = ordered_call(note(1, 0.02), [x], x)
        second = ordered_call(note(2, 0.0), [x], x)
        return first, second

    for _ in range(5):
        step(jnp.ones(3))
    jax.effects_barrier()
    assert seen == [1, 2] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_results_may_take_the_memory_of_arguments(dtype: str) -> None:
    kept = jnp.arange(6).reshape(2, 3).astype(dtype)

    def swap(given: Any, number: Any) -> list[Any]:
        assert number == 7
        return [given[1].copy(), given[0].copy(), np.asarray(number + 1)]

    @jax.jit
    def step(one: Any, other: Any) -> Any:
        shapes = [one, other, jax.ShapeDtypeStruct((), np.int32)]
        return ordered_call(swap, shapes, [one, other], jnp.int32(7)), one

    (first, second, third), same = step(kept, jnp.zeros((2, 3), dtype))
    assert (np.asarray(first) == 0).all()
    assert (np.asarray(second) == np.asarray(kept)).all()
    assert third == 8
    assert (np.asarray(same) == np.asarray(kept)).all()
    assert (np.asarray(kept) == np.arange(6).reshape(2, 3).astype(dtype)).all()


def test_a_call_inside_of_a_condition() -> None:
    calls: list[float] = []

    def call(x: Any) -> list[Any]:
        calls.append(float(x[0]))
        return [x + 1]

    @jax.jit
    def step(x: Any) -> Any:
        return jax.lax.cond(x[0] > 0, lambda: ordered_call(call, [x], x)[0], lambda: x)

    assert float(step(jnp.ones(2))[0]) == 2
    assert float(step(-jnp.ones(2))[0]) == -1
    jax.effects_barrier()
    assert calls == [1.0]


def test_the_barrier_waits_for_a_call() -> None:
    ended: list[bool] = []

    def call(x: Any) -> list[Any]:
        time.sleep(0.1)
        ended.append(True)
        return [x]

    jax.jit(lambda x: ordered_call(call, [x], x))(jnp.ones(2))
    jax.effects_barrier()
    assert ended == [True]
