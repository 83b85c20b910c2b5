"""LeNet on Fashion-MNIST with Keras, on many processes: `syncline run -w 2 -s 1 examples/keras_lenet.py`."""

import argparse

import keras
from keras import layers

import syncline.keras
from syncline.data import fashion_mnist

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=60_000, help="of the training set")
args = parser.parse_args()

syncline.init()
keras.utils.set_random_seed(0)
(x, y), (x_test, y_test) = fashion_mnist(train=True), fashion_mnist(train=False)
x, x_test = x[..., None] / 255, x_test[..., None] / 255
x, y = x[: args.samples].astype("float32"), y[: args.samples]

model = keras.Sequential(  # 44,426 parameters
    [
        keras.Input((28, 28, 1)),
        layers.Conv2D(6, 5, activation="relu"),
        layers.AveragePooling2D(2),
        layers.Conv2D(16, 5, activation="relu"),
        layers.AveragePooling2D(2),
        layers.Flatten(),
        layers.Dense(120, activation="relu"),
        layers.Dense(84, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    optimizer=syncline.keras.DistributedOptimizer(keras.optimizers.Adam(2e-3)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
data = syncline.keras.dataset((x, y), batch_size=32, shuffle=True)
model.fit(data, epochs=args.epochs, verbose=2, callbacks=[syncline.keras.Callback()])
model.save("lenet.keras")
print(f"test accuracy  {model.evaluate(x_test, y_test, verbose=0)[1]:.2%}")
