"""Memory that the job hands to TensorFlow is used again, but never while a tensor or a variable may be made of it."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from syncline.keras.on_tensorflow import ReusedMemory


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    copies, given = ReusedMemory(), [np.arange(6.0), np.ones((2, 3), np.float32)]
    first = copies.of(given)
    places = [each.ctypes.data for each in first]
    assert all(place % 64 == 0 for place in places)
    del first
    again = copies.of([given[0] + 1, given[1]])
    assert [each.ctypes.data for each in again] == places
    assert again[0].tolist() == [1, 2, 3, 4, 5, 6] and again[1].shape == (2, 3)


def test_a_reference_to_one_array_keeps_all_of_its_step() -> None:
    copies, given = ReusedMemory(), [np.arange(6.0), np.ones(3)]
    kept = copies.of(given)[0]
    later = [copies.of([given[0] + n, given[1]]) for n in range(1, 7)]
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
    assert [each[0][0] for each in later] == [1, 2, 3, 4, 5, 6]


def test_variables_and_tensors_of_a_graph_keep_their_numbers() -> None:
    """TensorFlow makes a variable of the memory itself where it can."""
    copies, source = ReusedMemory(), np.zeros(1 << 16, np.float32)
    variable = tf.Variable(tf.zeros(1 << 16))

    @tf.function
    def step() -> tf.Tensor:
        found = tf.numpy_function(lambda: copies.of([source])[0], [], tf.float32, stateful=True)
        found.set_shape([1 << 16])
        variable.assign(found)
        return found

    kept = []
    for number in range(12):
        source[:] = number
        tensor = step()
        kept.append(tensor if number % 3 == 0 else None)
        assert variable.numpy()[0] == number == variable.numpy()[-1]
    for number, tensor in enumerate(kept):
        assert tensor is None or (tensor.numpy() == number).all(), number
