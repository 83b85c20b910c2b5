"""Ordered calls from compiled code to functions of host arrays.

`io_callback` copies every operand into new memory. On one CPU device, `buffer_callback` hands out the memory itself.
It has no order of its own, so two small ordered callbacks stand around it, and `jax.effects_barrier` waits for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from syncline.jax.packages import io_callback, jax

try:
    _in_place: Any = importlib.import_module("jax.experimental.buffer_callback").buffer_callback
except ImportError:  # an older JAX
    _in_place = None


def ordered_call(function: Callable[..., Sequence[Any]], shapes: Sequence[Any], *arguments: Any) -> list[Any]:
    """The results of `function`, whose arguments are valid until it returns.

    Where the first arrays of the arguments have the shapes of the results, results may take their memory. A result
    that is itself one of these arguments must stand at its place.
    """
    # Several devices would each make the call in place.
    if _in_place is None or jax.default_backend() != "cpu" or len(jax.devices()) > 1:
        return list(io_callback(lambda *given: list(function(*given)), shapes, *arguments, ordered=True))
    leaves, structure = jax.tree_util.tree_flatten(arguments)

    def call(_context: Any, outputs: Any, _begun: Any, *given: Any) -> None:
        results = function(*structure.unflatten([np.asarray(buffer) for buffer in given]))
        for place, result in zip(outputs[1:], results, strict=True):
            np.copyto(np.asarray(place), result, casting="no")

    count = jax.ShapeDtypeStruct((), np.int32)
    same = {
        place: place
        for place, (leaf, shape) in enumerate(zip(leaves, shapes, strict=False), start=1)
        if (np.shape(leaf), jax.numpy.result_type(leaf)) == (shape.shape, shape.dtype)
    }
    begun = io_callback(lambda: np.int32(0), count, ordered=True)
    in_place = _in_place(call, [count, *shapes], has_side_effect=True, input_output_aliases=same)
    done, *results = in_place(begun, *leaves)
    io_callback(lambda _: None, None, done, ordered=True)
    return list(results)
