"""Variables of a model that are not trained and hold numbers, such as BatchNorm's statistics: its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from syncline.keras.backends import to_host
from syncline.keras.variables import names_of, value_of
from syncline.worker.host_optimizer import HostOptimizer


def buffers_of(model: Any) -> list[Any]:
    """The buffers of a model; the states of chance, which are whole numbers, are none."""
    return [v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]


def values_of_buffers(model: Any, values: Sequence[Any]) -> list[Any]:
    """Those of `buffers_of(model)`, from the values of all its variables that are not trained."""
    pairs = zip(model.non_trainable_variables, values, strict=True)
    return [value for variable, value in pairs if keras.backend.is_float_dtype(variable.dtype)]


class SharedBuffers:
    """The buffers of one model, which travel with its steps."""

    def __init__(self) -> None:
        self._variables: dict[str, Any] = {}
        self._host: HostOptimizer | None = None
        self._noted: dict[str, Any] | None = None  # of a step that cannot see them itself

    def register(self, host: HostOptimizer, variables: Sequence[Any], mode: str) -> bool:
        """Once: the variables get the chief's values. Returns whether it did."""
        if self._variables or not variables:
            return False
        self._host, self._variables = host, dict(zip(names_of(variables), variables, strict=True))
        host.add_buffers({name: to_host(variable) for name, variable in self._variables.items()}, mode)
        self.take()
        return True

    def values(self) -> list[Any]:
        """For a step that can see them; Keras on JAX hands them over later."""
        if keras.backend.backend() == "jax":
            return []
        return [value_of(variable) for variable in self._variables.values()]

    def named(self, arrays: Sequence[Any]) -> dict[str, Any] | None:
        """What a step pushes: `arrays` are those of `values()`."""
        if not self._variables:
            return None
        return dict(zip(self._variables, arrays, strict=True)) if arrays else self._noted

    def note(self, values: Sequence[Any], *, is_chief: bool) -> None:
        """For the next push, from a step that cannot see them."""
        if self._host is not None and (self._host.buffer_mode == "mean" or is_chief):
            self._noted = dict(zip(self._variables, map(np.asarray, values), strict=True))

    def take(self) -> None:
        """The job's values into the model."""
        given = self._host.buffer_values if self._host is not None else {}
        for name, variable in self._variables.items():
            if name in given:
                variable.assign(given[name])
