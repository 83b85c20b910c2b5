"""A classifier of Iris flowers with Keras, on many processes: `syncline run -w 2 examples/keras_iris.py`."""

import argparse

import keras
import numpy as np

import syncline.keras
from syncline.data.iris import iris

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=60)
args = parser.parse_args()

syncline.init()
keras.utils.set_random_seed(0)
flowers = iris().read(np.random.default_rng(0).permutation(150))
y = flowers.pop("species")
x = np.stack(list(flowers.values()), axis=1).astype("float32")

model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3, activation="softmax")]
)
model.compile(
    optimizer=syncline.keras.DistributedOptimizer(keras.optimizers.Adam(1e-2)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
data = syncline.keras.dataset((x[:120], y[:120]), batch_size=8, shuffle=True)
model.fit(data, epochs=args.epochs, verbose=0, callbacks=[syncline.keras.Callback()])
print(f"test accuracy  {model.evaluate(x[120:], y[120:], verbose=0)[1]:.2%}")
