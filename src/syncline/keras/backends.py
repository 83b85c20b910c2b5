"""How a step reaches the job from eager code, from a TensorFlow graph or from a compiled JAX function.

A backend is a module with the functions of `Backend`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import keras
import numpy as np

from syncline.errors import ConfigError
from syncline.keras.versions import check_versions

#: Host arrays in, host arrays out.
Exchange = Callable[[list[Any]], list[Any]]


class Backend(Protocol):
    """What differs between Keras' backends."""

    def call_out(self, exchange: Exchange, tensors: Sequence[Any], like: Sequence[Any]) -> list[Any]:
        """Calls `exchange` with host arrays of these tensors; its arrays become tensors, one for each of `like`."""

    def adopt(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        """The job writes new parameters into these arrays: where it can be, they become the variables' memory."""

    def assign(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Gives variables these values, which are tensors or arrays."""

    def is_in_xla(self) -> bool:
        """Whether the code that runs now is being compiled so that it cannot call out."""

    def is_traced(self) -> bool:
        """Whether the code that runs now only describes what runs later."""

    def outside(self) -> Any:
        """Context in which variables can be created, read and written, also while a graph is being traced."""

    def dense(self, gradient: Any) -> Any:
        """A gradient as one tensor."""

    def batch(self, arrays: Any) -> Any:
        """A batch as the trainer takes it."""

    def end_of_data(self) -> Exception:
        """What an iterator raises when it has no more batches."""

    def has_extra_steps(self) -> bool:
        """Whether there are steps that do not count: Keras reads ahead, or fails in an epoch without a batch."""

    def settle(self) -> None:
        """Returns when the steps that were started are done."""


@functools.cache  # versions are read from files, and every step asks
def current() -> Backend:
    """That of the Keras in this process."""
    name = keras.backend.backend()
    if name not in ("torch", "tensorflow", "jax"):
        raise ConfigError(
            f"Keras' backend {name!r} cannot train in a job; set KERAS_BACKEND to torch, tensorflow or jax before "
            "keras is imported"
        )
    check_versions(name)
    return cast("Backend", importlib.import_module(f"syncline.keras.on_{name}"))


_place = threading.local()


@contextlib.contextmanager
def from_graph() -> Iterator[None]:
    """Around what a graph or compiled code calls."""
    _place.is_graph = True
    try:
        yield
    finally:
        _place.is_graph = False


def is_from_graph() -> bool:
    """Whether an error raised now would go through the framework, and lose its type."""
    return getattr(_place, "is_graph", False)


def to_host(tensor: Any) -> Any:
    """A host copy of a variable or tensor."""
    return np.array(keras.ops.convert_to_numpy(tensor))
