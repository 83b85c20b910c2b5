"""The steps of a Keras optimizer: from the framework's variables to the job and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from syncline.core.rule import Rule
from syncline.errors import ConfigError, StoreError
from syncline.keras import backends, passes
from syncline.keras.backends import to_host
from syncline.keras.rules import check_on_worker, rules_of
from syncline.keras.variables import digest_of, names_of, value_of
from syncline.worker.checkpoint.script_state import Part
from syncline.worker.host_memory import copied
from syncline.worker.host_optimizer import HostOptimizer
from syncline.worker.job import Job


class KerasSteps:
    """The steps of one optimizer: from the framework's variables to the job and back. Keras does not track it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._host: HostOptimizer | None = None
        self.variables: list[Any] = []
        self._buffer_variables: dict[str, Any] = {}
        self._noted: dict[str, Any] | None = None  # buffers that the step itself cannot see
        self._failure: BaseException | None = None  # of a step that was called from a graph or compiled code
        self._kept: tuple[list[str], list[Any], Any] | None = None  # XLA: names, gradients, learning rate
        self.waits = False  #: XLA compiled the step: the callback makes the exchange
        self._counted = True  # whether the last step was one of the job
        self._resumes: Mapping[str, Any] | None = None  # parameters behind a step on the worker that does not count
        self._given = (0, b"")  # steps until the model got the job's values, and the digest of those
        self.callback: Any = None  #: while `fit` runs with one

    def begin(self, variables: Sequence[Any], inner: Any, reason: str) -> None:
        """Registers the variables, and gives them the job's values."""
        self.variables = list(variables)
        self._names = names_of(self.variables)
        named = dict(zip(self._names, self.variables, strict=True))
        self._inner = inner
        self._num_steps, self._given_rate = 0, self.rate_now()
        self._last_rate = self._given_rate
        rules: dict[str, Rule] | None = None
        if not reason:
            rules = rules_of(inner, named, self._rate())
        else:
            check_on_worker(inner, reason, self.job.config)
        if reason and not self.job.config.steps_locally:
            self.job.notice(
                f"{type(inner).__name__} runs on the workers, which push what it has changed: {reason}. See "
                "docs/guides/keras.md for what this means"
            )
        arrays = {name: to_host(variable) for name, variable in named.items()}
        clip = getattr(inner, "global_clipnorm", None) if rules is not None else None
        self._host = host = HostOptimizer(self.job, arrays, rules, clip_norm=clip)
        self._give(host.values)
        # Without --window the job writes these arrays only inside of steps, pulls and waits.
        if rules is not None and not self.job.config.window:
            backends.current().adopt(self.variables, [host.values[name] for name in self._names])
        alive = weakref.ref(self)
        take = lambda: own._remembered() if (own := alive()) is not None else None  # noqa: E731
        put_back = lambda saved: own._put_back(saved) if (own := alive()) is not None else None  # noqa: E731
        self.job.state.add_part(f"keras optimizer {self._names[0]}", Part(take, put_back))
        if keras.backend.backend() != "jax":  # whose variables have no values inside of an epoch
            self.job.after_wait(lambda: own.take_new() if (own := alive()) is not None else None)

    def add_buffers(self, variables: Sequence[Any], mode: str) -> bool:
        """Variables of the model that are not trained, once: they get the chief's values. Returns whether it did."""
        if self._buffer_variables or not variables:
            return False
        self._buffer_variables = dict(zip(names_of(variables), variables, strict=True))
        arrays = {name: to_host(variable) for name, variable in self._buffer_variables.items()}
        self.host.add_buffers(arrays, mode)
        self.take_buffers()
        return True

    def check_values(self) -> None:
        """Before `fit`: raises ConfigError if the script has set the model's weights, which the job does not have."""
        num_steps, given = self._given
        if num_steps != self._num_steps:
            return  # a step has changed them
        if digest_of(map(keras.ops.convert_to_numpy, self.variables)) == given:
            return
        if not getattr(self._inner, "use_ema", False):  # there Keras itself sets averages at the end of fit
            raise ConfigError(
                "fit: the model's weights were changed since the job had them, e.g. by set_weights, load_weights or "
                "EarlyStopping(restore_best_weights=True), and the job would go on from its own. To train these "
                "weights, compile the model again with a new DistributedOptimizer"
            )
        self.pull()

    @property
    def host(self) -> HostOptimizer:
        if self._host is None:
            raise ConfigError("the optimizer is not built: call model.build(input_shape), then fit")
        return self._host

    @property
    def is_begun(self) -> bool:
        return self._host is not None

    @property
    def runs_on_worker(self) -> bool:
        return self.host.runs_on_worker

    @staticmethod
    def is_eager() -> bool:
        """Whether a step runs at once, and not later as a graph or compiled code."""
        return not backends.current().is_traced()

    def mind_late_build(self, before: Sequence[Any]) -> None:
        """The gradients of the first step are there already: were they computed from other values?"""
        now = [to_host(variable) for variable in self.variables] if before else []
        if any(not np.array_equal(one, other) for one, other in zip(before, now, strict=True)):
            self.job.notice(
                f"{self.job.name} computed its first gradients before it had the job's values. Call "
                "optimizer.build(model.trainable_variables) before the loop",
                is_own=True,
            )

    def name_at(self, index: int) -> str:
        return self._names[index]

    # -- the exchange -------------------------------------------------------------------------------------

    def buffers(self) -> list[Any]:
        """Buffers that travel with the step, where it can see them; Keras on JAX hands them over later."""
        if keras.backend.backend() == "jax":
            return []
        return [value_of(variable) for variable in self._buffer_variables.values()]

    def exchange_of(self, names: Sequence[str]) -> Callable[[list[Any]], list[Any]]:
        """For gradients of these variables: what a step calls out to, with the learning rate and buffers behind."""

        def exchange(arrays: list[Any]) -> list[Any]:
            gradients, rate = dict(zip(names, arrays, strict=False)), float(arrays[len(names)])
            buffers = self._buffers_in(arrays[len(names) + 1 :])

            def step() -> Mapping[str, Any]:
                self._counted = passes.hand_out(self.job, id(self))
                if not self._counted:
                    return self.host.values
                self._num_steps, self._last_rate = self._num_steps + 1, 0.0 if self._has_schedule else rate
                self._mind_callback()
                return self.host.step(
                    gradients, options={"lr": rate}, buffers=buffers, weight=passes.weight(self.job)
                )

            return self._guarded(step)

        return exchange

    def local_step(self, arrays: list[Any]) -> list[Any]:
        """The optimizer has made its step: these are the parameters, and buffers behind."""
        own = dict(zip(self._names, arrays, strict=False))
        buffers = self._buffers_in(arrays[len(self._names) :])

        def step() -> Mapping[str, Any]:
            self._counted = passes.hand_out(self.job, id(self))
            if not self._counted:  # the optimizer has moved them nevertheless
                return self.host.values if self._resumes is None else self._resumes
            self._num_steps += 1
            self._mind_callback()
            found = self.host.local_step(own, buffers=buffers, weight=passes.weight(self.job))
            found = own if found is None else found
            self._resumes = copied(found) if passes.comes_again(self.job) else None
            return found

        return self._guarded(step)

    def call_out(self, exchange: Callable[[list[Any]], list[Any]], tensors: Sequence[Any]) -> Any:
        """Makes the exchange, and takes its parameters. Returns 1 if the step counts, else 0."""
        backend = backends.current()
        if not backend.has_extra_steps():  # torch compiles this
            self.take(backend.call_out(exchange, tensors, self.variables))
            return 1

        def both(arrays: list[Any]) -> list[Any]:
            return [*exchange(arrays), np.array(self._counted, np.float32)]  # in this order

        like = [*self.variables, np.zeros((), np.float32)]
        *values, counts = backend.call_out(both, tensors, like)
        self.take(values)
        return counts

    def _mind_callback(self) -> None:
        """From the second step on: by then it is known whether there are several optimizers."""
        is_missing = self.callback is None and passes.is_read(self.job) == "fit"
        if is_missing and self.job.world_size > 1 and self._num_steps > 1 and not passes.has_several(self.job):
            self.job.notice(
                "fit runs without syncline.keras.Callback(): metrics are each worker's own, so EarlyStopping and the "
                "like may decide differently, every worker writes checkpoints, stop rules do not end fit, and a "
                "worker that starts again repeats epochs. Give fit(callbacks=[syncline.keras.Callback(), …])"
            )

    def _buffers_in(self, arrays: Sequence[Any]) -> dict[str, Any] | None:
        if not self._buffer_variables:
            return None
        return dict(zip(self._buffer_variables, arrays, strict=True)) if arrays else self._noted

    def _guarded(self, step: Callable[[], Mapping[str, Any]]) -> list[Any]:
        """An error in a graph or in compiled code would lose its type: the script's own thread raises it later."""
        is_graph = backends.is_from_graph()
        if self._failure is not None and not (self.callback is not None or passes.has_failed(self.job)):
            self._failure = None  # the script has seen it, and goes on
        if is_graph and self._failure is not None:
            return [self.host.values[name] for name in self._names]
        try:
            found = step()
        except BaseException as error:
            if not is_graph or not (self.callback is not None or passes.is_read(self.job)):
                raise
            self._failure = error
            passes.failed(self.job, error)
            found = self.host.values
        return [found[name] for name in self._names]

    def take(self, values: Sequence[Any]) -> None:
        backends.current().assign(self.variables, values)

    # -- for the callback, in the script's thread ---------------------------------------------------------

    def keep(self, names: list[str], gradients: Sequence[Any], rate: Any) -> None:
        """XLA: the compiled step leaves its gradients in variables, and the callback makes the exchange."""
        self.wait_for_callback()
        if self._kept is None:
            with backends.current().outside():
                places = [
                    keras.Variable(np.zeros(g.shape, g.dtype.as_numpy_dtype), trainable=False) for g in gradients
                ]
                self._kept = (names, places, keras.Variable(0.0, dtype="float32", trainable=False))
        for place, gradient in zip(self._kept[1], gradients, strict=True):
            place.assign(gradient)
        self._kept[2].assign(rate)

    def wait_for_callback(self) -> None:
        if self.callback is None:
            raise ConfigError(
                "the model is compiled with XLA (jit_compile), which cannot call the job from inside of a step: give "
                "fit(callbacks=[syncline.keras.Callback()]), which does it after each step, or "
                "compile(jit_compile=False); in a loop of your own leave jit_compile out of tf.function"
            )
        self.waits = True

    def finish(self) -> None:
        """After a batch: raises what has failed, and makes the exchange of a step that XLA compiled."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not self.waits:
            return
        buffers = [to_host(variable) for variable in self.buffers()]
        if self._kept is None:
            self.take(self.local_step([*(to_host(variable) for variable in self.variables), *buffers]))
            return
        names, places, rate = self._kept
        arrays = [*(to_host(place) for place in places), to_host(rate), *buffers]
        self.take(self.exchange_of(names)(arrays))

    def note_buffers(self, values: Sequence[Any]) -> None:
        """Buffers for the next push, from a step that cannot see them."""
        if self._counted and self._buffer_variables and (self.host.buffer_mode == "mean" or self.job.is_chief):
            self._noted = dict(zip(self._buffer_variables, map(np.asarray, values), strict=True))

    def take_buffers(self) -> None:
        """The job's buffers into the model."""
        for name, variable in self._buffer_variables.items():
            if name in self.host.buffer_values:
                variable.assign(self.host.buffer_values[name])

    def pull(self) -> None:
        """The job's newest parameters and buffers into the model."""
        self._give(self.host.pull())
        self.take_buffers()

    def take_new(self) -> None:
        """Parameters that have changed since the last step, by a rest or a wait."""
        values = self.host.new_values()
        if values is not None:
            self._give(values)

    def _give(self, values: Mapping[str, Any]) -> None:
        given = [values[name] for name in self._names]
        self.take(given)
        self._given, self._resumes = (self._num_steps, digest_of(given)), None

    # -- what is saved ------------------------------------------------------------------------------------

    def _rate(self) -> float:
        return float(to_host(self._inner.learning_rate))

    @property
    def _has_schedule(self) -> bool:
        return not isinstance(self._inner._learning_rate, keras.Variable)

    def rate_now(self) -> float:
        """The learning rate that a script has set; 0: a schedule sets it."""
        return 0.0 if self._has_schedule else self._rate()

    def set_rate(self, rate: float) -> None:
        """The job's learning rate, as the chief has it."""
        if not self._has_schedule and not np.isclose(self._rate(), rate, rtol=1e-6, atol=0.0):
            self._inner.learning_rate = rate

    def _remembered(self) -> dict[str, Any]:
        """The count of steps, for schedules; the learning rate; with an optimizer on the worker, its state."""
        found: dict[str, Any] = {"num_steps": self._num_steps, "given": self._given_rate}
        if keras.backend.backend() == "jax":  # whose variables have no values inside of an epoch
            return {**found, "rate": self._last_rate}
        state = [to_host(variable) for variable in self._inner.variables] if self.runs_on_worker else []
        return {**found, "rate": self.rate_now(), "state": state}

    def _put_back(self, saved: Any) -> None:
        if getattr(self._inner._iterations, "_value", 0) is None:
            return  # Keras on JAX, inside of an epoch: it was done before `fit` began
        try:
            state, own = saved.get("state", []), self._inner.variables
            if len(state) == len(own) and self.runs_on_worker:
                for variable, value in zip(own, state, strict=True):
                    variable.assign(value)
            self._num_steps = int(saved["num_steps"])
            self._inner._iterations.assign(self._num_steps)
            if saved["given"] != self._given_rate:
                self.job.notice(
                    f"uses learning_rate = {self._given_rate} of the script; the checkpoint had {saved['given']}"
                )
            elif saved["rate"]:
                self.set_rate(float(saved["rate"]))
            self.job.state.num_loaded += 1
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"what was saved of the optimizer does not fit this one: {error}; use --fresh"
            ) from error
