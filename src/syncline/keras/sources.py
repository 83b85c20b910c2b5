"""What a script may give to `dataset()`, as a source of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from syncline.data.arrays import ArraySource
from syncline.data.source import ShardSource, Source
from syncline.errors import ConfigError
from syncline.keras.tf_source import TfSource, is_tf_dataset


def source_of(given: Any, *, shuffle: bool) -> tuple[Source, Any]:
    """The source, and the structure of a batch if it is not a plain tuple of arrays."""
    structure = None
    if isinstance(given, tuple | list) and any(map(_has_parts, given)):
        structure = keras.tree.map_structure(lambda _: 0, tuple(given))
        given = tuple(keras.tree.flatten(tuple(given)))
    return _single(given, shuffle), structure


def _has_parts(arrays: Any) -> bool:
    """Whether these are several inputs, as Keras takes them: a dict, or a tuple or list of arrays."""
    if isinstance(arrays, Mapping):
        return True
    is_several = isinstance(arrays, tuple | list) and len(arrays) > 0
    return is_several and all(len(getattr(array, "shape", ())) > 0 for array in arrays)


def _single(source: Any, shuffle: bool) -> Source:
    if is_tf_dataset(source):
        if shuffle:
            raise ConfigError(
                "dataset(): a tf.data.Dataset is read in its own order; shuffle it itself, equally in all workers: "
                "tf_dataset.shuffle(n, seed=1, reshuffle_each_iteration=False)"
            )
        return TfSource(source)
    if isinstance(source, ShardSource):
        raise ConfigError(
            "dataset(): shards have no number of samples, which Keras' epochs need; give arrays or a source with a "
            "length"
        )
    if isinstance(source, Source):
        return source
    if isinstance(source, Mapping):
        raise ConfigError(
            f"dataset(): a dict ({', '.join(map(str, source))}) does not say what the labels are; give a tuple (x, y)"
        )
    if isinstance(source, np.ndarray) or (isinstance(source, Sequence) and not isinstance(source, str)):
        arrays = (source,) if isinstance(source, np.ndarray) else tuple(_host(each) for each in source)
        return ArraySource(arrays)
    raise ConfigError(
        f"dataset(): {type(source).__name__} cannot be split over workers; give arrays as (x, y), a source of "
        "syncline.data, or a tf.data.Dataset"
    )


def _host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else keras.ops.convert_to_numpy(array)
