"""`Callback`: what `fit` does together with the other workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from syncline.core.conditions import METRIC
from syncline.errors import ConfigError
from syncline.keras import metrics, passes
from syncline.keras.buffers import buffers_of, values_of_buffers
from syncline.keras.data import Dataset, NumBatches
from syncline.keras.optimizer import NO_LOSS_SCALE, NOT_BUILT, DistributedOptimizer
from syncline.keras.saving import save_by_chief
from syncline.keras.steps import KerasSteps
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
        self._steps: KerasSteps | None = None  # of this `fit`, until it has ended
        self._num_epochs = 0
        self._taken = 0  # samples at the start of the epoch
        self._is_training = False  # in the batches of an epoch: the next metrics that Keras asks for are the epoch's
        self._is_validating = False  # by `fit` itself
        self._epoch = 0
        self.has_ended = False  #: the rest of `fit` has no batches
        self._first: int | None = None  # epoch that `fit` begins with, until it does
        self._seen: dict[str, dict[str, Any]] = {}  # merged metrics of the last epoch
        self._unread: dict[str, Any] = {}  # metrics of an epoch that was not read

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
        steps.check_values()
        passes.leave(self._job)  # of a fit that failed
        if steps.buffers.register(steps.host, buffers_of(model), model.optimizer.buffer_mode) and _has_graphs():
            model.make_train_function(force=True)  # a graph of an earlier fit does not push them
        self._steps = steps
        steps.callback, self.has_ended, self._unread = self, False, {}
        if self._dataset is not None:
            self._dataset.is_stopped = False
        save_by_chief(model, self._job)
        metrics.install(model, self)
        first = self._first = self._dataset.skip_finished(self._num_epochs) if self._dataset is not None else 0
        if first:
            model._initial_epoch = first
            steps.pull()
        if self._dataset is not None and self._job.should_stop:
            self._end()
        elif first < self._num_epochs:
            self._agree(stops=False)
        if self.has_ended:
            model._initial_epoch = self._num_epochs  # no epoch

    def _checked(self) -> DistributedOptimizer:
        model = self.model
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ConfigError(f"fit: {NO_LOSS_SCALE}")
        if not isinstance(model.optimizer, DistributedOptimizer):
            raise ConfigError(
                "fit: syncline.keras.Callback needs a DistributedOptimizer in compile(optimizer=…); there is "
                f"{type(model.optimizer).__name__}, which shares nothing. A model with several optimizers of its own "
                "trains without the callback"
            )
        if not model.built or not model.trainable_variables:
            raise ConfigError(f"fit: {NOT_BUILT}")
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
        first, self._first = self._first, None
        if first is None:
            self._agree(stops=False)
        elif self._dataset is not None and epoch != first:
            raise ConfigError(
                f"fit: initial_epoch={epoch} (or BackupAndRestore) cannot be used with syncline.keras.dataset(): the "
                f"job itself knows which epochs are finished. Give epochs={self._num_epochs - epoch} alone"
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._dataset is None and passes.is_read(self._job) == "fit":
            raise ConfigError(
                "fit: steps_per_epoch cannot be used with syncline.keras.dataset(): an epoch of the job has all of "
                "its samples. Leave it out, or give a smaller source"
            )

    def _agree(self, *, stops: bool) -> None:
        """Before an epoch: all go on with the chief's learning rate, or end if one of them has ended. A restarted
        worker's callbacks have no history, so they may decide differently. The `fit` after one that was ended meets
        at the same turn, which still has the old answer; so the names contain the number of the `fit`.
        """
        steps, data = self.model.optimizer.steps, self._dataset
        upcoming, number = (data.upcoming, data.num_fits) if data is not None else (0, 0)
        own = {f"stops {number}": (float(stops), 1.0)}
        if self._job.is_chief and (rate := steps.wrapped.rate_now()):
            own[f"rate {number}"] = (rate, 1.0)
        found = self._meet("epoch", own, upcoming)
        if rate := found.get(f"rate {number}", 0.0):
            steps.wrapped.set_rate(rate)
        if found.get(f"stops {number}", 0.0) > 0 and not stops:
            self._end()

    def _end(self) -> None:
        """`fit` ends here. If an epoch has begun, Keras still goes through it, and it has no batches."""
        self.model.stop_training = self.has_ended = True
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
            steps.note_buffers(values_of_buffers(self.model, state["non_trainable_variables"]))
        steps.finish()
        if self._job.should_stop:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._is_validating = True

    def on_test_end(self, logs: Any = None) -> None:
        self._is_validating = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Rules go by single numbers; of a metric such as F1Score there is one for each class.
        numbers = {name: value for name, value in (logs or {}).items() if np.ndim(value) == 0}
        values = {name: float(value) for name, value in numbers.items() if METRIC.fullmatch(name)}
        if self.has_ended:
            self._unread = {} if logs is None else logs  # callbacks behind this one may add some
            return
        if self._job.is_chief and values:
            self._job.measures.report_whole(values)
        found = self._meet("rules", {"stops": (float(self._job.should_stop), 1.0)})
        if found.get("stops", 0.0) > 0 or self._job.should_stop:
            self.model.stop_training = self.has_ended = True

    def on_train_end(self, logs: Any = None) -> None:
        if self.model.stop_training and not self.has_ended and self._epoch + 1 < self._num_epochs:
            self._agree(stops=True)
        self.leave()
        if self._unread:
            _forget_last(self.model.history, self._unread)

    def leave(self) -> None:
        """`fit` has ended. Of one that raised, Keras tells nothing: the next `fit` calls this before it begins."""
        steps, self._steps = self._steps, None
        if steps is None:
            return
        metrics.remove(self.model)
        steps.callback = None
        if steps.waits:  # a later fit without the callback is told: the check is in the tracing
            self.model.train_function = None
        self.model._initial_epoch = None
        passes.leave(self._job)

    # -- metrics ------------------------------------------------------------------------------------------

    def merged(self, logs: dict[str, Any]) -> dict[str, Any]:
        """At the end of an epoch's batches, and of its validation: the metrics of all workers."""
        if self._is_validating:
            return self._together("validation", logs, 1.0)
        if not self._is_training:
            return logs
        self._is_training = False
        passes.leave(self._job)  # `fit` may have left it early: others get the rest
        samples = float(self._job.samples_taken - self._taken) if self._dataset is not None else 1.0
        found = self._together("training", logs, samples)
        self.model.optimizer.steps.pull()
        return found

    def last_seen(self, what: str, default: dict[str, Any]) -> dict[str, Any]:
        """For an epoch without batches: its own numbers might be better than all before."""
        return dict(self._seen.get(what, default))

    def _together(self, what: str, logs: dict[str, Any], weight: float) -> dict[str, Any]:
        arrays = {name: np.asarray(keras.ops.convert_to_numpy(value), np.float64) for name, value in logs.items()}
        places = {name: [f"{name} {place}" for place in range(array.size)] for name, array in arrays.items()}
        own = {key: number for name in arrays for key, number in zip(places[name], arrays[name].flat, strict=True)}
        # Numbers that are not finite are in no mean: where all workers have such, each keeps its own.
        means = own | self._meet(what, {key: (float(number), weight) for key, number in own.items()})
        merged = {name: np.reshape([means[key] for key in places[name]], arrays[name].shape) for name in arrays}
        self._seen[what] = {name: value if value.ndim else float(value) for name, value in merged.items()}
        return self._seen[what]


def _has_graphs() -> bool:
    return bool(keras.backend.backend() == "tensorflow")


def _forget_last(history: Any, names: Iterable[str]) -> None:
    """The last epoch was not read."""
    history.epoch.pop()
    for name in names:
        history.history[name].pop()
