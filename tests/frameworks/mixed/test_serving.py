"""What Keras and JAX have trained in a job is served: by the names that their adapters register."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from tests.patience import JOB_PATIENCE
from tests.serve.saved import Caller
from tests.serve.test_command import serving

from syncline.errors import StoreError
from syncline.serve import Server

pytest.importorskip("uvicorn")
ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
KERAS_MODEL = """
    import keras
    from keras import layers
    import syncline.keras

    def made():
        return keras.Sequential([
            keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.BatchNormalization(), layers.Dense(2),
            layers.Dense(2),
        ])

    def Net():
        return syncline.keras.KerasModel(made())

    example = __import__("numpy").zeros((1, 4), "float32")
"""
KERAS_TRAIN = """
    import numpy as np, syncline, keras
    from model import made
    syncline.init()
    made()  # the counters of the trained model do not begin at 0
    model = made()
    model.compile(syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    data = syncline.keras.dataset((x, x[:, :2]), batch_size=16)
    model.fit(data, epochs=2, verbose=0, callbacks=[syncline.keras.Callback()])
    np.save("offline.npy", model.predict(np.load("rows.npy"), verbose=0))
"""
JAX_MODEL = """
    import jax, jax.numpy as jnp, syncline.jax

    def apply(params, x):
        return {"scores": jnp.tanh(x @ params["one"]["w"]) @ params["two"], "sum": x.sum(1)}

    def params():
        return {"one": {"w": jnp.full((4, 6), 0.1)}, "two": jnp.full((6, 2), 0.2)}

    def Net():
        return syncline.jax.JaxModel(apply, params())

    example = jnp.zeros((1, 4))
"""
JAX_TRAIN = """
    import jax, numpy as np, optax, syncline
    from model import apply, params
    from syncline.jax import distribute
    job = syncline.init()
    params = params()
    tx = distribute(syncline.Rule("SGD", lr=0.1))
    state = tx.init(params)
    params, state = tx.latest(params, state)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    for _ in range(4):
        gradients = jax.grad(lambda p: ((apply(p, x)["scores"] - x[:, :2]) ** 2).mean())(params)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    np.save("offline.npy", apply(params, np.load("rows.npy"))["scores"])
"""


def trained(folder: pathlib.Path, model: str, train: str) -> np.ndarray:
    """Runs a job that saves at its end; returns what its model answers."""
    (folder / "model.py").write_text(textwrap.dedent(model))
    (folder / "train.py").write_text(textwrap.dedent(train))
    np.save(folder / "rows.npy", ROWS)
    words = ["run", "-w", "1", "-s", "1", "--page", "off", "--checkpoint", "saves", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "syncline", *words], cwd=folder, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: np.ndarray = np.load(folder / "offline.npy")
    return found


def answers(url: str, output: str) -> list[np.ndarray]:
    """Of single rows and of batches of several sizes."""
    found = []
    with Caller(url) as call:
        for begin, end in ((0, 1), (1, 3), (0, 3)):
            status, answer = call.post("/predict", {"inputs": ROWS[begin:end].tolist()})
            assert status == 200, answer
            found.append(np.array(answer["outputs"][output] if output else answer["outputs"]))
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_keras(tmp_path: pathlib.Path, replicas: int) -> None:
    offline = trained(tmp_path, KERAS_MODEL, KERAS_TRAIN)
    with serving(tmp_path, "--from", "saves", "--replicas", str(replicas)) as (_, url):
        for found, wanted in zip(answers(url, ""), (offline[:1], offline[1:], offline), strict=True):
            assert np.allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_jax(tmp_path: pathlib.Path, replicas: int) -> None:
    offline = trained(tmp_path, JAX_MODEL, JAX_TRAIN)
    with serving(tmp_path, "--from", "saves", "--replicas", str(replicas)) as (_, url):
        for found, wanted in zip(answers(url, "scores"), (offline[:1], offline[1:], offline), strict=True):
            assert np.allclose(found, wanted, rtol=0, atol=1e-5)


def test_weights_of_another_model_are_refused(tmp_path: pathlib.Path) -> None:
    trained(tmp_path, JAX_MODEL, JAX_TRAIN)
    for old, new, words in (
        ('"two": jnp.full((6, 2), 0.2)', '"two": jnp.full((5, 2), 0.2)', r"'two' has shape \[6, 2\]"),
        ('"two": jnp.full((6, 2), 0.2)', '"three": jnp.full((6, 2), 0.2)', "the checkpoint has no 'three'"),
    ):
        (tmp_path / "other.py").write_text(textwrap.dedent(JAX_MODEL.replace(old, new)))
        with pytest.raises(StoreError, match=words):
            Server(f"{tmp_path / 'other.py'}:Net", tmp_path / "saves", port=0, runs=str(tmp_path / "runs")).start()


def test_counters_of_keras_begin_at_0() -> None:
    """`dense_10` comes after `dense_9`; a layer whose own name has a number keeps its place."""
    from syncline.keras.serving import unnumbered

    first = [f"sequential/dense{'' if n == 0 else f'_{n}'}/kernel" for n in range(12)] + ["sequential/fc_7/bias"]
    later = [f"sequential_3/dense_{n}/kernel" for n in range(20, 32)] + ["sequential_3/fc_7/bias"]
    assert unnumbered(first) == unnumbered(later) and len(set(unnumbered(later))) == 13
