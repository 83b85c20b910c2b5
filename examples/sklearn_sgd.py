"""A scikit-learn model with `partial_fit`, by its changes: `syncline run -w 2 -s 1 examples/sklearn_sgd.py`.

Each worker fits its own batches. After each, the change of the model is pushed: the servers add up the workers'
changes (in `sync`: their mean), and the worker goes on from the sum.
"""

import argparse

import numpy as np
from sklearn.linear_model import SGDClassifier

import syncline
from syncline.data import ArraySource, batches, fashion_mnist

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=256, help="of each worker")
parser.add_argument("--samples", type=int, default=60_000, help="of the training set")
args = parser.parse_args()

job = syncline.init()
model = SGDClassifier(loss="log_loss", alpha=1e-4, learning_rate="constant", eta0=0.001, random_state=0)
classes = np.arange(10)
model.partial_fit(np.zeros((10, 784)), classes, classes)  # makes coef_ and intercept_
first = {"coef": np.zeros_like(model.coef_), "intercept": np.zeros_like(model.intercept_)}
params = job.kv.register(first, syncline.Rule("Add"))

images, labels = fashion_mnist(train=True)
source = ArraySource((images[: args.samples].reshape(-1, 784), labels[: args.samples]))
for _ in range(args.epochs):
    for x, y in batches(source, args.batch_size, shuffle=True):
        model.coef_, model.intercept_ = params["coef"].copy(), params["intercept"].copy()
        model.partial_fit(x / 255, y)
        change = {"coef": model.coef_ - params["coef"], "intercept": model.intercept_ - params["intercept"]}
        params = job.kv.push_pull(change, weight=len(y) / args.batch_size).wait()

job.barrier("trained")
params = job.kv.pull()
model.coef_, model.intercept_ = params["coef"], params["intercept"]
if job.is_chief:
    images, labels = fashion_mnist(train=False)
    print(f"test accuracy  {model.score(images.reshape(-1, 784) / 255, labels):.2%}")
job.close()
