"""Variables of a model or an optimizer: their names in the job, and their values."""

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
