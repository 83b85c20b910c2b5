"""LeNet on Fashion-MNIST in JAX, in one process or in many: `syncline run -w 2 -s 1 examples/jax_lenet.py`."""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncline
from syncline.data import ArraySource, batches, fashion_mnist
from syncline.jax import distribute

SHAPES = {"conv1": (5, 5, 1, 6), "conv2": (5, 5, 6, 16), "fc1": (256, 120), "fc2": (120, 84), "fc3": (84, 10)}


def lenet(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """44,426 parameters."""
    init = jax.nn.initializers.glorot_uniform()
    keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
    return {name: {"w": init(keys[name], shape), "b": jnp.zeros(shape[-1])} for name, shape in SHAPES.items()}


def pool(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))


def logits(params: dict[str, dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    x = images[..., None].astype(jnp.float32) / 255
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(
            x, params[name]["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = pool(jax.nn.relu(x + params[name]["b"]))
    x = x.reshape(len(x), -1)
    for name in ("fc1", "fc2"):
        x = jax.nn.relu(x @ params[name]["w"] + params[name]["b"])
    return x @ params["fc3"]["w"] + params["fc3"]["b"]


def accuracy(params: dict[str, dict[str, jax.Array]]) -> float:
    images, labels = fashion_mnist(train=False)
    answers = [jax.jit(logits)(params, images[i : i + 1000]).argmax(1) for i in range(0, len(images), 1000)]
    return float((np.concatenate(answers) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rule", action="store_true", help="Adam runs on the servers, not on the workers")
    parser.add_argument("--samples", type=int, default=60_000, help="of the training set")
    parser.add_argument("--out", type=pathlib.Path, help="model file; default: model.npz in the job's folder")
    args = parser.parse_args()

    job = syncline.init()
    params = lenet(jax.random.key(args.seed))
    tx = distribute(syncline.Rule("Adam", lr=args.lr) if args.rule else optax.adam(args.lr))
    state = tx.init(params)
    params, state = tx.latest(params, state)  # of the job: the chief's, or newer ones

    @jax.jit
    def step(params, state, images, labels):
        loss = lambda p: optax.softmax_cross_entropy_with_integer_labels(logits(p, images), labels).mean()  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    images, labels = fashion_mnist(train=True)
    source = ArraySource((images[: args.samples], labels[: args.samples]))
    for _ in range(args.epochs):
        for x, y in batches(source, args.batch_size, shuffle=True, seed=args.seed):
            params, state = step(params, state, x, y)
        params, state = tx.latest(params, state)  # also the steps that others made without this worker

    job.barrier("trained")  # from here on no worker pushes
    params, state = tx.latest(params, state)
    if job.is_chief:
        out = args.out or job.folder / "model.npz"
        out.parent.mkdir(parents=True, exist_ok=True)
        np.savez(out, **{f"{layer}.{name}": value for layer, some in params.items() for name, value in some.items()})
        stats = job.stats()
        print(f"policy         {job.config.policy}")
        print(f"workers        {job.config.workers}")
        print(f"seconds        {stats.seconds:.1f}")
        print(f"samples/s      {stats.samples_per_second:,.0f}")
        print(f"test accuracy  {accuracy(params):.2%}")
        print(f"model          {out}")
    job.close()


if __name__ == "__main__":
    main()
