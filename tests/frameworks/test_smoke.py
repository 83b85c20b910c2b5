"""One small training with each framework that is installed here, as its users write it. `.ci/run` runs these."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from tests.patience import JOB_PATIENCE, PATIENT_TOML

#: Points of a plane, and on which side of a line they lie. The loss begins at 0.69.
DATA = """
import sys
import numpy as np
import syncline

job = syncline.init()
x = np.random.default_rng(0).normal(size=(256, 2)).astype(np.float32)
y = (x @ np.array([1.0, -2.0], np.float32) > 0).astype(np.int32)
"""

KERAS = f"""{DATA}
import keras
import syncline.keras

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, kernel_initializer="zeros")])
model.compile(
    optimizer=syncline.keras.DistributedOptimizer(keras.optimizers.Adam(0.05)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
data = syncline.keras.dataset((x, y), batch_size=16)
losses = model.fit(data, epochs=3, verbose=0, callbacks=[syncline.keras.Callback()]).history["loss"]
weights = np.concatenate([value.ravel() for value in model.get_weights()])
"""

JAX = f"""{DATA}
import jax, jax.numpy as jnp, optax
import syncline.jax

weights = jnp.zeros(2)
transform = syncline.jax.distribute(optax.adam(0.05))
weights, state = transform.latest(weights, transform.init(weights))

@jax.jit
def step(weights, state, x, y):
    def loss(weights):
        return optax.sigmoid_binary_cross_entropy(x @ weights, y).mean()
    value, gradients = jax.value_and_grad(loss)(weights)
    updates, state = transform.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, value

losses = []
for _ in range(40):
    weights, state, value = step(weights, state, x[job.rank :: 2], y[job.rank :: 2])
    losses.append(float(value))
weights, state = transform.latest(weights, state)
weights = np.asarray(weights)
"""

RESULT = """
loaded = [name for name in ("torch", "tensorflow", "jax", "keras") if name in sys.modules]
print("RESULT", losses[0], losses[-1], *weights.tolist(), ",".join(loaded))
job.close()
"""

SCRIPTS = {"keras": KERAS, "jax": JAX}
NEEDS = {"keras": ["keras"], "jax": ["optax"]}


def _cases() -> list[object]:
    """Where torch is installed too, JAX is left to the whole tests: CI's time is short."""
    found = [name for name in SCRIPTS if all(map(importlib.util.find_spec, NEEDS[name]))]
    is_mixed = importlib.util.find_spec("torch") is not None
    return [pytest.param(name, marks=() if is_mixed and name == "jax" else pytest.mark.smoke) for name in found]


@pytest.mark.parametrize("framework", _cases())
def test_two_workers_and_a_server_train_one_model(framework: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[framework] + RESULT)
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    command = [sys.executable, "-m", "syncline", "run", "-w", "2", "-s", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line.split() for line in re.findall(r"RESULT (.*)", done.stdout)]
    assert len(results) == 2, done.stdout
    losses, weights = ([[*map(float, result[part])] for result in results] for part in (slice(2), slice(2, -1)))
    assert all(0.5 < first < 0.75 and last < 0.35 for first, last in losses), done.stdout
    assert weights[0] == weights[1], "the workers ended with different models"
    loaded = {name for result in results for name in result[-1].split(",")}
    if framework == "keras":
        assert {os.environ["KERAS_BACKEND"], "keras"} <= loaded, "Keras has another backend than was asked for"
    else:  # Keras loads what else it finds; our own adapters must not
        assert loaded == {framework}
