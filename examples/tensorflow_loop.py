"""A loop of your own with tf.GradientTape and tf.function: `syncline run -w 2 -s 1 examples/tensorflow_loop.py`.

`--tape`: the mean gradient of all workers, and an optimizer on each of them, in place of a rule on the servers.
"""

import argparse

import keras
import tensorflow as tf

import syncline
from syncline.data import fashion_mnist
from syncline.tensorflow import DistributedGradientTape, DistributedOptimizer, broadcast_variables, dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=60_000, help="of the training set")
parser.add_argument("--tape", action="store_true")
args = parser.parse_args()

job = syncline.init()
keras.utils.set_random_seed(0)
(x, y), (x_test, y_test) = fashion_mnist(train=True), fashion_mnist(train=False)
x, x_test = x.reshape(-1, 784).astype("float32") / 255, x_test.reshape(-1, 784).astype("float32") / 255
data = dataset((x[: args.samples], y[: args.samples]), batch_size=64, shuffle=True)

model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(1e-3)
if args.tape:
    broadcast_variables(model.trainable_variables)
else:
    optimizer = DistributedOptimizer(optimizer)
optimizer.build(model.trainable_variables)


@tf.function(reduce_retracing=True)
def train(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with DistributedGradientTape() if args.tape else tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(args.epochs):
    for images, labels in data:
        loss = train(images, labels)
    if job.is_chief:
        print(f"epoch {epoch + 1}: loss {float(loss):.3f}")

if job.is_chief:
    right = tf.argmax(model(x_test), axis=1).numpy() == y_test
    print(f"test accuracy  {right.mean():.2%}")
job.close()
