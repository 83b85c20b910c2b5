"""Keras on JAX: the compiled step calls out by ordered callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from syncline.jax.ordered_calls import ordered_call
from syncline.keras.backends import Exchange, from_graph


def call_out(exchange: Exchange, tensors: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    if not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return [np.array(array) for array in exchange([np.asarray(tensor) for tensor in tensors])]

    def call(*arrays: Any) -> list[Any]:
        with from_graph():  # what it returns is copied before the job writes there again
            return exchange([np.asarray(array) for array in arrays])

    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in like]
    return ordered_call(call, shapes, *tensors)


def adopt(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Its variables have memory of their own."""


def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def is_in_xla() -> bool:
    return False


def is_traced() -> bool:
    return True  # an optimizer is built before its first step, which may be compiled


def outside() -> Any:
    return contextlib.nullcontext()


def dense(gradient: Any) -> Any:
    return gradient


def batch(arrays: Any) -> Any:
    return arrays


def end_of_data() -> Exception:
    return StopIteration()


def has_extra_steps() -> bool:
    return True


def settle() -> None:
    """A compiled step runs in the background; its callback has the job to itself."""
    jax.effects_barrier()
