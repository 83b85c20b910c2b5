"""Single samples put together to a batch, and taken out of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from syncline.data.source import Array, Batch, Sample
from syncline.errors import DataError


def stacked(samples: Sequence[Sample]) -> dict[str, Array]:
    """Values of equal shape become an array with one dimension more; text, bytes and all else an object array."""
    names = samples[0].keys()
    for sample in samples:
        if sample.keys() != names:
            odd = sorted(sample.keys() ^ names)[0]
            has, lacks = (samples[0], sample) if odd in names else (sample, samples[0])
            keys = [f" ({one['__key__']})" if "__key__" in one else "" for one in (has, lacks)]
            raise DataError(
                f"some samples of a batch have '{odd}'{keys[0]} and some do not{keys[1]}; choose fields that all "
                "have with columns="
            )
    return {name: column([sample[name] for sample in samples]) for name in names}


def column(values: Sequence[Any]) -> Array:
    """One field of several samples."""
    numbers = (np.ndarray, np.generic, int, float, complex)
    if all(isinstance(value, numbers) for value in values) and len({np.shape(value) for value in values}) == 1:
        return np.stack([np.asarray(value) for value in values])
    objects = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        objects[number] = value
    return objects


def row(batch: Batch, number: int) -> Any:
    """One sample of a batch: a dict of values, or a tuple of them."""
    if isinstance(batch, dict):
        return {name: values[number] for name, values in batch.items()}
    return tuple(values[number] for values in batch)
