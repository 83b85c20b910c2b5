"""`Callback`: what `fit` does together with the other workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from syncline.core.conditions import METRIC
from syncline.errors import ConfigError
from syncline.keras import passes
from syncline.keras.data import Dataset, NumBatches
from syncline.keras.optimizer import NO_LOSS_SCALE, DistributedOptimizer
from syncline.worker.current import current_job
from syncline.worker.job import Job


class Callback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """For `fit(callbacks=[syncline.keras.Callback(), …])`.

    All workers begin with the chief's values. At the end of an epoch each has the job's newest parameters, and all
    see the same metrics: weighted by samples, so EarlyStopping, ReduceLROnPlateau and ModelCheckpoint decide alike
    on all workers, wherever they stand in the list. The metrics are reported to the job, and its stop rules end
    `fit`. A worker that starts again skips the epochs that the job has finished. Only the chief writes models.
    """

    def __init__(self) -> None:
        super().__init__()
        self._job: Job = current_job()
        self._dataset: Dataset | None = None
        self._num_epochs = 0
        self._taken = 0  # samples at the start of the epoch
        self._is_training = False  # in the batches of an epoch: the next metrics that Keras asks for are the epoch's
        self._is_validating = False  # by `fit` itself
        self._epoch, self._has_ended = 0, False

    # -- the beginning ------------------------------------------------------------------------------------

    def set_params(self, params: dict[str, Any]) -> None:
        """Keras calls this before the progress bar reads the same dict."""
        steps, self._dataset = params.get("steps"), None
        if isinstance(steps, NumBatches):
            self._dataset, params["steps"] = steps.dataset, steps.expected
        if not self._job.is_chief:
            params["verbose"] = 0
        self._num_epochs = int(params.get("epochs") or 0)
        super().set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        model, steps = self.model, self._checked().steps
        steps.add_buffers(_buffers_of(model), self.model.optimizer.buffer_mode)
        steps.callback, self._has_ended = self, False
        if self._dataset is not None:
            self._dataset.is_stopped = False
        _save_by_chief(model, self._job)
        _Merging.install(model, self)
        if self._dataset is not None:
            first = self._dataset.skip_finished(self._num_epochs)
            if first:
                model._initial_epoch = first
                steps.pull()

    def _checked(self) -> DistributedOptimizer:
        model = self.model
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ConfigError(f"fit: {NO_LOSS_SCALE}")
        if not isinstance(model.optimizer, DistributedOptimizer):
            raise ConfigError(
                f"fit: the model is compiled with {type(model.optimizer).__name__}, and nothing would be shared; "
                "give compile(optimizer=syncline.keras.DistributedOptimizer(…))"
            )
        if not model.built or not model.trainable_variables:
            raise ConfigError(
                "fit: the model is not built, so there is nothing that workers could begin with; call "
                "model.build(input_shape), or begin the model with keras.Input(shape)"
            )
        if model.steps_per_execution > 1:
            raise ConfigError(
                f"fit: steps_per_execution={model.steps_per_execution} runs several steps in one call, and each is a "
                "step of the job; give compile(steps_per_execution=1)"
            )
        found: DistributedOptimizer = model.optimizer
        if not found.built:  # Keras on TensorFlow does it in its first step
            found.build(model.trainable_variables)
        return found

    # -- epochs -------------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._taken, self._is_training = epoch, self._job.samples_taken, True
        self.model.optimizer.steps.take_new()
        self._agree(stops=False)

    def _agree(self, *, stops: bool) -> None:
        """Before an epoch: all go on with the chief's learning rate, or end if one of them has ended. A worker that
        started again has callbacks without a history, which decide otherwise than those of the rest.
        """
        steps = self.model.optimizer.steps
        own = {"stops": (float(stops), 1.0)}
        if self._job.is_chief and (rate := steps.rate_now()):
            own["rate"] = (rate, 1.0)
        found = self._meet("epoch", own, self._dataset.upcoming if self._dataset is not None else 0)
        if rate := found.get("rate", 0.0):
            steps.set_rate(rate)
        if found.get("stops", 0.0) > 0 and not stops:
            self.model.stop_training = self._has_ended = True
            self._is_training = False
            if self._dataset is not None:
                self._dataset.is_stopped = True

    def _meet(self, what: str, values: dict[str, tuple[float, float]], epoch: int | None = None) -> dict[str, float]:
        """All workers come here in an epoch; a worker that starts again skips some."""
        data = self._dataset
        if data is None:
            return self._job.merge(f"keras {what}", values)
        return self._job.merge(f"keras {what} {data.name}", values, turn=1 + (data.epoch if epoch is None else epoch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = self.model.optimizer.steps
        state = getattr(self.model, "_jax_state", None)
        if state is not None:
            steps.note_buffers(_values_of_buffers(self.model, state["non_trainable_variables"]))
        steps.finish()
        if self._job.should_stop:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._is_validating = True

    def on_test_end(self, logs: Any = None) -> None:
        self._is_validating = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = {name: value for name, value in (logs or {}).items() if METRIC.fullmatch(name)}
        if self._has_ended:
            return
        if self._job.is_chief and values:
            self._job.measures.report_whole(values)
        found = self._meet("rules", {"stops": (float(self._job.should_stop), 1.0)})
        if found.get("stops", 0.0) > 0 or self._job.should_stop:
            self.model.stop_training = self._has_ended = True

    def on_train_end(self, logs: Any = None) -> None:
        if self.model.stop_training and not self._has_ended and self._epoch + 1 < self._num_epochs:
            self._agree(stops=True)
        _Merging.remove(self.model)
        self.model.optimizer.steps.callback = None
        self.model._initial_epoch = None
        passes.leave(self._job)

    # -- metrics ------------------------------------------------------------------------------------------

    def merged(self, logs: dict[str, Any]) -> dict[str, Any]:
        """At the end of an epoch's batches, and of its validation: the metrics of all workers."""
        if self._has_ended:
            return logs
        if self._is_validating:
            return self._together("validation", logs, 1.0)
        if not self._is_training:
            return logs
        self._is_training = False
        samples = float(self._job.samples_taken - self._taken) if self._dataset is not None else 1.0
        found = self._together("training", logs, samples)
        self.model.optimizer.steps.pull()
        return found

    def _together(self, what: str, logs: dict[str, Any], weight: float) -> dict[str, Any]:
        numbers = {name: value for name, value in logs.items() if np.ndim(value) == 0}
        values = {name: (float(value), weight) for name, value in numbers.items()}
        found = self._meet(what, values)
        return {**logs, **{name: value for name, value in found.items() if name in numbers}}


class _Merging:
    """Keras asks its model for the metrics of an epoch before any callback sees them: from here all get merged ones.

    An evaluation that a callback of yours starts inside of `fit` is its worker's own.
    """

    @staticmethod
    def install(model: Any, callback: Callback) -> None:
        result, evaluate = type(model)._get_metrics_result_or_logs, type(model).evaluate

        def get_metrics_result_or_logs(logs: Any) -> Any:
            return callback.merged(result(model, logs))

        def evaluate_alone(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("_use_cached_eval_dataset"):
                return evaluate(model, *args, **kwargs)
            _Merging.remove(model)
            try:
                return evaluate(model, *args, **kwargs)
            finally:
                _Merging.install(model, callback)

        object.__setattr__(model, "_get_metrics_result_or_logs", get_metrics_result_or_logs)
        object.__setattr__(model, "evaluate", evaluate_alone)

    @staticmethod
    def remove(model: Any) -> None:
        for name in ("_get_metrics_result_or_logs", "evaluate"):
            model.__dict__.pop(name, None)


def _save_by_chief(model: Any, job: Job) -> None:
    """`model.save` and `save_weights`, also by ModelCheckpoint, write at the chief alone."""

    def by_chief(name: str) -> Any:
        write = getattr(type(model), name)

        def save(*args: Any, **kwargs: Any) -> Any:
            if not job.is_chief:
                return None
            with _as_plain(model):
                return write(model, *args, **kwargs)

        return save

    for name in ("save", "save_weights", "export"):
        object.__setattr__(model, name, by_chief(name))


@contextlib.contextmanager
def _as_plain(model: Any) -> Iterator[None]:
    """The model as without Syncline, so that every Keras loads the file."""
    optimizer: Any = model.optimizer
    compiled: Any = getattr(getattr(model, "_compile_config", None), "config", {})
    if not isinstance(optimizer, DistributedOptimizer):
        yield
        return
    given = compiled.get("optimizer")
    try:
        model.optimizer = optimizer.inner_optimizer
        if given is optimizer:
            compiled["optimizer"] = optimizer.inner_optimizer
        yield
    finally:
        model.optimizer = optimizer
        if given is optimizer:
            compiled["optimizer"] = given


def _buffers_of(model: Any) -> list[Any]:
    """Variables that are not trained and hold numbers, such as BatchNorm's statistics; not the states of chance."""
    return [v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]


def _values_of_buffers(model: Any, values: list[Any]) -> list[Any]:
    pairs = zip(model.non_trainable_variables, values, strict=True)
    return [value for variable, value in pairs if keras.backend.is_float_dtype(variable.dtype)]
