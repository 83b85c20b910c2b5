"""A worker of the rows about adapters: one MLP in the framework that the task names, with a job and without."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np

import syncline
from benchmarks.adapters import BATCH_SIZE
from benchmarks.task import Task, read_arguments
from benchmarks.turns import Player, Repeated, take_turns_less

RATE = 0.01
#: Steps with a job, and steps without.
Steps = tuple[Repeated, Repeated]


def _batch() -> tuple[Any, Any]:
    chance = np.random.default_rng(syncline.current_job().rank)
    x = chance.standard_normal((BATCH_SIZE, 784), dtype=np.float32)
    return x, chance.integers(10, size=BATCH_SIZE).astype(np.int32)


def torch_steps(task: Task) -> Steps:
    import torch
    from torch.nn import functional as F

    from benchmarks.models import mlp
    from syncline.torch import DistributedOptimizer

    torch.set_num_threads(task.num_threads)
    x, y = (torch.from_numpy(array) for array in _batch())
    y = y.long()

    def steps(is_shared: bool) -> Repeated:
        torch.manual_seed(0)
        model = mlp(*task.widths)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        if is_shared:
            optimizer = DistributedOptimizer(optimizer, model=model)

        def run(count: int) -> None:
            for _ in range(count):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    return steps(True), steps(False)


def jax_steps(task: Task) -> Steps:
    import jax
    import jax.numpy as jnp
    import optax

    import syncline.jax

    x, y = _batch()
    chance = np.random.default_rng(0)
    layers = [
        (jnp.asarray(chance.standard_normal(shape, dtype=np.float32) / shape[0] ** 0.5), jnp.zeros(shape[1]))
        for shape in itertools.pairwise(task.widths)
    ]

    def loss(layers: Any, x: Any, y: Any) -> Any:
        for weight, bias in layers[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        weight, bias = layers[-1]
        return optax.softmax_cross_entropy_with_integer_labels(x @ weight + bias, y).mean()

    def steps(is_shared: bool) -> Repeated:
        sgd = optax.sgd(RATE)
        shared = syncline.Rule("SGD", lr=RATE) if task.kind == "jax-rule" else sgd
        transform = syncline.jax.distribute(shared) if is_shared else sgd
        now = [layers, transform.init(layers)]

        def step(layers: Any, state: Any) -> Any:
            updates, state = transform.update(jax.grad(loss)(layers, x, y), state, layers)
            return optax.apply_updates(layers, updates), state

        compiled = jax.jit(step)

        def run(count: int) -> None:
            for _ in range(count):
                now[:] = compiled(*now)
            jax.block_until_ready(now)

        return run

    return steps(True), steps(False)


def keras_steps(task: Task) -> Steps:
    import keras

    import syncline.keras

    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(task.num_threads)
    x, y = _batch()

    def steps(is_shared: bool) -> Repeated:
        keras.utils.set_random_seed(0)
        *hidden, last = task.widths[1:]
        layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
        model = keras.Sequential([keras.Input((task.widths[0],)), *layers, keras.layers.Dense(last)])
        sgd = keras.optimizers.SGD(RATE)
        optimizer = syncline.keras.DistributedOptimizer(sgd) if is_shared else sgd
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

        def run(count: int) -> None:
            """Each call is an epoch of so many steps: what `fit` and the callback do once per epoch is small then."""
            callbacks = [syncline.keras.Callback()] if is_shared else []
            many = np.tile(x, (count, 1)), np.tile(y, count)
            model.fit(*many, batch_size=BATCH_SIZE, shuffle=False, verbose=0, callbacks=callbacks)

        return run

    return steps(True), steps(False)


STEPS = {"torch": torch_steps, "jax-rule": jax_steps, "jax-optax": jax_steps, "keras": keras_steps}


def main(arguments: list[str]) -> None:
    task, path = read_arguments(arguments)
    job = syncline.init()
    run, plain = STEPS[task.kind](task)
    plain(2)
    run(2)
    take_turns_less(path, Player(task.side, job.rank), run, plain)


if __name__ == "__main__":
    main(sys.argv[1:])
