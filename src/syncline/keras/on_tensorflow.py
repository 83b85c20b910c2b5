"""Keras on TensorFlow: steps run eagerly, or in a graph that calls out; XLA cannot call out."""

from __future__ import annotations

import sys
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

    copies = ReusedMemory()

    def call(*arrays: Any) -> list[Any]:
        with from_graph():
            return copies.of(exchange(list(arrays)))

    found = tf.numpy_function(call, given, [each.dtype for each in like], stateful=True)
    for tensor, each in zip(found, like, strict=True):
        tensor.set_shape(each.shape)
    return list(found)


#: References to an array that only we have, as `ReusedMemory.of` counts them; sets of copies that are kept.
_UNUSED, _MOST_KEPT = 3, 4


class ReusedMemory:
    """ReusedMemory for TensorFlow, which makes tensors and variables of the memory that it gets.

    Memory that TensorFlow has given back is used again: new memory in every step takes longer than the copies.
    """

    def __init__(self) -> None:
        self._kept: list[list[Any]] = []

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        for copies in self._kept:
            # TensorFlow holds a reference to what it uses. The others are its list, `copy` and the call.
            if all(sys.getrefcount(copy) == _UNUSED for copy in copies):
                break
        else:
            copies = [_aligned(array) for array in arrays]
            if len(self._kept) < _MOST_KEPT:
                self._kept.append(copies)
        for copy, array in zip(copies, arrays, strict=True):
            np.copyto(copy, array)
        return list(copies)


def _aligned(array: Any) -> Any:
    """Memory at a border of 64 bytes: TensorFlow copies any other."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)


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
