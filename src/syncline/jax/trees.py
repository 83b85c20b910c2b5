"""Leaves of a pytree by name, as NumPy arrays and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from syncline.core.layout import ITEM_BYTES
from syncline.errors import LayoutError
from syncline.jax.packages import jax
from syncline.worker.host_memory import HostArray


class Tree:
    """The structure of a pytree; its leaves have the names of their paths: `params.Dense_0.kernel`.

    Trees whose leaves have the same names are the same to it: `nnx.Optimizer` registers a tree of `nnx.Param`, and
    gives its steps plain arrays.
    """

    def __init__(self, tree: Any, prefix: str = "") -> None:
        pairs, self._structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_sparse)
        self._prefix = prefix
        self.names = [prefix + _name(path) for path, _ in pairs]
        for name, (_, leaf) in zip(self.names, pairs, strict=True):
            _refuse_sparse(name, leaf)
            if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
                raise LayoutError(f"{name!r} is a {type(leaf).__name__}; its leaves must be arrays or numbers")
            if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise LayoutError(
                    f"{name!r} is a key of jax.random, which is no array of numbers; keep keys out of the "
                    "parameters, and give an optimizer an old-style key: jax.random.PRNGKey(0)"
                )
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise LayoutError(f"two leaves of the tree are named {twice!r}; rename one of them")

    def leaves(self, tree: Any, what: str) -> list[Any]:
        """The leaves of a tree like this one; LayoutError for another one."""
        leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_sparse)
        for name, leaf in zip(self.names, leaves, strict=False):
            _refuse_sparse(name, leaf)
        if structure != self._structure and list(self._by_name(tree, _is_sparse)) != self.names:
            raise LayoutError(self._difference(tree, what))
        # A number of Python, or an array of NumPy, may have a type that JAX computes with another one for.
        return [leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf) for leaf in leaves]

    def _by_name(self, tree: Any, is_leaf: Callable[[Any], bool]) -> dict[str, Any]:
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        return {self._prefix + _name(path): leaf for path, leaf in pairs}

    def _difference(self, tree: Any, what: str) -> str:
        have = self._by_name(tree, lambda leaf: leaf is None)
        missing = [name for name in self.names if have.get(name) is None]
        if missing and missing[0] in have:
            return f"{missing[0]!r} is None in the {what}; give zeros, e.g. jnp.zeros_like of the parameter"
        added = [name for name in have if name not in self.names]
        words = f"{missing[0]!r} is missing" if missing else f"{added[0]!r} is new" if added else "it has other nodes"
        return (
            f"the tree of the {what} is not the one that init(params) has registered: {words}; call init again for "
            "another model"
        )

    def build(self, leaves: Sequence[Any], like: Any = None) -> Any:
        """A tree of these leaves, with the nodes of `like`: one of those that `leaves` takes."""
        structure = self._structure if like is None else jax.tree_util.tree_structure(like, is_leaf=_is_sparse)
        return jax.tree_util.tree_unflatten(structure, list(leaves))

    def named(self, leaves: Sequence[Any]) -> dict[str, HostArray]:
        """The leaves as NumPy arrays; in host memory they are not copied."""
        return dict(zip(self.names, map(np.asarray, jax.device_get(list(leaves))), strict=True))

    def listed(self, named: Mapping[str, HostArray]) -> list[HostArray]:
        return [named[name] for name in self.names]


def _name(path: Sequence[Any]) -> str:
    """The path, without the `value` of an `nnx.Variable` around each array."""
    keys = list(path)
    while keys and getattr(keys[-1], "name", "") == "value":
        keys.pop()
    return str(jax.tree_util.keystr(tuple(keys), simple=True, separator=".")) or "value"


def _is_sparse(leaf: Any) -> bool:
    return hasattr(leaf, "todense")


def _refuse_sparse(name: str, leaf: Any) -> None:
    if _is_sparse(leaf):
        raise LayoutError(f"{name!r} is sparse ({type(leaf).__name__}), and servers take dense arrays; use todense()")


def is_traced(tree: Any) -> bool:
    """Whether this is inside of jit, or another transformation."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(tree))


def placed(values: Sequence[HostArray], like: Sequence[Any]) -> list[Any]:
    """New JAX arrays, each on the devices of the one that it replaces. They do not share memory with `values`."""
    found = []
    for value, leaf in zip(values, like, strict=True):
        sharding = getattr(leaf, "sharding", None)
        found.append(jax.device_put(np.array(value), sharding))  # device_put may keep the memory that it gets
    return found


def shapes_of(leaves: Sequence[Any]) -> list[Any]:
    """Shapes and types of leaves."""
    return [jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves]


def encoded(named: Mapping[str, HostArray]) -> dict[str, HostArray]:
    """Arrays of types that servers do not know, as bytes."""
    return {name: a if str(a.dtype) in ITEM_BYTES else _as_bytes(a) for name, a in named.items()}


def _as_bytes(array: HostArray) -> HostArray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def decoded(array: HostArray, like: Any) -> HostArray:
    """The array of this type and shape, from what `encoded` made of it."""
    dtype = np.dtype(like.dtype)
    return array if array.dtype == dtype else array.view(dtype).reshape(like.shape)
