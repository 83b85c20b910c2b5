"""Two calls of `fit` in a row, epochs without a batch, and batches that Keras reads ahead."""

from __future__ import annotations

import importlib
from typing import Any

import keras
import numpy as np
import pytest

import syncline
import syncline.keras
from syncline.keras.variables import digest_of
from syncline.testing import local_job
from syncline.worker.current import current_in_thread
from syncline.worker.data.loop import Loop
from syncline.worker.job import Job

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


def model_of(optimizer: str = "SGD", *layers: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])
    model.compile(
        optimizer=syncline.keras.DistributedOptimizer(getattr(keras.optimizers, optimizer)(0.1)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 1, **options: Any) -> Any:
    data = syncline.keras.dataset((X, Y), 16)
    return model.fit(data, epochs=epochs, verbose=0, callbacks=[syncline.keras.Callback(), *callbacks], **options)


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_a_model_with_several_inputs(job: Job, kind: Any) -> None:
    """As `fit` of plain Keras takes them. It was one array of both."""

    def model_of_two() -> Any:
        keras.utils.set_random_seed(1)
        inputs = {"left": keras.Input((1,), name="left"), "right": keras.Input((3,), name="right")}
        found = keras.layers.Dense(2)(keras.layers.Concatenate()([*inputs.values()]))
        return keras.Model(inputs if kind is dict else [*inputs.values()], found)

    parts = {"left": X[:, :1], "right": X[:, 1:]}
    x, loss = parts if kind is dict else kind(parts.values()), keras.losses.SparseCategoricalCrossentropy(True)
    plain, shared = model_of_two(), model_of_two()
    plain.compile(keras.optimizers.SGD(0.1), loss)
    plain.fit(x, Y, batch_size=24, shuffle=False, verbose=0)
    shared.compile(syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
    checked = syncline.keras.dataset((x, Y), 24, training=False)
    callbacks = [syncline.keras.Callback()]
    shared.fit(syncline.keras.dataset((x, Y), 24), verbose=0, validation_data=checked, callbacks=callbacks)
    np.testing.assert_allclose(shared.get_weights()[0], plain.get_weights()[0], atol=1e-6)


def test_a_metric_of_several_numbers(job: Job) -> None:
    """F1Score has one for each class: the job's rules could not take them, and `fit` ended in an error."""
    one_hot = np.eye(2, dtype=np.float32)[Y]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    optimizer = syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    data = syncline.keras.dataset((X, one_hot), 16)
    callbacks = [syncline.keras.Callback()]
    history = model.fit(data, epochs=2, verbose=0, validation_data=(X, one_hot), callbacks=callbacks).history
    assert [np.shape(each) for each in history["f1_score"] + history["val_f1_score"]] == [(2,)] * 4
    expected = model.evaluate(X, one_hot, verbose=0, return_dict=True)["f1_score"]
    np.testing.assert_allclose(history["val_f1_score"][-1], keras.ops.convert_to_numpy(expected))


def test_each_number_of_a_metric_is_merged() -> None:
    """All workers see the same: of such a metric they saw their own."""

    def merged(job: Job) -> dict[str, Any]:
        with current_in_thread(job):
            callback = syncline.keras.Callback()
        callback.on_test_begin()
        return callback.merged({"loss": 1.0 + job.rank, "f1_score": np.array([job.rank, 1.0]), "nan": np.nan})

    with local_job(workers=2) as jobs:
        for found in jobs.run(merged):
            assert found.pop("f1_score").tolist() == [0.5, 1.0]
            assert found.pop("loss") == 1.5 and np.isnan(found.pop("nan")) and not found


def test_weights_that_the_script_has_set_are_not_lost(job: Job) -> None:
    """The job would go on from its own, after one gradient that was computed from those of the script."""
    model = model_of()
    fit(model)
    fit(model)
    restored = [np.full_like(each, 0.5) for each in model.get_weights()]
    model.set_weights(restored)
    with pytest.raises(syncline.ConfigError, match="compile the model again with a new DistributedOptimizer"):
        fit(model)
    optimizer = syncline.keras.DistributedOptimizer(keras.optimizers.SGD(1e-3))
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model)
    np.testing.assert_allclose(model.get_weights()[0], restored[0], atol=0.01)


def test_weights_are_compared_by_value() -> None:
    """However they lie in memory: otherwise the next `fit` would refuse weights that the script has not set."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    scalar, empty = np.asarray(2.0), np.zeros((0, 3), np.float32)
    for same in (array.copy(), np.asfortranarray(array), np.repeat(array, 2, axis=1)[:, ::2]):
        assert digest_of([same, scalar, empty]) == digest_of([array, scalar, empty])
    last = array + np.eye(3, 4, dtype=np.float32)[::-1]
    for other in ([last], [array.T], [array.astype(np.float64)], [array, scalar], []):
        assert digest_of(other) != digest_of([array])


def test_averages_of_the_weights_at_the_end_of_fit_are_no_error(job: Job) -> None:
    """Keras sets them itself, with use_ema."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model)
    fit(model)


def test_buffers_of_a_model_that_was_trained_without_the_callback(job: Job) -> None:
    """TensorFlow keeps the graph of the first fit, which pushes none: they were set back at the end of each epoch."""
    model = model_of("SGD", keras.layers.BatchNormalization())
    model.fit(syncline.keras.dataset((X + 3, Y), 16), verbose=0)
    before = model.layers[0].moving_mean.numpy() if BACKEND == "tensorflow" else None
    fit(model, epochs=8)
    after = keras.ops.convert_to_numpy(model.layers[0].moving_mean)
    assert before is None or np.abs(after - before).max() > 0.05
    assert np.abs(after - X.mean(0)).max() < 1.0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow's XLA cannot call out")
@pytest.mark.parametrize("optimizer", ["SGD", "Nadam"])
def test_xla_with_the_callback_and_then_without_it(job: Job, optimizer: str) -> None:
    """The compiled step of the first fit would keep its gradients, and nothing would push them."""
    model = model_of(optimizer, jit_compile=True)
    fit(model)
    with pytest.raises(syncline.ConfigError, match=r"Callback\(\).*jit_compile=False"):
        model.fit(syncline.keras.dataset((X, Y), 16), verbose=0)
    assert len(fit(model).epoch) == 1


def test_a_script_that_goes_on_after_a_failed_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the callback: the steps after it were left out, without a word."""
    model = model_of()
    data = syncline.keras.dataset((X, Y), 16)
    model.fit(data, verbose=0)
    host = model.optimizer.steps.host

    def fails(*args: Any, **options: Any) -> Any:
        raise syncline.SynclineError("a step failed")

    with monkeypatch.context() as patch:
        patch.setattr(host, "step", fails)
        with pytest.raises(syncline.SynclineError, match="a step failed"):
            model.fit(data, verbose=0)
    before, step = model.get_weights(), job.own_step
    model.fit(data, verbose=0)
    assert job.own_step == step + 4
    assert np.abs(model.get_weights()[0] - before[0]).max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["plain", "jit"])
def test_a_fit_that_raised_leaves_no_callback_behind(job: Job, options: dict[str, Any]) -> None:
    """Keras calls no callback then. A fit without one came next: it merged metrics with workers that did not wait for
    it, and under XLA on TensorFlow its gradients were kept for a callback that was gone.
    """

    class Fail(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise RuntimeError("a callback of the script failed")

    if BACKEND == "torch" and options:
        pytest.skip("torch's compiler takes long, and steps are not in its code")
    model = model_of(**options)
    with pytest.raises(RuntimeError, match="a callback of the script failed"):
        fit(model, Fail())
    data, step = syncline.keras.dataset((X, Y), 16), job.own_step
    if BACKEND == "tensorflow" and options:
        with pytest.raises(syncline.ConfigError, match=r"Callback\(\).*jit_compile=False"):
            model.fit(data, verbose=0)
    else:
        model.fit(data, verbose=0)
        assert job.own_step == step + 4
    assert model.optimizer.steps.callback is None and "fit" not in vars(model)
    assert len(fit(model, epochs=2).epoch) == 2


@pytest.mark.parametrize("optimizer", ["SGD", "Nadam"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_without_a_batch(job: Job, optimizer: str, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule ends the training just before it: Keras on JAX failed, as it had no result of a step."""
    found: dict[str, Any] = {}

    class Stop(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
        def on_epoch_begin(self, number: int, logs: Any = None) -> None:
            if number == epoch:
                monkeypatch.setattr(Loop, "is_over", property(lambda self: True))
                found["before"], found["step"] = self.model.get_weights(), job.own_step

    model = model_of(optimizer)
    history = fit(model, Stop(), epochs=epoch + 1, validation_data=(X, Y))
    assert len(history.epoch) == epoch + 1 and job.own_step == found["step"]
    for one, other in zip(found["before"], model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(BACKEND != "jax", reason="only Keras on JAX reads ahead, on a GPU")
@pytest.mark.parametrize("optimizer", ["SGD", "Nadam"])
def test_batches_that_keras_reads_ahead(job: Job, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch comes again, as there may be more behind it. That step does not count."""
    jax = importlib.import_module("jax")

    def train() -> tuple[Any, int]:
        model, step = model_of(optimizer), job.own_step
        fit(model, epochs=2)
        return model, job.own_step - step

    expected, num_steps = train()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # what Keras asks
    found, num_steps_ahead = train()
    assert num_steps_ahead == num_steps == 8
    for one, other in zip(expected.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)
    assert int(found.optimizer.iterations) == int(expected.optimizer.iterations)
