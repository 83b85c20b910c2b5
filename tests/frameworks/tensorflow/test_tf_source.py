"""A tf.data.Dataset as a source: all workers must see one order."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import syncline
from syncline.tensorflow import dataset


def test_a_shuffle_without_a_seed_is_refused(job: object) -> None:
    """Each process would draw an order of its own: samples would come twice, and others never."""
    tf.random.set_seed(None)  # another test may have set one
    whole = tf.data.Dataset.from_tensor_slices(np.arange(64, dtype=np.float32))
    with pytest.raises(syncline.ConfigError, match=r"without a seed.*seed=1, reshuffle_each_iteration=False"):
        dataset(whole.shuffle(64, reshuffle_each_iteration=False), 8)
    for seed in (0, 1):
        dataset(whole.shuffle(64, seed=seed, reshuffle_each_iteration=False), 8)
    keras.utils.set_random_seed(0)  # also a seed of the whole process
    dataset(whole.shuffle(64, reshuffle_each_iteration=False), 8)
    with pytest.raises(syncline.ConfigError, match="in another order each time"):
        dataset(whole.shuffle(64, seed=1), 8)
