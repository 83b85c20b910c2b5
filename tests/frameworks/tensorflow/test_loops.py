"""Loops with tf.GradientTape in jobs of real processes, eagerly and inside tf.function."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from tests.launch.conftest import Commands

LOOP = """
    import json, os, signal
    import keras, numpy as np, tensorflow as tf
    import syncline
    from syncline.tensorflow import DistributedGradientTape, DistributedOptimizer, broadcast_variables, dataset

    job = syncline.init()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 8)).astype("float32")
    y = (x @ rng.normal(size=(8, 3))).argmax(1)
    keras.utils.set_random_seed(1 + job.rank)  # the chief's values count
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    is_tape = HOW == "tape"
    if is_tape:
        broadcast_variables(model.trainable_variables)
    else:
        optimizer = DistributedOptimizer(optimizer)
        optimizer.build(model.trainable_variables)

    def train(x, y):
        with DistributedGradientTape() if is_tape else tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    if GRAPH:
        train = tf.function(train, reduce_retracing=True)
    losses, data = [], dataset((x, y), 16)
    for epoch in range(3):
        for images, labels in data:
            if KILLS and epoch == 1 and job.name == "worker-1" and job.life.number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(float(train(images, labels)))
    weights = [np.asarray(each).ravel().tolist() for each in model.get_weights()]
    done = [[each.num_samples, each.num_done] for each in job.stats().epochs]
    found = {"losses": losses, "weights": weights, "life": job.life.number, "done": done}
    print(json.dumps({"name": job.name, **found}), flush=True)
    job.close()
"""


def run(commands: Commands, how: str, *way: str, graph: bool, kills: bool = False) -> tuple[dict[str, Any], str]:
    text = LOOP.replace("HOW", repr(how)).replace("GRAPH", str(graph)).replace("KILLS", str(kills))
    result = commands.run("run", "-w", "2", *way, commands.script(text))
    assert result.code == 0, result.output
    found = map(json.loads, re.findall(r'\{"name": .*\}', result.output))
    return {each["name"]: each for each in found}, result.output


def alone() -> list[Any]:
    import keras

    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 8)).astype("float32")
    y = (x @ rng.normal(size=(8, 3))).argmax(1)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss)
    model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0)
    found: list[Any] = model.get_weights()
    return found


@pytest.mark.parametrize(
    ("how", "way", "graph"),
    [
        ("tape", ("-s", "1"), True),
        ("tape", ("--exchange", "ring"), False),
        ("optimizer", ("-s", "1"), True),
        ("optimizer", ("--exchange", "ring"), False),
    ],
    ids=["tape, servers, graph", "tape, ring, eager", "optimizer, servers, graph", "optimizer, ring, eager"],
)
def test_the_parameters_are_those_of_one_process(
    commands: Commands, how: str, way: tuple[str, ...], graph: bool
) -> None:
    found, _ = run(commands, how, *way, graph=graph)
    one, other = found["worker-0"], found["worker-1"]
    assert one["weights"] == other["weights"] and len(one["losses"]) == 12
    for each, expected in zip(one["weights"], alone(), strict=True):
        np.testing.assert_allclose(each, expected.ravel(), atol=2e-6)


@pytest.mark.parametrize("policy", ["async", "bounded:1"])
def test_without_rounds_the_loss_falls(commands: Commands, policy: str) -> None:
    found, _ = run(commands, "optimizer", "-s", "1", "--policy", policy, graph=True)
    losses = found["worker-0"]["losses"]
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])


def test_a_killed_worker_comes_back(commands: Commands) -> None:
    found, output = run(commands, "optimizer", "-s", "1", graph=True, kills=True)
    assert "worker-1 was killed by SIGKILL" in output and found["worker-1"]["life"] == 2
    assert all(each == [128, 128] for each in found["worker-0"]["done"]), "each sample of the last epoch counts once"


def test_a_tape_needs_rounds(commands: Commands) -> None:
    text = LOOP.replace("HOW", '"tape"').replace("GRAPH", "False").replace("KILLS", "False")
    result = commands.run("run", "-w", "2", "-s", "1", "--policy", "async", commands.script(text))
    assert result.code != 0 and "a mean gradient needs rounds of all workers" in result.output, result.output
