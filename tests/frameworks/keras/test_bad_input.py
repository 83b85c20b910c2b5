"""What cannot work is refused with an error that says what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import keras
import msgspec
import numpy as np
import pytest
from tests.launch.conftest import Commands

import syncline
import syncline.keras
from syncline.keras import versions
from syncline.worker.current import current_job
from syncline.worker.job import Job

X, Y = np.zeros((64, 4), np.float32), np.zeros(64, np.int64)


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    yield
    keras.mixed_precision.set_global_policy("float32")


def model_of(**options: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options.setdefault("optimizer", syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.compile(loss=loss, **options)
    return model


def fit(model: Any, data: Any = None, **options: Any) -> Any:
    data = syncline.keras.dataset((X, Y), 16) if data is None else data
    return model.fit(data, epochs=1, verbose=0, callbacks=[syncline.keras.Callback()], **options)


def test_no_job() -> None:
    """`init()` was not called, in a process of its own: here is a job."""
    text = """
        import keras, syncline.keras
        for make in (lambda: syncline.keras.DistributedOptimizer(keras.optimizers.SGD()),
                     lambda: syncline.keras.dataset(([1.0], [1])), syncline.keras.Callback):
            try:
                make()
            except syncline.ConfigError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True)
    assert done.stdout.count("there is no job yet; call syncline.init() first") == 3, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="Keras on numpy needs it")
def test_a_backend_that_cannot_train() -> None:
    """Keras itself would say at `fit` only that it is not implemented."""
    text = """
        import keras, syncline.keras
        with syncline.init():
            try:
                syncline.keras.DistributedOptimizer(keras.optimizers.SGD())
            except syncline.ConfigError as error:
                print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "KERAS_BACKEND": "numpy"})
    assert "Keras' backend 'numpy' cannot train in a job; set KERAS_BACKEND to torch" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: syncline.keras.DistributedOptimizer("adam"), "takes a keras.optimizers optimizer, not str"),
        (
            lambda: syncline.keras.DistributedOptimizer(
                syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
            ),
            "wrap it once",
        ),
        (
            lambda: syncline.keras.DistributedOptimizer(
                keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
            ),
            "mixed_bfloat16",
        ),
        (lambda: syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), buffers="all"), "chief, mean"),
        (lambda: syncline.keras.dataset((X, Y), 0), "batch_size = 0: must be an int of at least 1"),
        # The coordinator could not read it, and sent the worker away.
        (lambda: iter(syncline.keras.dataset((X, Y), 16, shuffle=True, seed="a")), "must be a whole number"),  # type: ignore[arg-type]
        (lambda: syncline.keras.dataset({"x": X}), "does not say what the labels are"),
        (lambda: syncline.keras.dataset(7), "int cannot be split over workers"),
    ],
)
def test_arguments(job: Job, make: Any, message: str) -> None:
    with pytest.raises(syncline.ConfigError, match=re.escape(message)):
        make()


def test_a_model_that_is_not_built(job: Job) -> None:
    class Odd(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            return self.layer(inputs)

    model = Odd()
    model.compile(optimizer=syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    callback = syncline.keras.Callback()
    callback.set_model(model)
    with pytest.raises(syncline.ConfigError, match=r"not built.*model\.build\(input_shape\)"):
        callback.on_train_begin()


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="other backends build it before the first step")
def test_a_model_that_its_first_step_builds(job: Job) -> None:
    """Without the callback: its variables are made while TensorFlow traces the step."""
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(optimizer=syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with pytest.raises(syncline.ConfigError, match=r"has no value yet.*model\.build\(input_shape\)"):
        model.fit(syncline.keras.dataset((X, X[:, :2]), 16), verbose=0)


def test_a_model_in_which_nothing_is_trained(job: Job) -> None:
    model = model_of()
    model.trainable = False
    with pytest.raises(syncline.ConfigError, match=r"all of it is frozen.*model\.trainable = True"):
        fit(model)


def test_a_tape_loop_with_a_model_that_is_not_built(job: Job) -> None:
    with pytest.raises(syncline.ConfigError, match=r"not built.*model\.build\(input_shape\)"):
        syncline.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)).build([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy": "async,damped"},
            "--policy async,damped needs an optimizer that servers know.*or leave out damped",
        ),
        ({"lr_per_worker": True}, "--lr-per-worker needs an optimizer that servers know"),
        ({"on_plateau": "lr*0.1", "stop": ("loss plateau 3",)}, "--on-plateau.*Nadam runs on the workers"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_an_optimizer_that_servers_do_not_know(
    job: Job, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    """These options of a job weigh gradients on the servers, or change learning rates there."""
    monkeypatch.setattr(job, "config", msgspec.structs.replace(job.config, **options))
    with pytest.raises(syncline.ConfigError, match=message):
        fit(model_of(optimizer=syncline.keras.DistributedOptimizer(keras.optimizers.Nadam(0.1))))


def test_parts_of_fit_that_the_job_has_to_know(job: Job) -> None:
    with pytest.raises(syncline.ConfigError, match=r"initial_epoch=2.*Give epochs=3 alone"):
        model_of().fit(
            syncline.keras.dataset((X, Y), 16),
            initial_epoch=2, epochs=5, verbose=0, callbacks=[syncline.keras.Callback()],
        )  # fmt: skip
    with pytest.raises(syncline.ConfigError, match="steps_per_epoch cannot be used"):
        fit(model_of(), steps_per_epoch=2)


def test_an_optimizer_that_is_not_ours(job: Job) -> None:
    with pytest.raises(syncline.ConfigError, match="there is SGD, which shares nothing"):
        fit(model_of(optimizer=keras.optimizers.SGD(0.1)))


def test_mixed_float16(job: Job) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    with pytest.raises(syncline.ConfigError, match="mixed_bfloat16"):
        fit(model_of())


def test_variables_that_servers_do_not_host(job: Job) -> None:
    keras.mixed_precision.set_global_policy("float16")
    with pytest.raises(syncline.ConfigError, match="float16, and parameters on servers must be float32 or float64"):
        fit(model_of())


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="the other backends have float64")
def test_float64_where_jax_has_none(job: Job) -> None:
    """Keras goes on saying float64, and the compiled step failed."""
    keras.mixed_precision.set_global_policy("float64")
    with pytest.raises(
        syncline.ConfigError, match=r"has the type float64, and JAX has made it float32.*JAX_ENABLE_X64=1"
    ):
        fit(model_of())


def test_mixed_bfloat16_works(job: Job) -> None:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = model_of()
    assert len(fit(model).epoch) == 1 and keras.backend.standardize_dtype(model.weights[0].dtype) == "float32"


def test_steps_per_execution(job: Job) -> None:
    with pytest.raises((syncline.ConfigError, ValueError), match="steps_per_execution"):
        fit(model_of(steps_per_execution=2))


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras itself refuses it")
def test_steps_per_execution_without_the_callback(job: Job) -> None:
    """Each step reads its own batch, so it works."""
    before = job.own_step
    model_of(steps_per_execution=4).fit(syncline.keras.dataset((X, Y), 4), verbose=0)
    assert job.own_step - before == 16


def test_our_dataset_for_an_evaluation(job: Job) -> None:
    """Its samples would be lost for the training."""
    with pytest.raises(syncline.ConfigError, match="training=False"):
        model_of().evaluate(syncline.keras.dataset((X, Y), 8), verbose=0)
    assert model_of().evaluate(syncline.keras.dataset((X, Y), 8, training=False), verbose=0) > 0


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow's XLA cannot call out")
def test_xla_without_the_callback(job: Job) -> None:
    with pytest.raises(syncline.ConfigError, match=r"Callback\(\).*jit_compile=False"):
        model_of(jit_compile=True).fit(X, Y, verbose=0)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tf_datasets(job: Job) -> None:
    import tensorflow as tf

    whole = tf.data.Dataset.from_tensor_slices((X, Y))
    for bad, message in (
        (whole.filter(lambda x, y: True), "does not know its number of samples.*assert_cardinality"),
        (whole.repeat(), "never ends"),
        (whole.batch(8), r"leave out its \.batch\(\)"),
        (whole.shuffle(64), "reshuffle_each_iteration=False"),
        (whole.take(0), "empty"),
    ):
        with pytest.raises(syncline.ConfigError, match=message):
            syncline.keras.dataset(bad, 8)
    with pytest.raises(syncline.ConfigError, match="shuffle it itself"):
        syncline.keras.dataset(whole, 8, shuffle=True)
    good = whole.shuffle(64, seed=1, reshuffle_each_iteration=False).map(lambda x, y: (x + 1, y))
    before = current_job().samples_taken
    fit(model_of(), syncline.keras.dataset(good, 24))
    assert current_job().samples_taken - before == 64


def test_an_old_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.0rc2")
    with pytest.raises(syncline.ConfigError, match=rf"keras 3\.1\.0rc2 is too old.*{versions.LOWEST['keras']}"):
        versions.check_versions("keras")


def test_a_missing_framework_is_named() -> None:
    versions.LOWEST["nothing-of-this-name"] = "1.0"
    with pytest.raises(syncline.ConfigError, match="nothing-of-this-name is not installed here; install it"):
        versions.check_versions("nothing-of-this-name")
    del versions.LOWEST["nothing-of-this-name"]


@pytest.mark.parametrize("adapter", ["syncline.keras", "syncline.tensorflow"])
@pytest.mark.parametrize("is_old", [False, True], ids=["missing", "old"])
def test_a_backend_that_keras_cannot_import_is_named(tmp_path: pathlib.Path, adapter: str, is_old: bool) -> None:
    """Keras itself says no more than that there is no such module, or what an old one does not have."""
    backend = next(name for name in versions.BACKENDS if importlib.util.find_spec(name) is None)
    if is_old:
        (tmp_path / backend).mkdir()
        (tmp_path / backend / "__init__.py").write_text("raise AttributeError('a name that Keras needs')")
        info = tmp_path / f"{backend}-0.1.2.dist-info" / "METADATA"
        info.parent.mkdir()
        info.write_text(f"Metadata-Version: 2.1\nName: {backend}\nVersion: 0.1.2\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path}
    command = [sys.executable, "-c", f"import {adapter}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    found = "0.1.2 is too old" if is_old else "is not installed here"
    expected = f"ConfigError: Keras cannot import its backend: {backend} {found}"
    assert expected in done.stderr and "set KERAS_BACKEND" in done.stderr, done.stderr


def test_no_other_framework_is_imported(commands: Commands) -> None:
    """Of the backends, only the one that Keras runs on. Keras itself may import others that it finds, so what counts
    is who asks for them.
    """
    script = commands.script("""
        import sys

        class Asked:
            def find_spec(self, name, path=None, target=None):
                if name in ("torch", "tensorflow", "jax", "optax", "sklearn"):
                    frame = sys._getframe(1)
                    while "importlib" in frame.f_code.co_filename:
                        frame = frame.f_back
                    if "/syncline/" in frame.f_code.co_filename:
                        print("ASKED", name, frame.f_code.co_filename)

        sys.meta_path.insert(0, Asked())
        import syncline, syncline.keras
        from syncline.keras import backends
        backends.current()
        exec(compile("try: import optax\\nexcept ImportError: pass", "/syncline/planted.py", "exec"))
    """)
    # In a new interpreter: a forked process has asked already.
    result = commands.finish(commands.start(script, program=(), is_forked=False))
    asked = [line for line in result.output.splitlines() if "ASKED" in line]
    assert len(asked) == 1 and "ASKED optax /syncline/planted.py" in asked[0], result.output
