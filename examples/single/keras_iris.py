"""A classifier of Iris flowers in one process, with plain Keras; examples/keras_iris.py is the same on many."""

import argparse

import keras
import numpy as np

from syncline.data.iris import iris

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=60)
args = parser.parse_args()

keras.utils.set_random_seed(0)
flowers = iris().read(np.random.default_rng(0).permutation(150))
y = flowers.pop("species")
x = np.stack(list(flowers.values()), axis=1).astype("float32")

model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3, activation="softmax")]
)
model.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(x[:120], y[:120], batch_size=8, epochs=args.epochs, verbose=0)
print(f"test accuracy  {model.evaluate(x[120:], y[120:], verbose=0)[1]:.2%}")
