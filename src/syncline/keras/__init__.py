"""Syncline for Keras 3, on its backends torch, TensorFlow and JAX."""

# Layout, in reading order.
#
# optimizer                             DistributedOptimizer: a Keras optimizer whose rule runs on the servers
# steps, rules, variables               its steps in the job; Keras' optimizers as rules; variables by name
# wrapped, buffers, xla                 the optimizer that it wraps; a model's buffers; steps that XLA compiles
# backends                              how a step calls out of eager code, a graph or a compiled function
# on_torch, on_tensorflow, on_jax       the same for each backend
# callback                              Callback: initial values, merged metrics, stop rules, restarts
# metrics, saving                       merged before any callback sees them; a model's files, which the chief writes
# data, passes                          dataset(): leased batches for `fit`, by epochs
# sources, tf_source                    what dataset() takes; a tf.data.Dataset as a source
# serving                               KerasModel: a model for `syncline serve`
# versions                              the lowest that work

from syncline.keras.versions import check_versions, import_keras

check_versions()
import_keras()

from syncline.keras.callback import Callback  # noqa: E402  # what is old or missing is named first
from syncline.keras.data import dataset  # noqa: E402
from syncline.keras.optimizer import DistributedOptimizer  # noqa: E402
from syncline.keras.serving import KerasModel  # noqa: E402

__all__ = ["Callback", "DistributedOptimizer", "KerasModel", "dataset"]
