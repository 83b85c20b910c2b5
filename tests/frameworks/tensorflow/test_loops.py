"""Loops with tf.GradientTape in jobs of real processes, eagerly and inside tf.function."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.launch.conftest import Commands

from syncline import ConfigError
from syncline.tensorflow import DistributedGradientTape, DistributedOptimizer, dataset
from syncline.testing import local_job
from syncline.worker.current import current_in_thread

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
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
            if LEAVES and epoch == 1 and job.name == "worker-1":
                os.kill(os.getpid(), signal.SIGTERM)
            losses.append(float(train(images, labels)))
    weights = [np.asarray(each).ravel().tolist() for each in model.get_weights()]
    print(json.dumps({"name": job.name, "losses": losses, "weights": weights}), flush=True)
    job.close()
"""


def script(how: str, *, graph: bool, leaves: bool = False) -> str:
    return LOOP.replace("HOW", repr(how)).replace("GRAPH", str(graph)).replace("LEAVES", str(leaves))


def told(output: str) -> dict[str, Any]:
    return {each["name"]: each for each in map(json.loads, re.findall(r'\{"name": .*\}', output))}


def run(commands: Commands, how: str, *way: str, graph: bool) -> dict[str, Any]:
    result = commands.run("run", "-w", "2", *way, commands.script(script(how, graph=graph)))
    assert result.code == 0, result.output
    return told(result.output)


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
    found = run(commands, how, *way, graph=graph)
    one, other = found["worker-0"], found["worker-1"]
    assert one["weights"] == other["weights"] and len(one["losses"]) == 12
    for each, expected in zip(one["weights"], alone(), strict=True):
        np.testing.assert_allclose(each, expected.ravel(), atol=2e-6)


@pytest.mark.parametrize("policy", ["async", "bounded:1"])
def test_without_rounds_the_loss_falls(commands: Commands, policy: str) -> None:
    found = run(commands, "optimizer", "-s", "1", "--policy", policy, graph=True)
    losses = found["worker-0"]["losses"]
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])


#: Adam without a memory moves each number by its rate, against the sign of the gradient: `seen` counts.
COUNTED = """
    import json, os, pathlib, signal, time
    import keras, numpy as np, tensorflow as tf
    import syncline
    from syncline.tensorflow import DistributedOptimizer, dataset

    job, rate, num_samples = syncline.init(), 0.01, 128
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_samples, 8)).astype("float32")
    y = (x @ rng.normal(size=(8, 3))).argmax(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    seen = keras.Variable(np.zeros(num_samples, "float32"), name="seen")
    variables = [*model.trainable_variables, seen]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = DistributedOptimizer(keras.optimizers.Adam(rate, beta_1=0.0, beta_2=0.0))
    optimizer.build(variables)

    @tf.function(reduce_retracing=True)
    def train(x, y, numbers):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            whole = loss + tf.reduce_sum(tf.gather(seen.value, numbers))
        optimizer.apply_gradients(zip(tape.gradient(whole, variables), variables))
        return loss

    def wait_for(name):
        while job.name == "worker-0" and not pathlib.Path(name).exists():
            time.sleep(0.02)

    if job.life.number == 2:
        pathlib.Path("back").touch()
    arrays = (x, y, np.arange(num_samples))
    if TF_DATA:  # each worker reads the whole stream, and takes the samples that it has leased
        arrays = tf.data.Dataset.from_tensor_slices(arrays).shuffle(64, seed=1, reshuffle_each_iteration=False)
    losses, data = [], dataset(arrays, 16)
    for epoch in range(4):
        if epoch == 2:
            wait_for("back")
        for batch in data:
            if epoch == 1 and job.name == "worker-1" and job.life.number == 1:
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)  # this batch was read, and is in no step
            if epoch == 1:
                wait_for("killed")
            losses.append(float(train(*batch)))
    job.barrier("end")
    (counts,) = (-value / rate for name, value in job.kv.pull().items() if name.endswith("seen"))
    found = {"losses": losses, "counts": sorted({round(float(each), 2) for each in counts})}
    print(json.dumps({"name": job.name, "life": job.life.number, **found}), flush=True)
    job.close()
"""


@pytest.mark.parametrize(
    ("way", "tf_data"),
    [
        (("-s", "1"), True),
        (("-s", "1", "--policy", "bounded:1"), False),
        (("-s", "1", "--policy", "async"), True),
        (("--exchange", "ring"), False),
    ],
    ids=["sync, tf.data", "bounded", "async, tf.data", "ring"],
)
def test_a_killed_worker_comes_back(commands: Commands, way: tuple[str, ...], tf_data: bool) -> None:
    """All samples of all epochs count once, also those of the batch that the killed worker had read."""
    text = COUNTED.replace("TF_DATA", str(tf_data))
    result = commands.run("run", "-w", "2", *way, commands.script(text))
    assert result.code == 0 and "worker-1 was killed by SIGKILL" in result.output, result.output
    found = told(result.output)
    assert {name: (each["life"], each["counts"]) for name, each in found.items()} == {
        "worker-0": (1, [4.0]),
        "worker-1": (2, [4.0]),
    }, result.output
    losses = found["worker-0"]["losses"]
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])


def test_a_worker_that_leaves_inside_of_a_graph_ends_well(commands: Commands) -> None:
    """`syncline scale` and SIGTERM end the script by SystemExit, which TensorFlow must not turn into an error."""
    text = script("tape", graph=True, leaves=True)
    result = commands.run("run", "-w", "2", "-s", "1", commands.script(text))
    assert result.code == 0 and "the job has failed" not in result.output, result.output
    assert set(told(result.output)) == {"worker-0"}, result.output


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_tape_needs_rounds(commands: Commands, graph: bool) -> None:
    text = script("tape", graph=graph)
    result = commands.run("run", "-w", "2", "-s", "1", "--policy", "async", commands.script(text))
    assert result.code != 0 and "a mean gradient needs rounds of all workers" in result.output, result.output
    assert "Graph execution error" not in result.output, "TensorFlow has wrapped the error"


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_tape_takes_the_gradients_of_variables_only(graph: bool) -> None:
    """A gradient penalty takes those by its inputs. In a graph they were averaged over the workers' batches."""

    def penalty(x: Any) -> Any:
        with DistributedGradientTape() as tape:
            tape.watch(x)
            found = tf.reduce_sum(x**2)
        return tape.gradient(found, x)

    with (
        local_job(workers=1) as jobs,
        current_in_thread(jobs[0]),
        # AutoGraph raises an error of its own, which ends with the words of ours.
        pytest.raises(Exception if graph else ConfigError, match=r"takes variables.*Take it from a tf\.GradientTape"),
    ):
        (tf.function(penalty) if graph else penalty)(tf.ones((4, 2)))


def test_a_tape_without_the_first_values_of_the_chief_is_told(commands: Commands) -> None:
    """Its workers make the same steps, and may begin with different values."""
    text = script("tape", graph=False)
    without = text.replace("broadcast_variables(model.trainable_variables)", "pass")
    for each, is_told in ((text, False), (without, True)):
        result = commands.run("run", "-w", "2", "-s", "1", commands.script(each))
        assert result.code == 0 and ("have not called broadcast_variables" in result.output) == is_told, result.output


@pytest.mark.parametrize("more", [(), ("--tape",)], ids=["optimizer", "tape"])
def test_the_example_at_a_small_size(commands: Commands, more: tuple[str, ...]) -> None:
    words = [str(EXAMPLES / "tensorflow_loop.py"), "--epochs", "1", "--samples", "6000", *more]
    result = commands.run("run", "-w", "2", "-s", "1", *words)
    assert result.code == 0, result.output
    (accuracy,) = re.findall(r"test accuracy +([\d.]+)%", result.output)
    assert float(accuracy) > 60, result.output


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("policy", ["sync", "async"])
@pytest.mark.parametrize("turns", [False, True], ids=["together", "in turns"])
def test_two_optimizers_and_two_steps_on_each_batch(graph: bool, policy: str, turns: bool) -> None:
    """As a GAN has them: every step counts in full, and every batch once. `turns`: each batch is for one of them."""

    def trained(wrap: Any, batches: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        models = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]) for _ in range(2)]
        optimizers = [wrap(keras.optimizers.SGD(0.1)) for _ in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.build(model.trainable_variables)

        def step(x: Any, number: int) -> None:
            pairs = [*zip(models, optimizers, strict=True)]
            for model, optimizer in [pairs[number % 2]] if turns else [*pairs, pairs[1]]:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - 1.0) ** 2)
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        run = tf.function(step) if graph else step
        for number, (x,) in enumerate(batches):
            run(x, number % 2)
        return [variable.numpy() for model in models for variable in model.trainable_variables]

    x = np.random.default_rng(0).standard_normal((96, 2)).astype(np.float32)
    plain = trained(lambda optimizer: optimizer, [(tf.constant(x[k : k + 8]),) for k in range(0, 96, 8)])
    with local_job(workers=1, policy=policy) as jobs, current_in_thread(jobs[0]):
        shared = trained(DistributedOptimizer, dataset((x,), batch_size=8, shuffle=False))
        assert jobs[0].samples_taken == 96
    for one, other in zip(plain, shared, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
