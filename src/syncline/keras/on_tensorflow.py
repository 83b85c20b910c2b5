"""Keras on TensorFlow: steps run eagerly, or in a graph that calls out; XLA cannot call out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from syncline.keras.backends import Exchange, from_graph


def call_out(exchange: Exchange, tensors: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(array) for array in exchange([tensor.numpy() for tensor in given])]

    def call(*arrays: Any) -> list[Any]:
        # TensorFlow may keep the memory of a returned array, and the job overwrites its own.
        with from_graph():
            return [np.array(array) for array in exchange(list(arrays))]

    found = tf.numpy_function(call, given, [each.dtype for each in like], stateful=True)
    for tensor, each in zip(found, like, strict=True):
        tensor.set_shape(each.shape)
    return list(found)


def adopt(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Its variables have memory of their own."""


def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def is_in_xla() -> bool:
    if tf.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def is_traced() -> bool:
    return not tf.executing_eagerly()


def outside() -> Any:
    return tf.init_scope()


def dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient)  # of an embedding it is IndexedSlices


def batch(arrays: Any) -> Any:
    return keras.tree.map_structure(tf.convert_to_tensor, arrays)


def end_of_data() -> Any:
    # Keras reads a plain iterator with zip(), which would swallow a StopIteration and then miss its outputs.
    return tf.errors.OutOfRangeError(None, None, "the epoch has no more batches")


def has_extra_steps() -> bool:
    return False


def settle() -> None:
    """A step is done when its function returns."""
