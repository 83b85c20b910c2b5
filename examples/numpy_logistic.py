"""Logistic regression on `job.kv` alone, without a framework: `syncline run -w 2 -s 1 examples/numpy_logistic.py`."""

import argparse

import numpy as np

import syncline
from syncline.data import ArraySource, batches, fashion_mnist

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--samples", type=int, default=60_000, help="of the training set")
args = parser.parse_args()

job = syncline.init()
first = {"w": np.zeros((784, 10), np.float32), "b": np.zeros(10, np.float32)}
params = job.kv.register(first, syncline.Rule("SGD", lr=args.lr, momentum=0.9))

images, labels = fashion_mnist(train=True)
images = images[: args.samples].reshape(-1, 784) / np.float32(255)
source = ArraySource((images, labels[: args.samples]))
for _ in range(args.epochs):
    for x, y in batches(source, args.batch_size, shuffle=True):
        scores = x @ params["w"] + params["b"]
        p = np.exp(scores - np.logaddexp.reduce(scores, 1, keepdims=True))
        p[np.arange(len(y)), y] -= 1  # the gradient of the cross entropy, by score
        grads = {"w": x.T @ p / len(y), "b": p.mean(0)}
        params = job.kv.push_pull(grads, weight=len(y) / args.batch_size).wait()  # a short batch counts less

job.barrier("trained")
params = job.kv.pull()
if job.is_chief:
    images, labels = fashion_mnist(train=False)
    right = (images.reshape(-1, 784) / np.float32(255) @ params["w"] + params["b"]).argmax(1) == labels
    print(f"test accuracy  {right.mean():.2%}")
job.close()
