"""A JAX function as `syncline serve` takes it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from syncline.jax.packages import jax
from syncline.jax.trees import Tree
from syncline.store.weights import check_shapes


class JaxModel:
    """What the function in a file for `syncline serve` returns: `return syncline.jax.JaxModel(apply, params)`.

    Calls are compiled, once for all versions. Batches are padded to powers of two, so few sizes are.
    """

    def __init__(self, apply: Callable[..., Any], params: Any) -> None:
        """`apply(params, *inputs)` returns an array, several, or a dict of them. `params`: a pytree like the one that
        was trained.
        """
        self._apply, self._params = jax.jit(apply), params

    def another_version(self) -> JaxModel:
        """One that loads other weights, and whose calls are compiled already."""
        return copy.copy(self)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Takes saved parameters. StoreError: they are those of another tree."""
        tree = Tree(self._params)
        leaves = dict(zip(tree.names, tree.leaves(self._params, "parameters"), strict=True))
        check_shapes(
            {name: array.shape for name, array in weights.items()},
            {name: leaf.shape for name, leaf in leaves.items()},
            needed=leaves.keys(),
            model="tree of parameters",
        )
        # A copy: JAX may go on using the array that it is given.
        given = [jax.numpy.asarray(np.array(weights[name]), leaf.dtype) for name, leaf in leaves.items()]
        self._params = tree.build(given, self._params)

    def __call__(self, *inputs: Any) -> Any:
        num_rows = len(inputs[0])
        size = 1 << (num_rows - 1).bit_length()
        padded = [np.concatenate([rows, np.zeros((size - num_rows, *rows.shape[1:]), rows.dtype)]) for rows in inputs]
        found = self._apply(self._params, *padded)
        return jax.tree_util.tree_map(lambda array: np.asarray(array)[:num_rows], found)
