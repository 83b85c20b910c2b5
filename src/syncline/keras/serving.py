"""A Keras model as `syncline serve` takes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from syncline.keras.buffers import buffers_of
from syncline.keras.variables import names_of
from syncline.store.weights import check_shapes


class KerasModel:
    """What the function in a file for `syncline serve` returns: `return syncline.keras.KerasModel(model)`."""

    def __init__(self, model: Any) -> None:
        """`model`: built, with the same layers as the one that was trained."""
        self.model = model

    def load(self, weights: Mapping[str, Any]) -> None:
        """Sets the model's variables. StoreError: the weights are those of other layers."""
        trained, buffers = list(self.model.trainable_variables), buffers_of(self.model)
        own = dict(zip(names_of(trained), trained, strict=True)) | dict(zip(names_of(buffers), buffers, strict=True))
        given = dict(zip(unnumbered(weights), weights.values(), strict=True))
        wanted = dict(zip(unnumbered(own), own.values(), strict=True))
        check_shapes(
            {name: array.shape for name, array in given.items()},
            {name: tuple(variable.shape) for name, variable in wanted.items()},
            needed=set(list(wanted)[: len(trained)]),
            model="model",
        )
        for name, array in given.items():
            wanted[name].assign(np.array(array))  # a backend may go on using the array that it is given

    def __call__(self, *inputs: Any) -> Any:
        found = self.model(inputs[0] if len(inputs) == 1 else list(inputs), training=False)
        return keras.tree.map_structure(keras.ops.convert_to_numpy, found)


def unnumbered(names: Iterable[str]) -> list[str]:
    """The names with counters that begin at 0. Keras counts the layers of a process on: the first model that it makes
    has `dense` and `dense_1`, and an equal one `dense_2` and `dense_3`.
    """
    split = [[_counted(part) for part in name.split("/")] for name in names]
    counters: dict[str, set[int]] = {}
    for parts in split:
        for base, number in parts:
            counters.setdefault(base, set()).add(number)
    ranks = {base: {number: rank for rank, number in enumerate(sorted(found))} for base, found in counters.items()}
    return ["/".join(f"{base}_{ranks[base][number]}" for base, number in parts) for parts in split]


def _counted(part: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.+?)_(\d{1,9})", part)
    return (found[1], int(found[2])) if found else (part, 0)
