"""The steps of an adapter whose arrays are in host memory: Keras, TensorFlow, JAX, NumPy.

`step` pushes gradients, and the rule runs on the servers. `local_step` pushes what an optimizer of the worker has
changed: after every step, or after H steps with `--sync-every H`. No framework is imported here.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from syncline.core.layout import ITEM_BYTES, Ranges
from syncline.core.policy import policy_of
from syncline.core.rule import Option, Rule, outer_of
from syncline.errors import ConfigError
from syncline.worker import host_state
from syncline.worker.arrays import Bytes, dtype_of
from syncline.worker.exchange.commit import Push, ServersTicket
from syncline.worker.exchange.targets import FlatTarget
from syncline.worker.host_memory import HostArray, HostMemory, Rules, copied, norm
from syncline.worker.job import Job
from syncline.worker.metrics import with_factor
from syncline.worker.nominal import NominalWeight
from syncline.worker.push_interval import PushInterval

Options = Mapping[str, Any]  #: e.g. {"lr": 0.05}; or options by parameter


class HostOptimizer:
    """`rules=None`: the optimizer runs on the worker, and `local_step` pushes its changes.

    `values` are the job's parameters: every step, pull, rest and barrier may overwrite these same arrays. An adapter
    that keeps its own copy takes what `step` or `local_step` returns, and asks `new_values` before the next step.
    """

    def __init__(
        self,
        job: Job,
        named: Mapping[str, HostArray],
        rules: Rules | None,
        *,
        buffers: Mapping[str, HostArray] | None = None,
        buffer_mode: str = "chief",
        clip_norm: float | None = None,
        prefix: str = "",
    ) -> None:
        """`buffers`: e.g. BatchNorm's statistics, the chief's or the workers' mean after every push.
        `clip_norm`: clips the round's mean gradient; without rounds, this worker's. Not for local steps.
        """
        if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
            raise ConfigError(f"clip_norm = {clip_norm}: it must be more than 0")
        if buffer_mode not in ("chief", "mean"):
            raise ConfigError(f"buffers = {buffer_mode!r}: must be one of chief, mean")
        config = job.config
        self._job, self._exchange, self._clip_norm = job, job.exchange, clip_norm
        self._in_rounds = policy_of(config).in_rounds
        self.runs_on_worker = rules is None or config.steps_locally
        outer = outer_of(config)
        self._is_gradient = outer is not None
        chosen = (outer or Rule("Add")) if rules is None or config.steps_locally else rules
        prefix = free_prefix(job, named, prefix)
        self._memory = HostMemory(job, named, chosen, prefix)
        self.values = self._memory.values
        self._prefix = prefix
        self._local = _LocalSteps(job, prefix) if self.runs_on_worker else None
        self.add_buffers(buffers or {}, buffer_mode)
        self._tickets: collections.deque[ServersTicket] = collections.deque()
        self._is_new = self.runs_on_worker  # `values` have changed, and the adapter was not told
        self._options = _CurrentOptions(self._memory, prefix) if not self.runs_on_worker else None
        self._begin = StepBegin(job)
        self._nominal = NominalWeight(job)
        self._since_pull = 0  # with --pull-every: pushes since the last new parameters
        self._see_to_hooks()

    def add_buffers(self, buffers: Mapping[str, HostArray], buffer_mode: str = "chief") -> None:
        """For an adapter that learns of its model's buffers later: registers them, once."""
        self.buffer_mode = buffer_mode
        self._buffers = _Buffers(self._job, buffers, buffer_mode, self._prefix)
        self.buffer_values = self._buffers.values
        also = {**self._buffers.flats, **(self._local.interval.flats if self._local is not None else {})}
        self._target = FlatTarget({self._memory.segment.index: self._memory.flat, **also})

    def _see_to_hooks(self) -> None:
        job, alive = self._job, weakref.ref(self)

        def calling(action: Callable[[HostOptimizer], object]) -> Callable[[], None]:
            """The job does not keep the optimizer alive."""

            def call() -> None:
                if (own := alive()) is not None:
                    action(own)

            return call

        if self._local is not None:
            job.before_rest(calling(HostOptimizer._flush_late))
            if not job.in_rounds:  # at a barrier too: nothing waits for the other workers
                job.before_settle(calling(HostOptimizer._flush_late))
            local = self._local
            job.boundary.hold_back(lambda: local.num_steps > 0)
        job.before_settle(calling(HostOptimizer._settle))
        if job.config.pull_every > 1:
            job.before_settle(calling(HostOptimizer._catch_up))
        if self._local is None or not self._in_rounds:  # in rounds local values are its own until the next average
            job.after_wait(calling(HostOptimizer._pull_late))
        if self._options is not None:
            options = self._options
            job.tells_rates(lambda: options.rates)

    # -- rules on the servers -----------------------------------------------------------------------------

    def step(
        self,
        gradients: Mapping[str, HostArray],
        *,
        options: Options | None = None,
        weight: float | None = None,
        buffers: Mapping[str, HostArray] | None = None,
    ) -> dict[str, HostArray]:
        """Pushes gradients, of any subset of names, and returns `values`, the new parameters.

        `options`: hyperparameters as they are now, for all parameters or by name. `weight`: this worker's share in
        the round's mean; by default the samples that a loader of ours has handed out since the last step, else 1.
        """
        if self._options is None:
            raise ConfigError("step(): the optimizer runs on the worker; give its result to local_step()")
        weight = self._begin.begin(weight, id(self))
        self._options.set(options)
        if self._job.life.number > 1:
            self._job.uses_rates(self._options.rates)
        self._memory.check(gradients, "a gradient")
        pushed, clip = self._memory.ids_of(gradients), self._clip_norm
        self._exchange.times.lap("compute")
        is_finite = self._memory.fill(gradients)
        if clip is not None and not self._in_rounds:
            # Without rounds there is no mean: the push is clipped here, by its own norm.
            self._clip(gradients, clip)
            clip = None
        push = Push(
            pushed=tuple(sorted(pushed + self._buffers.collect(buffers))),
            weight=weight,
            nominal=self._nominal.of(weight, self._job.samples.batch_size),
            clip_norm=clip,
            overrides=self._options.overrides(self._job.lr_factor),
            finite=pushed if is_finite else (),
        )
        self._since_pull += 1
        brings = self._since_pull >= self._job.config.pull_every
        self._since_pull = 0 if brings else self._since_pull
        self._commit(push, brings=brings, window=self._job.config.window)
        self._job.stepped()
        self._is_new = False
        self._job.leave_if_asked()
        return self.values

    def _clip(self, gradients: Mapping[str, HostArray], clip: float) -> None:
        factor = min(1.0, clip / (norm(gradients) + 1e-6))
        if factor < 1.0:
            for target in self._memory.in_arena(list(gradients)).values():
                target *= target.dtype.type(factor)

    def _commit(self, push: Push, *, brings: bool, window: int) -> None:
        self._tickets.append(self._exchange.commit(push, self._target if brings else None))
        while len(self._tickets) > window:
            self._tickets.popleft().wait()

    def _settle(self) -> None:
        if self._tickets:
            self._is_new = True
        while self._tickets:
            self._tickets.popleft().wait()

    # -- the optimizer on the worker ----------------------------------------------------------------------

    def local_step(
        self,
        parameters: Mapping[str, HostArray],
        *,
        weight: float | None = None,
        buffers: Mapping[str, HostArray] | None = None,
    ) -> dict[str, HostArray] | None:
        """The worker's optimizer has made a step, and `parameters`, all of them, are its result.

        Pushes the change when it is due. Returns the parameters to go on from; None: go on with your own.
        """
        local = self._local
        if local is None:
            raise ConfigError("local_step(): the rule runs on the servers; give gradients to step()")
        weight = self._begin.begin(weight, id(self))
        self._memory.check(parameters, "the value")
        if missing := self.values.keys() - parameters.keys():
            raise ConfigError(f"local_step() needs all parameters; {min(missing)!r} is missing")
        local.num_steps += 1
        local.weight += weight
        self._job.stepped()
        is_due = local.num_steps >= local.interval.num_steps
        if is_due:
            self._flush(parameters, buffers)
            local.starts, self._is_new = None, False
        else:
            local.keep(parameters, buffers)
        self._job.leave_if_asked()
        return self.values if is_due else None

    def _flush(self, ends: Mapping[str, HostArray], buffers: Mapping[str, HostArray] | None) -> None:
        """Pushes the change since the last push; `values` are the new parameters then."""
        local = self._local
        assert local is not None
        self._job.validation.before_average()
        clock, num_steps, weight = self._exchange.times, local.num_steps, local.weight
        clock.lap("compute")
        clock.num_steps += num_steps - 1  # the commit counts as one
        starts = self.values if local.starts is None else local.starts
        # A rule descends along its gradient, so the gradient is the negative change.
        self._memory.fill_difference(*((starts, ends) if self._is_gradient else (ends, starts)))
        pushed = tuple(sorted(self._memory.ids + self._buffers.collect(buffers) + local.interval.collect()))
        local.num_steps, local.weight = 0, 0.0
        # The change of short batches is small by itself: it counts in full.
        self._commit(Push(pushed=pushed, weight=weight, nominal=weight or 1.0), brings=True, window=0)
        local.interval.pushed(num_steps)
        if self._job.config.steps_locally:
            self._job.pushed_local_steps()

    def _flush_late(self) -> None:
        """Before a rest, a barrier or the end: pushes local steps. The adapter does not know of it yet."""
        local = self._local
        if local is not None and local.num_steps:
            ends, buffers = local.take_kept()
            self._flush(ends, buffers)
            local.starts, self._is_new = ends, True

    # -- values -------------------------------------------------------------------------------------------

    def new_values(self) -> dict[str, HostArray] | None:
        """`values`, if something other than a step has changed them since the last step: a rest, a wait, the end of
        an epoch. The adapter goes on from them. None: it goes on with what it has.
        """
        if not self._is_new or (self._local is not None and self._local.num_steps):
            return None
        self._is_new = False
        if self._local is not None:
            self._local.starts = None
        return self.values

    def pull(self) -> dict[str, HostArray]:
        """The newest parameters, e.g. before validation or saving. The worker goes on from them."""
        self._pull_late()
        self._is_new = False
        if self._local is not None:
            self._local.starts = None
        return self.values

    def _pull_late(self) -> None:
        self._settle()
        self._flush_late()
        if self._local is not None and self._local.starts is None:
            self._local.starts = copied(self.values)  # what the adapter goes on from, if it does not ask
        slices = [part for part in self._exchange.layout.slices() if self._target.wants(part)]
        self._exchange.pull(slices, self._target, None)
        self._since_pull, self._is_new = 0, True

    def _catch_up(self) -> None:
        """At a rest, a barrier and the end: takes the new parameters that --pull-every has left out."""
        if self._since_pull:
            self._pull_late()

    def state(self) -> dict[str, dict[str, HostArray]]:
        """The optimizer state on the servers, by parameter and key."""
        self._settle()
        return host_state.read(self._exchange, self._memory)


class StepBegin:
    """What every step begins with, and its weight."""

    def __init__(self, job: Job) -> None:
        self._job, self._taken = job, job.samples_taken  # at the last step

    def begin(self, weight: float | None, committer: int) -> float:
        """The weight is by default the number of samples that a loader of ours has handed out since the last step,
        else 1.
        """
        job = self._job
        job.commits(committer)
        if not job.checkpoints.resume.is_over:
            job.checkpoints.resume.begins_step()
        taken, self._taken = job.samples_taken - self._taken, job.samples_taken
        weight = float(max(taken, 0) or 1) if weight is None else float(weight)
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weight = {weight}: it must be a number from 0 on")
        return weight


class _LocalSteps:
    """Local steps since the last push."""

    def __init__(self, job: Job, prefix: str) -> None:
        self.interval = PushInterval(job, prefix)
        self.num_steps, self.weight = 0, 0.0
        self.starts: Mapping[str, HostArray] | None = None  #: what the next change counts from; None: `values`
        self._kept: dict[str, HostArray] = {}  # the result of the last step that was not pushed
        self._kept_buffers: dict[str, HostArray] | None = None

    def keep(self, parameters: Mapping[str, HostArray], buffers: Mapping[str, HostArray] | None) -> None:
        """A rest may push them, and the adapter may overwrite its own memory."""
        if not self._kept:
            self._kept = copied(parameters)
        else:
            for name, array in self._kept.items():
                array[...] = parameters[name]
        self._kept_buffers = None if buffers is None else copied(buffers)

    def take_kept(self) -> tuple[dict[str, HostArray], dict[str, HostArray] | None]:
        kept, self._kept = self._kept, {}
        return kept, self._kept_buffers


class _CurrentOptions:
    """Hyperparameters of the rules as they are now."""

    def __init__(self, memory: HostMemory, prefix: str) -> None:
        self._segment, self._prefix = memory.segment, prefix
        self._groups = memory.groups
        self._changed: dict[int, dict[str, Option]] = {}  # by group
        self._last: Options | None = None
        self.rates = self._rates()

    def set(self, options: Options | None) -> None:
        if options is None or options == self._last:
            return
        wanted: dict[int, dict[str, Any]] = {}
        if options and all(isinstance(value, Mapping) for value in options.values()):
            for name, some in options.items():
                if name not in self._groups:
                    raise ConfigError(f"options of {name!r}: there is no such parameter")
                group = self._groups[name]
                if wanted.setdefault(group, dict(some)) != dict(some):
                    raise ConfigError(
                        f"options of {name!r} differ from those of another parameter with the same Rule object; "
                        "give each a Rule object of its own"
                    )
        else:
            wanted = {group: dict(options) for group in range(len(self._segment.rules))}
        changed = dict(self._changed)
        for group, some in wanted.items():
            registered = self._segment.rules[group]
            fresh = Rule(registered.name, **some).options  # or a RuleError
            both = {**changed.get(group, {}), **fresh}
            changed[group] = {key: value for key, value in both.items() if registered.options.get(key) != value}
        self._changed, self._last = changed, dict(options)
        self.rates = self._rates()

    def _rates(self) -> dict[str, float]:
        found = {}
        for group, rule in enumerate(self._segment.rules):
            rate = self._changed.get(group, {}).get("lr", rule.options.get("lr"))
            if isinstance(rate, int | float):
                found[f"{self._prefix}{group}"] = float(rate)
        return found

    def overrides(self, factor: float) -> list[tuple[int, int, Mapping[str, Option]]]:
        """What differs from the registered rules, with the job's factor on learning rates."""
        found = []
        for group, rule in enumerate(self._segment.rules):
            if changed := with_factor(self._changed.get(group, {}), rule.options, factor):
                found.append((self._segment.index, group, changed))
        return found


class _Buffers:
    """Buffers live on the servers under the rule `Assign`."""

    def __init__(self, job: Job, given: Mapping[str, HostArray], mode: str, prefix: str) -> None:
        self._job, self._mode = job, mode
        named = {name: array for name, array in given.items() if array.size and dtype_of(array) in ITEM_BYTES}
        if left_out := sum(bool(array.size) for array in given.values()) - len(named):
            job.notice(f"{left_out} buffers of a type that servers cannot host are not synchronised")
        self._memory = HostMemory(job, named, Rule("Assign"), prefix) if named else None
        self.values = self._memory.values if self._memory is not None else {}
        self.flats: dict[int, Bytes] = {}
        if self._memory is not None and (mode == "mean" or not job.is_chief):
            self.flats = {self._memory.segment.index: self._memory.flat}
        self._generation = -1  # the servers of this one have got all buffers from the chief

    def collect(self, given: Mapping[str, HostArray] | None) -> Ranges:
        """Copies this worker's buffers into the arena, if they count; returns their ids."""
        if given is None or self._memory is None or not (self._mode == "mean" or self._job.is_chief):
            return ()
        known = {name: array for name, array in given.items() if name in self.values}
        self._memory.check(known, "the buffer")
        if not self.flats:  # the chief's own are the job's, and nothing else writes `values`
            known = self._changed(known)
        if not known:
            return ()
        self._memory.fill(known)
        return self._memory.ids_of(known)

    def _changed(self, known: Mapping[str, HostArray]) -> dict[str, HostArray]:
        """Those that the servers do not have: the weights of frozen layers stay the same in every step. Servers that
        were lost may have got older ones back, so in each generation all are pushed once.
        """
        generation = self._job.generation
        is_new, self._generation = generation != self._generation, generation
        found = {n: array for n, array in known.items() if is_new or not np.array_equal(array, self.values[n])}
        for name, array in found.items():
            self.values[name][...] = array
        return found


def free_prefix(job: Job, named: Mapping[str, HostArray], prefix: str = "") -> str:
    """A prefix that keeps these names apart from those of another model of this job."""
    count, found = 1, prefix
    while any(found + name in job.names_taken for name in named):
        count += 1
        found = f"{prefix}model{count}."
    job.names_taken.update({found + name: _gone for name in named})
    return found


def _gone() -> None:
    """Names of host arrays are never shared with another model."""
