"""`DistributedGradientTape`: the mean gradient of all workers, for an optimizer that runs on each of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from syncline.core.rule import Rule
from syncline.errors import ConfigError
from syncline.keras import backends, on_tensorflow, passes
from syncline.keras.variables import names_of
from syncline.worker.current import current_job
from syncline.worker.job import Job
from syncline.worker.mean_gradients import MeanGradients
from syncline.worker.steps import CannotResume

#: Of each job: the means by the names of their variables. A loop makes a new tape in every step.
_means: weakref.WeakKeyDictionary[Job, dict[tuple[str, ...], MeanGradients]] = weakref.WeakKeyDictionary()
_errors: weakref.WeakKeyDictionary[Job, _GraphErrors] = weakref.WeakKeyDictionary()
_broadcasts: weakref.WeakKeyDictionary[Job, list[int]] = weakref.WeakKeyDictionary()


class DistributedGradientTape:
    """In place of `tf.GradientTape`, or around one: `gradient` returns the mean over the workers of the round.

    For `--policy sync`. Call `broadcast_variables` before the loop, so that all workers begin with the same values.
    Your optimizer runs on every worker, so a worker that dies cannot come back into the middle of the job: use
    `DistributedOptimizer` where workers may die.

    Inside of `tf.function`, loop over a dataset of ours or `job.steps(n)`: in other loops, what ends a worker
    (`syncline scale`, an error of the job) comes out of the function as an error of TensorFlow.
    """

    def __init__(self, tape: Any = None, **options: Any) -> None:
        if isinstance(tape, DistributedGradientTape):
            raise ConfigError("DistributedGradientTape: the tape is one already; wrap it once")
        self._tape = tf.GradientTape(**options) if tape is None else tape
        self._job = current_job()

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As `tf.GradientTape.gradient`, averaged over the workers; of gradients that are None, None."""
        _check_life(self._job)
        if not all(hasattr(source, "assign") for source in tf.nest.flatten(sources)):
            raise ConfigError(
                "DistributedGradientTape.gradient takes variables: a gradient by other tensors, such as a batch, is "
                "each worker's own and has no mean. Take it from a tf.GradientTape, e.g. for a gradient penalty"
            )
        if on_tensorflow.is_in_xla():
            raise ConfigError(
                "DistributedGradientTape: tf.function(jit_compile=True) is compiled by XLA, which cannot call the "
                "job from inside; leave jit_compile out, or compile only the forward pass"
            )
        found = self._tape.gradient(target, sources, *args, **kwargs)
        given = list(tf.nest.flatten(found))
        variables = list(tf.nest.flatten(sources))
        places = [place for place, gradient in enumerate(given) if gradient is not None]
        if not places:
            return found
        names = [names_of(variables)[place] for place in places]
        dense = [on_tensorflow.dense(given[place]) for place in places]
        for place, mean in zip(places, self._mean(names, dense), strict=True):
            given[place] = mean
        return tf.nest.pack_sequence_as(found, given)

    def _mean(self, names: Sequence[str], gradients: Sequence[Any]) -> list[Any]:
        job, known = self._job, _means.setdefault(self._job, {})
        if job not in _errors:
            _errors[job] = _GraphErrors(job)
        errors = _errors[job]

        def exchange(arrays: list[Any]) -> list[Any]:
            def mean() -> list[Any]:
                # First: only then the next batch is asked for, which raises what fails here.
                passes.hand_out(job, tuple(names))
                by_name = dict(zip(names, arrays, strict=True))
                if tuple(names) not in known:
                    _mind_broadcast(job)
                    known[tuple(names)] = MeanGradients(job, by_name)
                means = known[tuple(names)].mean(by_name)
                return [means[name] for name in names]

            return errors.guarded(job, mean) or [np.zeros_like(array) for array in arrays]

        return on_tensorflow.call_out(exchange, gradients, gradients)


class _GraphErrors:
    """What ends a worker inside of a graph: an error, or the SystemExit of a worker that was asked to leave.
    TensorFlow would turn both into errors of its own. A loop of ours raises them when it asks for the next batch.
    """

    def __init__(self, job: Job) -> None:
        self._error: BaseException | None = None
        alive = weakref.ref(self)

        def raise_kept() -> None:
            if (own := alive()) is not None:
                own._raise_kept()

        for register in (job.samples.before_batch, job.before_rest, job.before_settle):
            register(raise_kept)

    def guarded(self, job: Job, step: Callable[[], list[Any]]) -> list[Any] | None:
        """The result of the step; None if it failed, or an earlier one of this batch did."""
        if self._error is not None:
            return None
        is_kept = backends.is_from_graph() and job.exchange.lease_acks.num_loops > 0
        try:
            return step()
        except BaseException as error:
            if not is_kept:
                raise
            self._error = error
            return None

    def _raise_kept(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def broadcast_variables(variables: Sequence[Any], job: Job | None = None) -> None:
    """Gives these variables, of a model or an optimizer, the values that the chief has. All workers call it."""
    job = job or current_job()
    _check_life(job)
    turns = _broadcasts.setdefault(job, [])
    turns.append(len(variables))
    names = [f"broadcast{len(turns)}.{name}" for name in names_of(variables)]
    if not names:
        return
    pairs = list(zip(names, variables, strict=True))
    values = job.kv.register([(name, variable.numpy()) for name, variable in pairs], Rule("Assign"))
    for name, variable in pairs:
        variable.assign(values[name])


def _mind_broadcast(job: Job) -> None:
    """Before the first mean gradient: the same change of different values gives different models."""
    if job.world_size > 1 and not any(_broadcasts.get(job, ())):
        job.notice(
            "the workers of a DistributedGradientTape have not called broadcast_variables, or their model was not "
            "built yet, so each may begin with values of its own. Call model.build(input_shape) and "
            "broadcast_variables(model.trainable_variables) before the loop"
        )


def _check_life(job: Job) -> None:
    """The parameters and the optimizer's state are on the workers only: a new process does not have them."""
    if job.life.number > 1 and job.life.step > 0:
        reason = (
            f"its script began again (life {job.life.number}), and the parameters of a DistributedGradientTape are "
            "on the other workers only. This worker leaves; other workers go on. Use "
            "syncline.tensorflow.DistributedOptimizer, whose parameters are on servers"
        )
        job.notice(reason, is_own=True)
        job.abandon()
        raise CannotResume(reason)
