"""JAX workers as processes, with compiled steps: they train as one process does, and a killed one comes back."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest

#: Which samples were in steps is counted in `seen`: its gradient is positive there, and each step adds 1.
TRAIN = """
    import os, pathlib, signal, sys, time
    import jax, jax.numpy as jnp, numpy as np, optax
    import syncline, syncline.jax
    from syncline.data import ArraySource, batches

    victim, num_samples, rate = sys.argv[1], 230, 0.05
    job = syncline.init()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_samples, 4)).astype(np.float32)
    y = (x @ np.array([1, -2, 0.5, 1], np.float32) > 0).astype(np.float32)
    source = ArraySource((x, y, np.arange(num_samples)))
    params = {"w": jnp.zeros(4), "seen": jnp.zeros(num_samples)}
    inner = optax.sgd(rate, momentum=0.9)

    def update(gradients, state, params=None):
        change, state = inner.update(gradients["w"], state)
        return {"w": change, "seen": jnp.sign(gradients["seen"])}, state

    tx = syncline.jax.distribute(optax.GradientTransformation(lambda params: inner.init(params["w"]), update))
    state = tx.init(params)
    params, state = tx.latest(params, state)

    def loss(params, x, y):
        return optax.sigmoid_binary_cross_entropy(x @ params["w"], y).mean()

    @jax.jit
    def step(params, state, x, y, numbers):
        gradients = jax.grad(lambda p: loss(p, x, y) + p["seen"][numbers].mean())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    if job.name == victim and job.life.number == 2:
        pathlib.Path("back").touch()
    for epoch in range(4):
        while epoch == 2 and victim and job.name != victim and not pathlib.Path("back").exists():
            time.sleep(0.02)
        for number, batch in enumerate(batches(source, 8, shuffle=True)):
            params, state = step(params, state, *batch)
            if job.name == victim and job.life.number == 1 and epoch == 1 and number == 6:
                os.kill(os.getpid(), signal.SIGKILL)  # the step's commit may be under way
        params, state = tx.latest(params, state)
    job.barrier("end")
    params, state = tx.latest(params, state)
    counts = ",".join(sorted({f"{count:g}" for count in params["seen"].tolist()}))
    print(f"RESULT {job.name} {job.life.number} {float(loss(params, x, y)):.4f} {counts}", flush=True)
    job.close()
"""


def results(output: str) -> list[list[str]]:
    return [line.split("RESULT ")[1].split() for line in output.splitlines() if "RESULT " in line]


@pytest.mark.parametrize(
    "options",
    [("-s", "2"), ("-s", "1", "--policy", "bounded:2"), ("-s", "1", "--policy", "async"), ("--exchange", "ring")],
)
def test_the_loss_falls_as_in_one_process_and_a_killed_worker_comes_back(
    commands: Any, options: tuple[str, ...]
) -> None:
    """Worker 1 is killed in its second epoch, right after a step was dispatched. All samples of all epochs count
    once."""
    script = commands.script(TRAIN)
    alone = commands.finish(commands.start("", program=(script,)))
    assert alone.code == 0, alone.output
    ((_, _, reached, counts),) = results(alone.output)
    assert float(reached) < 0.35 and counts == "4", alone.output
    done = commands.run("run", "-w", "2", *options, script, "worker-1")
    assert done.code == 0, done.output
    found = sorted(results(done.output))
    assert [result[:2] for result in found] == [["worker-0", "1"], ["worker-1", "2"]], done.output
    for _, _, loss, counts in found:
        # In rounds there are half as many steps; otherwise the steps of both count in full.
        assert float(loss) < 0.45 and counts == "4", done.output
    assert found[0][2] == found[1][2], "the workers ended with different models"


EQUAL = """
    import sys
    import jax, jax.numpy as jnp, numpy as np, optax
    import syncline, syncline.jax

    job = syncline.init()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 5)).astype(np.float32), rng.normal(size=(200, 1)).astype(np.float32)

    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["a"]["kernel"] + params["a"]["bias"]) @ params["b"] - y) ** 2)

    transforms = {
        "sgd": optax.sgd(0.1, momentum=0.9),
        "adam": optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(optax.cosine_decay_schedule(0.05, 20))),
        "rule": syncline.Rule("SGD", lr=0.1, momentum=0.9),
    }
    for name, transform in transforms.items():
        first = np.random.default_rng(1 + job.rank)  # what a worker begins with itself does not count
        params = {
            "a": {"kernel": jnp.asarray(first.normal(size=(5, 6)), jnp.float32), "bias": jnp.zeros(6)},
            "b": jnp.asarray(first.normal(size=(6, 1)), jnp.float32),
        }
        tx = syncline.jax.distribute(transform)
        state = tx.init(params)
        params, state = tx.latest(params, state)

        @jax.jit
        def step(params, state, x, y):
            gradients = jax.grad(loss)(params, x, y)
            updates, state = tx.update(gradients, state, params, weight=len(y))
            return optax.apply_updates(params, updates), state

        for number in job.steps(20):
            begin = number * 10
            mine = {1: [(0, 10)], 2: [(0, 3), (3, 10)]}[job.world_size][job.rank]  # unequal parts of a global batch
            some = slice(begin + mine[0], begin + mine[1])
            params, state = step(params, state, x[some], y[some])
        if job.is_chief:
            leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
            np.savez(f"{sys.argv[1]}-{name}.npz", **leaves)
    job.close()
"""


@pytest.mark.parametrize("options", [("-s", "2"), ("--exchange", "ring")])
def test_in_sync_parameters_equal_those_of_one_process_on_the_global_batch(
    commands: Any, options: tuple[str, ...]
) -> None:
    script = commands.script(EQUAL)
    alone = commands.finish(commands.start("alone", program=(script,)))
    assert alone.code == 0, alone.output
    done = commands.run("run", "-w", "2", *options, script, "job")
    assert done.code == 0, done.output
    for name in ("sgd", "adam", "rule"):
        with (
            np.load(commands.folder / f"alone-{name}.npz") as one,
            np.load(commands.folder / f"job-{name}.npz") as two,
        ):
            assert len(one.files) == 3
            for key in one.files:
                np.testing.assert_allclose(two[key], one[key], rtol=2e-4, atol=2e-5, err_msg=f"{name} {key}")
    with np.load(commands.folder / "job-sgd.npz") as sgd, np.load(commands.folder / "job-rule.npz") as rule:
        for key in sgd.files:  # the same optimizer on workers and on servers
            np.testing.assert_allclose(sgd[key], rule[key], rtol=2e-4, atol=2e-5, err_msg=key)


def test_lenet_learns_with_two_workers(commands: Any) -> None:
    example = str(pathlib.Path(__file__).parents[3] / "examples/jax_lenet.py")
    done = commands.run("run", "-w", "2", "-s", "1", example, "--epochs", "1", "--samples", "6000")
    assert done.code == 0, done.output
    (accuracy,) = re.findall(r"test accuracy +([\d.]+)%", done.output)
    assert float(accuracy) > 62, done.output
    with np.load(next(commands.folder.glob("runs/*/model.npz"))) as model:
        assert sum(array.size for array in model.values()) == 44_426
