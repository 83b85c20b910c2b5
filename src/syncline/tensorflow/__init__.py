"""Syncline for TensorFlow below Keras: loops of your own with tf.GradientTape."""

# Layout: tape (mean gradients of all workers, and their first values). The optimizer and the data sets are those of
# syncline.keras on its backend TensorFlow.

from syncline.keras.versions import check_versions

check_versions("tensorflow", "keras")

import keras  # noqa: E402  # an old TensorFlow is named before it fails to import

from syncline.errors import ConfigError  # noqa: E402
from syncline.keras.data import dataset  # noqa: E402
from syncline.keras.optimizer import DistributedOptimizer  # noqa: E402
from syncline.tensorflow.tape import DistributedGradientTape, broadcast_variables  # noqa: E402

if keras.backend.backend() != "tensorflow":
    raise ConfigError(
        f"syncline.tensorflow: Keras runs on {keras.backend.backend()!r} here; set KERAS_BACKEND=tensorflow before "
        "keras is imported, or use syncline.keras"
    )

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "broadcast_variables", "dataset"]
