"""`DistributedOptimizer`: a Keras optimizer whose rule runs on the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from syncline.errors import ConfigError
from syncline.keras import backends
from syncline.keras.backends import to_host
from syncline.keras.rules import why_on_worker
from syncline.keras.steps import KerasSteps
from syncline.keras.variables import value_of
from syncline.worker.current import current_job, has_current_job
from syncline.worker.job import Job


@keras.saving.register_keras_serializable(package="syncline")
class DistributedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc, unused-ignore]
    """Wraps a Keras optimizer: each step pushes this worker's gradients and takes the job's new parameters.

    The rules of SGD, Adam, AdamW, RMSprop and Adagrad run on the servers. Other optimizers, and options that servers
    do not have, run on the worker, which pushes what they have changed; so does `--sync-every`. `learning_rate` may
    be set at any time: it travels with every step. `buffers`: variables that are not trained, such as
    BatchNorm's statistics, are the chief's (`"chief"`) or the workers' mean (`"mean"`) at the end of an epoch.
    """

    def __init__(
        self, optimizer: Any, *, job: Job | None = None, buffers: str = "chief", name: str | None = None
    ) -> None:
        _check(optimizer, buffers)
        super().__init__(learning_rate=0.0, name=name or f"distributed_{optimizer.name}")
        self.inner_optimizer = optimizer
        self.buffer_mode = buffers
        self._steps = KerasSteps(job or current_job())

    # -- registering --------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Any]) -> None:
        """As Keras has it; the variables get the job's values, which at the start are the chief's."""
        if self.built:
            return
        variables = list(variables)
        if not variables:
            raise ConfigError(f"DistributedOptimizer: {NOT_BUILT}")
        _check_types(variables)
        inner = self.inner_optimizer
        reason = "--sync-every is set" if self._steps.job.config.steps_locally else why_on_worker(inner, variables)
        if reason:
            inner.build(variables)
        super().build(variables)
        with backends.current().outside():
            _check_values(variables)
            self._steps.begin(variables, inner, reason)

    @property
    def steps(self) -> KerasSteps:
        """What the callback uses."""
        return self._steps

    @property
    def variables(self) -> list[Any]:
        return [*self._variables, *self.inner_optimizer.variables]

    # -- stepping -----------------------------------------------------------------------------------------

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Makes a step of the job with these gradients."""
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        elif not self.built:
            is_eager = not backends.current().is_traced()
            before = [to_host(variable) for variable in trainable_variables] if is_eager else []
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
            self._steps.mind_late_build(before)
        self._check_variables_are_known(trainable_variables)
        backend = backends.current()
        pairs = [(g, v) for g, v in zip(grads, trainable_variables, strict=True) if g is not None]
        if not pairs:
            raise ConfigError(
                "none of the gradients given to the optimizer has a value: does the loss use the model?"
            )
        steps, inner = self._steps, self.inner_optimizer
        before = [value_of(variable) for variable in inner.variables] if backend.has_extra_steps() else []
        if steps.runs_on_worker:
            inner.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
            if backend.is_in_xla():
                steps.wait_for_callback()
                return
            values = [value_of(variable) for variable in steps.variables]
            counts = steps.call_out(steps.local_step, [*values, *steps.buffers.values()])
            _undo_unless(counts, inner.variables, before)
            return
        gradients = [backend.dense(gradient) for gradient, _ in pairs]
        names = [steps.name_at(self._get_variable_index(variable)) for _, variable in pairs]
        rate = keras.ops.cast(inner.learning_rate, "float32")
        if backend.is_in_xla():
            steps.keep(names, gradients, rate)
        else:
            counts = steps.call_out(steps.exchange_of(names), [*gradients, rate, *steps.buffers.values()])
        inner._iterations.assign_add(1)
        if before:
            _undo_unless(counts, inner.variables, before)

    # -- as Keras' optimizers have it ---------------------------------------------------------------------

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        return self.inner_optimizer.iterations

    def scale_loss(self, loss: Any) -> Any:
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"optimizer": inner, "buffers": self.buffer_mode, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Of a saved model. In a process without a job this is the wrapped optimizer itself."""
        inner = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        return cls(inner, buffers=config["buffers"], name=config["name"]) if has_current_job() else inner


def _undo_unless(counts: Any, variables: Sequence[Any], before: Sequence[Any]) -> None:
    """After a step that does not count, the optimizer on the worker is as before."""
    for variable, value in zip(variables, before, strict=bool(before)):
        variable.assign(keras.ops.where(counts > 0, value_of(variable), value))


def _check(optimizer: Any, buffers: str) -> None:
    backends.current()  # or a ConfigError: there are backends that cannot train
    if isinstance(optimizer, DistributedOptimizer):
        raise ConfigError("DistributedOptimizer: the optimizer is one already; wrap it once")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(f"DistributedOptimizer: {NO_LOSS_SCALE}")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"DistributedOptimizer takes a keras.optimizers optimizer, not {type(optimizer).__name__}; "
            'e.g. keras.optimizers.Adam(1e-3) for "adam"'
        )
    if optimizer.built:
        raise ConfigError("DistributedOptimizer: the optimizer was used before; wrap a new one")
    if buffers not in ("chief", "mean"):
        raise ConfigError(f"buffers = {buffers!r}: must be one of chief, mean")


NOT_BUILT = (
    "the model is not built, or all of it is frozen, so there is nothing that workers could train; call "
    "model.build(input_shape), begin the model with keras.Input(shape), or set model.trainable = True"
)
NO_LOSS_SCALE = (
    "mixed_float16 scales the loss, so workers would skip different steps; use "
    'keras.mixed_precision.set_global_policy("mixed_bfloat16"), which needs no scaling, or "float32"'
)


def _check_types(variables: Sequence[Any]) -> None:
    if keras.config.dtype_policy().name == "mixed_float16":
        raise ConfigError(f"DistributedOptimizer: {NO_LOSS_SCALE}")
    for variable in variables:
        kind = keras.backend.standardize_dtype(variable.dtype)
        if kind not in ("float32", "float64"):
            raise ConfigError(
                f"DistributedOptimizer: {getattr(variable, 'path', variable.name)} is {kind}, and parameters on "
                'servers must be float32 or float64; with the policy "mixed_bfloat16" variables are float32 and '
                "layers compute in bfloat16"
            )


def _check_values(variables: Sequence[Any]) -> None:
    """The values are there, and of the types that Keras tells."""
    for variable in variables:
        name, kind = getattr(variable, "path", variable.name), keras.backend.standardize_dtype(variable.dtype)
        value = to_host(variable)
        if value.shape != tuple(variable.shape):  # TensorFlow makes it while it traces a graph
            raise ConfigError(
                f"DistributedOptimizer: {name} has no value yet, since the model was not built before its first "
                "step; call model.build(input_shape), or begin the model with keras.Input(shape)"
            )
        if str(value.dtype) != kind:
            raise ConfigError(
                f"DistributedOptimizer: {name} has the type {kind}, and JAX has made it {value.dtype}; set "
                "JAX_ENABLE_X64=1 before the start, or train in float32"
            )
