"""An MLP with dropout on Fashion-MNIST or MNIST in one process; examples/keras_mnist_mlp.py is the same on many."""

import argparse

import keras
from keras import layers

from syncline.data import fashion_mnist, mnist

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", choices=["fashion-mnist", "mnist"], default="fashion-mnist")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--samples", type=int, default=60_000, help="of the training set")
args = parser.parse_args()

keras.utils.set_random_seed(0)
load = mnist if args.data == "mnist" else fashion_mnist
(x, y), (x_test, y_test) = load(train=True), load(train=False)
x, x_test = x.reshape(-1, 784).astype("float32") / 255, x_test.reshape(-1, 784).astype("float32") / 255
x, y = x[: args.samples], y[: args.samples]

model = keras.Sequential(
    [
        keras.Input((784,)),
        layers.Dense(512, activation="relu"),
        layers.Dropout(0.2),
        layers.Dense(512, activation="relu"),
        layers.Dropout(0.2),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras.optimizers.RMSprop(5e-4),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(x, y, batch_size=64, epochs=args.epochs, verbose=2)
print(f"test accuracy  {model.evaluate(x_test, y_test, verbose=0)[1]:.2%}")
