"""Variables of a model or an optimizer: their names in the job, their values, and those that are not trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import xxhash


def names_of(variables: Sequence[Any]) -> list[str]:
    """Unique names: Keras' paths, numbered where two are equal."""
    found: dict[str, int] = {}
    names = []
    for variable in variables:
        path = str(getattr(variable, "path", variable.name)).replace(":0", "")
        found[path] = found.get(path, 0) + 1
        names.append(path if found[path] == 1 else f"{path}#{found[path]}")
    return names


def value_of(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def digest_of(arrays: Iterable[Any]) -> bytes:
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def buffers_of(model: Any) -> list[Any]:
    """Variables that are not trained and hold numbers, such as BatchNorm's statistics; not the states of chance."""
    return [v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]


def values_of_buffers(model: Any, values: Sequence[Any]) -> list[Any]:
    """Those of `buffers_of(model)`, from the values of all its variables that are not trained."""
    pairs = zip(model.non_trainable_variables, values, strict=True)
    return [value for variable, value in pairs if keras.backend.is_float_dtype(variable.dtype)]
