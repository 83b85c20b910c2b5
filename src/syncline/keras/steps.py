"""The steps of a Keras optimizer: from the framework's variables to the job and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from syncline.core.rule import Rule
from syncline.errors import ConfigError
from syncline.keras import backends, passes
from syncline.keras.backends import to_host
from syncline.keras.buffers import SharedBuffers
from syncline.keras.rules import check_on_worker, rules_of
from syncline.keras.variables import digest_of, names_of
from syncline.keras.wrapped import WrappedOptimizer
from syncline.keras.xla import LeftGradients
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
        self.buffers = SharedBuffers()
        self._failure: BaseException | None = None  # of a step that was called from a graph or compiled code
        self._left = LeftGradients()
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
        self.wrapped = wrapped = WrappedOptimizer(self.job, inner, runs_on_worker=bool(reason))
        rules: dict[str, Rule] | None = None
        if not reason:
            rules = rules_of(inner, named, wrapped.rate)
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
        take = lambda: own.wrapped.remembered() if (own := alive()) is not None else None  # noqa: E731
        put_back = lambda saved: own.wrapped.put_back(saved) if (own := alive()) is not None else None  # noqa: E731
        self.job.state.add_part(f"keras optimizer {self._names[0]}", Part(take, put_back))
        if keras.backend.backend() != "jax":  # whose variables have no values inside of an epoch
            self.job.after_wait(lambda: own.take_new() if (own := alive()) is not None else None)

    def check_values(self) -> None:
        """Before `fit`: raises ConfigError if the script has set the model's weights, which the job does not have."""
        num_steps, given = self._given
        if num_steps != self.wrapped.num_steps:
            return  # a step has changed them
        if digest_of(map(keras.ops.convert_to_numpy, self.variables)) == given:
            return
        if not self.wrapped.has_averages:
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
    def runs_on_worker(self) -> bool:
        return self.host.runs_on_worker

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

    def exchange_of(self, names: Sequence[str]) -> Callable[[list[Any]], list[Any]]:
        """For gradients of these variables: what a step calls out to, with the learning rate and buffers behind."""

        def exchange(arrays: list[Any]) -> list[Any]:
            gradients, rate = dict(zip(names, arrays, strict=False)), float(arrays[len(names)])
            buffers = self.buffers.named(arrays[len(names) + 1 :])

            def step() -> Mapping[str, Any]:
                self._counted = passes.hand_out(self.job, id(self))
                if not self._counted:
                    return self.host.values
                self.wrapped.stepped(rate)
                self._mind_callback()
                return self.host.step(
                    gradients, options={"lr": rate}, buffers=buffers, weight=passes.weight(self.job)
                )

            return self._guarded(step)

        return exchange

    def local_step(self, arrays: list[Any]) -> list[Any]:
        """The optimizer has made its step: these are the parameters, and buffers behind."""
        own = dict(zip(self._names, arrays, strict=False))
        buffers = self.buffers.named(arrays[len(self._names) :])

        def step() -> Mapping[str, Any]:
            self._counted = passes.hand_out(self.job, id(self))
            if not self._counted:  # the optimizer has moved them nevertheless
                return self.host.values if self._resumes is None else self._resumes
            self.wrapped.stepped()
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
        if is_missing and self.job.world_size > 1 and self.wrapped.num_steps > 1 and not passes.has_several(self.job):
            self.job.notice(
                "fit runs without syncline.keras.Callback(): metrics are each worker's own, so EarlyStopping and the "
                "like may decide differently, every worker writes checkpoints, stop rules do not end fit, and a "
                "worker that starts again repeats epochs. Give fit(callbacks=[syncline.keras.Callback(), …])"
            )

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
        self._left.leave(names, gradients, rate)

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
        buffers, left = [to_host(value) for value in self.buffers.values()], self._left.found()
        if left is None:
            self.take(self.local_step([*(to_host(variable) for variable in self.variables), *buffers]))
            return
        names, arrays = left
        self.take(self.exchange_of(names)([*arrays, *buffers]))

    def note_buffers(self, values: Sequence[Any]) -> None:
        """Buffers for the next push, from a step that cannot see them."""
        if self._counted:
            self.buffers.note(values, is_chief=self.job.is_chief)

    def pull(self) -> None:
        """The job's newest parameters and buffers into the model."""
        self._give(self.host.pull())
        self.buffers.take()

    def take_new(self) -> None:
        """Parameters that have changed since the last step, by a rest or a wait."""
        values = self.host.new_values()
        if values is not None:
            self._give(values)

    def _give(self, values: Mapping[str, Any]) -> None:
        given = [values[name] for name in self._names]
        self.take(given)
        self._given, self._resumes = (self.wrapped.num_steps, digest_of(given)), None
