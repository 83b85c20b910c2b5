"""`fit` of real Keras in jobs of real processes."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import numpy as np
import pytest
from tests.launch.conftest import Commands

BACKEND = os.environ["KERAS_BACKEND"]
#: 256 samples of 8 numbers in three classes, and a model that learns them.
SETUP = """
    import json, os, signal
    import keras, numpy as np
    import syncline
    import syncline.keras

    job = syncline.init()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype("float32")
    y = (x @ rng.normal(size=(8, 3))).argmax(1)
    keras.utils.set_random_seed(1)

    def model_of(optimizer, *layers, **options):
        model = keras.Sequential([
            keras.Input((8,)), keras.layers.Dense(16, activation="relu"), *layers, keras.layers.Dense(3)
        ])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
        return model

    def tell(**found):
        print(json.dumps({"name": job.name, **found}), flush=True)

    def numbers(history):
        return {name: [float(value) for value in values] for name, values in history.history.items()}
"""
FIT = """
    optimizer = syncline.keras.DistributedOptimizer(keras.optimizers.OPTIMIZER)
    model = model_of(optimizer, OPTIONS)
    history = model.fit(
        syncline.keras.dataset((x, y), 16), epochs=3, verbose=0, validation_data=(x, y),
        callbacks=[syncline.keras.Callback()],
    )
    weights = [np.asarray(each).ravel().tolist() for each in model.get_weights()]
    tell(history=numbers(history), weights=weights, step=job.step)
    job.close()
"""
WAYS = {
    "sync": ("-s", "1", "--policy", "sync"),
    "bounded": ("-s", "2", "--policy", "bounded:2"),
    "async": ("-s", "1", "--policy", "async"),
    "ring": ("--exchange", "ring"),
}


def told(output: str) -> dict[str, dict[str, Any]]:
    """What the workers have told, by their names."""
    lines = re.findall(r'\{"name": .*\}', output)
    return {found["name"]: found for found in map(json.loads, lines)}


def run(commands: Commands, text: str, *way: str, workers: int = 2) -> tuple[dict[str, dict[str, Any]], str]:
    script = commands.script(SETUP + text)
    result = commands.run("run", "-w", str(workers), *way, script)
    assert result.code == 0, result.output
    return told(result.output), result.output


def alone(optimizer: str) -> tuple[list[float], list[Any]]:
    """The same in plain Keras, on the global batch: losses by epoch, and weights at the end."""
    import keras

    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype("float32")
    y = (x @ rng.normal(size=(8, 3))).argmax(1)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=eval(f"keras.optimizers.{optimizer}"), loss=loss)
    history = model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_falls_as_in_one_process(commands: Commands, way: str) -> None:
    """In rounds (sync, ring) the parameters are those of one process on the global batch."""
    optimizer = "SGD(0.1, momentum=0.9)" if way in ("sync", "ring") else "SGD(0.1)"
    found, output = run(commands, FIT.replace("OPTIMIZER", optimizer).replace("OPTIONS", ""), *WAYS[way])
    losses, weights = alone(optimizer)
    one, other = found["worker-0"], found["worker-1"]
    assert one["history"] == other["history"], "all workers see the same metrics"
    assert one["history"]["val_loss"][-1] < one["history"]["val_loss"][0]
    assert one["history"]["loss"][-1] < 0.8 * one["history"]["loss"][0]
    if way in ("sync", "ring"):
        np.testing.assert_allclose(one["history"]["loss"], losses, rtol=1e-4)
        for each, expected in zip(one["weights"], weights, strict=True):
            np.testing.assert_allclose(each, expected.ravel(), atol=2e-6)
        assert one["weights"] == other["weights"] and one["step"] == 24
    else:
        assert one["history"]["loss"][-1] < 1.3 * losses[-1]
    assert "ran out of data" not in output


@pytest.mark.parametrize("options", ["run_eagerly=True", "jit_compile=True"])
@pytest.mark.parametrize("optimizer", ["Adam(0.01)", "Nadam(0.01)"])
def test_eager_and_compiled(commands: Commands, options: str, optimizer: str) -> None:
    """Where the step is compiled, the exchange stands inside of it or behind it; the rule runs here or there."""
    if BACKEND == "torch" and options.startswith("jit") and optimizer.startswith("Nadam"):
        pytest.skip("torch's compiler takes long, and once is enough")
    found, _ = run(commands, FIT.replace("OPTIMIZER", optimizer).replace("OPTIONS", options), "-s", "1")
    losses, _ = alone(optimizer)
    one, other = found["worker-0"], found["worker-1"]
    assert one["weights"] == other["weights"] and one["history"] == other["history"]
    # Nadam runs on each worker with its half of the batch, and the mean of two changes is not the change of the mean.
    np.testing.assert_allclose(one["history"]["loss"], losses, rtol=1e-4 if optimizer.startswith("Adam") else 0.1)


KILLED = """
    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch
            if job.life.number > 1:
                open("back", "w").close()

        def on_train_batch_end(self, batch, logs=None):
            if job.name == "worker-1" and job.life.number == 1 and (self.epoch, batch) == (1, 2):
                backends.current().settle()  # the third step is committed
                os.kill(os.getpid(), signal.SIGKILL)
            if job.name == "worker-0" and self.epoch == 2:  # until the other one is back
                deadline = time.monotonic() + 120
                while not os.path.exists("back") and time.monotonic() < deadline:
                    time.sleep(0.05)

    import time
    from syncline.keras import backends
    samples = {}

    class Count(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.taken = job.samples_taken

        def on_epoch_end(self, epoch, logs=None):
            samples[epoch] = job.samples_taken - self.taken

    model = model_of(syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    callbacks = [Kill(), syncline.keras.Callback(), Count()]
    plateau = keras.callbacks.ReduceLROnPlateau("loss", min_delta=9, patience=1, min_lr=0.01)
    history = model.fit(
        syncline.keras.dataset((x, y), 8, shuffle=True), epochs=6, verbose=0, callbacks=[*callbacks, plateau]
    )
    tell(life=job.life.number, epochs=history.epoch, history=numbers(history), samples=samples,
         rate=float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))
    job.close()
"""


@pytest.mark.parametrize(
    "way", ["sync", *(pytest.param(way, marks=pytest.mark.proof) for way in ("bounded", "async")), "ring"]
)
def test_a_worker_killed_in_the_middle_of_fit_comes_back(commands: Commands, way: str) -> None:
    """It skips the epochs that the job has finished, gets the learning rate of the others, and the samples of the
    epoch in which it died count once.
    """
    found, output = run(commands, KILLED, *WAYS[way])
    one, other = found["worker-0"], found["worker-1"]
    assert "worker-1 was killed by SIGKILL" in output
    assert (one["life"], other["life"]) == (1, 2), output
    assert one["epochs"] == [0, 1, 2, 3, 4, 5]
    assert other["epochs"] and other["epochs"][0] >= 1 and other["epochs"][-1] == 5  # in 1, if it is back so soon
    # In epoch 1 the first life had three steps of 8 samples. The samples of its unfinished lease came back.
    counts = [one["samples"][str(n)] + other["samples"].get(str(n), 0) for n in range(1, 6)]
    assert counts == [256 - 3 * 8] + [256] * 4, (one["samples"], other["samples"])
    assert one["samples"]["0"] < 256, one["samples"]
    assert one["rate"] == other["rate"] == pytest.approx(0.01)
    num = len(other["epochs"])
    assert other["history"]["loss"] == one["history"]["loss"][-num:]
    assert one["history"]["loss"][-1] < one["history"]["loss"][0]


AGREE = """
    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert self.model.evaluate(x[:8], y[:8], verbose=0) if job.is_chief and batch == 0 else True

    optimizer = syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model = model_of(optimizer, keras.layers.BatchNormalization(), keras.layers.Dropout(0.1))
    before = [
        keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.05, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.1),
        keras.callbacks.ModelCheckpoint(f"best-{job.name}.keras", monitor="val_loss", save_best_only=True),
        Own(),
    ]
    history = model.fit(
        syncline.keras.dataset((x, y), 16, shuffle=True), epochs=12, verbose=0,
        validation_data=syncline.keras.dataset((x, y), 64, training=False),
        callbacks=[*before, syncline.keras.Callback()],
    )
    model.save(f"model-{job.name}.keras")
    buffers = [np.asarray(v).tolist() for v in model.get_weights()[2:6]]
    found = sorted(name for name in os.listdir() if name.endswith(f"{job.name}.keras"))
    tell(epochs=len(history.epoch), history=numbers(history), files=found, buffers=buffers)
    job.close()
"""


def test_callbacks_decide_alike_on_all_workers(commands: Commands) -> None:
    """Also those before ours in the list: they see the metrics of all workers."""
    found, _ = run(commands, AGREE, "-s", "1")
    one, other = found["worker-0"], found["worker-1"]
    assert one["history"] == other["history"] and one["epochs"] < 12
    assert one["history"]["learning_rate"][-1] < 0.5
    assert one["files"] == ["best-worker-0.keras", "model-worker-0.keras"] and other["files"] == []
    tolerance = 0.1 if BACKEND == "jax" else 1e-6  # there the buffers of a step travel with the next one
    for mine, theirs in zip(one["buffers"], other["buffers"], strict=True):
        np.testing.assert_allclose(theirs, mine, atol=tolerance)

    import keras

    loaded = keras.models.load_model(commands.folder / "model-worker-0.keras")
    assert type(loaded.optimizer).__name__ == "SGD", "without a job this is the plain optimizer"


ALONE = """
    class Stop(keras.callbacks.Callback):
        def __init__(self, name, batch):
            super().__init__()
            self.name, self.batch = name, batch

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (job.name, self.epoch, batch) == (self.name, 1, self.batch):
                self.model.stop_training = True

        def on_epoch_end(self, epoch, logs=None):
            if (job.name, epoch, self.batch) == (self.name, 1, None):
                self.model.stop_training = True

    model = model_of(syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    data = syncline.keras.dataset((x, y), 8)
    best, found = keras.callbacks.EarlyStopping("loss", patience=9), []
    for stop in (Stop("worker-1", None), Stop("worker-0", 2), Stop("worker-1", 9)):
        history = model.fit(
            data, epochs=4, verbose=0, validation_data=(x, y), callbacks=[stop, syncline.keras.Callback(), best]
        )
        found.append([history.epoch, numbers(history), None if best.best is None else float(best.best)])
    last = model.fit(data, epochs=1, verbose=0, callbacks=[syncline.keras.Callback()])
    tell(found=found, last=numbers(last))
    job.close()
"""


def test_one_worker_alone_ends_fit(commands: Commands) -> None:
    """By a callback of its own, at the end of an epoch or within it: it ends on all, no callback sees an epoch that
    was not read, and all go on with the same epoch of the data.
    """
    found, _ = run(commands, ALONE, "-s", "1")
    one, other = found["worker-0"], found["worker-1"]
    assert one == {**other, "name": "worker-0"}
    for epochs, history, best in one["found"]:
        assert epochs == [0, 1] and all(len(values) == 2 for values in history.values())
        assert best == min(history["loss"])


STOPPED = """
    model = model_of(syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    data = syncline.keras.dataset((x, y), 16, shuffle=True)
    history = model.fit(data, epochs=50, verbose=0, callbacks=[syncline.keras.Callback()])
    tell(epochs=len(history.epoch), step=job.step)
    job.close()
"""


@pytest.mark.parametrize("rule", [("--stop", "accuracy>=0.8"), ("--max-steps", "20")], ids=" ".join)
def test_the_rules_of_the_job_end_fit(commands: Commands, rule: tuple[str, str]) -> None:
    found, output = run(commands, STOPPED, "-s", "1", *rule)
    assert found["worker-0"]["epochs"] == found["worker-1"]["epochs"] < 50
    assert "stopped by" in output
    if rule[0] == "--max-steps":
        assert found["worker-0"]["step"] == 20


ODD = """
    model = model_of(syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    data = syncline.keras.dataset((x, y), 16)
    first = model.fit(data, epochs=2, verbose=0)
    again = model.fit(data, epochs=1, verbose=0, callbacks=[syncline.keras.Callback()])
    own = model.fit(x[job.rank::2], y[job.rank::2], epochs=1, verbose=0, batch_size=16)
    tell(first=numbers(first), again=numbers(again), own=numbers(own), step=job.step)
    job.close()
"""


def test_fit_without_the_callback_and_without_our_dataset(commands: Commands) -> None:
    """Both work, and both are told what is missing."""
    found, output = run(commands, ODD, "-s", "1")
    one, other = found["worker-0"], found["worker-1"]
    assert one["first"] != other["first"] and one["again"] == other["again"] and one["step"] == 32
    assert "fit runs without syncline.keras.Callback()" in output
    assert "the data comes from no syncline dataset, so the job does not split it" in output


def test_local_steps(commands: Commands) -> None:
    """With --sync-every the optimizer makes its steps on the worker."""
    text = FIT.replace("OPTIMIZER", "SGD(0.1)").replace("OPTIONS", "")
    found, _ = run(commands, text, "-s", "1", "--sync-every", "4")
    one, other = found["worker-0"], found["worker-1"]
    assert one["weights"] == other["weights"] and one["history"] == other["history"]
    assert one["history"]["loss"][-1] < 0.8 * one["history"]["loss"][0]


RESUMED = """
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model = model_of(syncline.keras.DistributedOptimizer(keras.optimizers.SGD(schedule)))
    data = syncline.keras.dataset((x, y), 16)
    seen = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(job.progress))
    history = model.fit(data, epochs=5, verbose=0, callbacks=[syncline.keras.Callback(), note])
    tell(epochs=history.epoch, iterations=int(model.optimizer.iterations), step=job.step, progress=seen)
    job.close()
"""


def test_a_job_resumes_in_the_epoch_that_it_was_in(commands: Commands) -> None:
    """Finished epochs are skipped, and the schedule goes on where it was; so does the job's progress."""
    first, _ = run(commands, RESUMED, "-s", "1", "--checkpoint", "saves", "--max-steps", "12")
    assert first["worker-0"]["step"] == 12 and first["worker-0"]["epochs"] == [0, 1]
    again, _ = run(commands, RESUMED, "-s", "1", "--checkpoint", "saves")
    for found in again.values():
        assert found["epochs"] == [1, 2, 3, 4] and found["step"] == found["iterations"] == 40
        assert found["progress"] == pytest.approx([0.4, 0.6, 0.8, 1.0], abs=0.03)
