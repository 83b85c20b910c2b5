"""One logistic regression, trained by a torch, a JAX and a NumPy worker on the same servers:
`syncline run -w 3 -s 1 examples/mixed_logistic.py`. With `--framework numpy` all workers use the same one.

The workers agree on names, shapes and the rule: torch's, by name. Each imports its own framework. (The launcher loads
torch once for all of them, since the script names it; with `preload = false` in syncline.toml only one worker does.)
"""

import argparse
import pathlib
import sys
from collections.abc import Callable

import numpy as np

import syncline
from syncline.data import fashion_mnist
from syncline.worker.job import Job

FRAMEWORKS = ("torch", "jax", "numpy")
RATE, MOMENTUM = 0.05, 0.9
Arrays = dict[str, np.ndarray]
Step = Callable[[np.ndarray, np.ndarray, float], Arrays]  # a batch and its weight in, the new parameters out


def with_torch(job: Job, first: Arrays) -> Step:
    import torch

    from syncline.torch import DistributedOptimizer

    model = torch.nn.Linear(784, 10)
    model.load_state_dict({name: torch.tensor(value) for name, value in first.items()})
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM), model=model)

    def step(x: np.ndarray, y: np.ndarray, weight: float) -> Arrays:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        opt.step(weight=weight)
        return {name: value.detach().numpy() for name, value in model.named_parameters()}

    return step


def with_jax(job: Job, first: Arrays) -> Step:
    import jax
    import optax

    from syncline.jax import distribute

    tx = distribute(syncline.Rule("SGD", lr=RATE, momentum=MOMENTUM))
    params, state = tx.latest(first, tx.init(first))

    def loss(params, x, y):
        scores = x @ params["weight"].T + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    @jax.jit
    def train(params, state, x, y, weight):
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    def step(x: np.ndarray, y: np.ndarray, weight: float) -> Arrays:
        nonlocal params, state
        params, state = train(params, state, x, y, weight)
        return params

    return step


def with_numpy(job: Job, first: Arrays) -> Step:
    params = job.kv.register(first, syncline.Rule("SGD", lr=RATE, momentum=MOMENTUM))

    def step(x: np.ndarray, y: np.ndarray, weight: float) -> Arrays:
        nonlocal params
        scores = x @ params["weight"].T + params["bias"]
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        params = job.kv.push_pull({"weight": p.T @ x / len(y), "bias": p.mean(0)}, weight=weight).wait()
        return params

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=96, help="of all workers together")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="of all workers; default: one of each in turn")
    parser.add_argument("--out", type=pathlib.Path, help="where the chief writes the parameters")
    args = parser.parse_args()

    job = syncline.init()
    mine = args.framework or FRAMEWORKS[job.rank % len(FRAMEWORKS)]
    first = {"weight": np.zeros((10, 784), np.float32), "bias": np.zeros(10, np.float32)}
    step = {"torch": with_torch, "jax": with_jax, "numpy": with_numpy}[mine](job, first)
    images, labels = fashion_mnist(train=True)
    params: Arrays = first
    for number in job.steps(args.steps):
        begin = number * args.batch_size % len(labels)
        some = slice(begin + job.rank, begin + args.batch_size, job.world_size)
        x, y = images[some].reshape(-1, 784).astype(np.float32) / 255, labels[some].astype(np.int64)
        params = step(x, y, len(y) * job.world_size / args.batch_size)  # 1, or less for a smaller part

    if job.is_chief and args.out:
        np.savez(args.out, **{name: np.asarray(value) for name, value in params.items()})
    images, labels = fashion_mnist(train=False)
    scores = images.reshape(-1, 784).astype(np.float32) / 255 @ np.asarray(params["weight"]).T + np.asarray(
        params["bias"]
    )
    loaded = [name for name in ("torch", "jax") if name in sys.modules]
    print(f"{job.name} with {mine}, {loaded} loaded: test accuracy {(scores.argmax(1) == labels).mean():.2%}")
    job.close()


if __name__ == "__main__":
    main()
