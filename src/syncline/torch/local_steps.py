"""`--sync-every H`: the user's optimizer makes H local steps, then their delta is pushed.

In `sync` the servers add the mean of all workers' deltas to the parameters. In `bounded` and `async` they add each
worker's delta in full when it arrives. With `--outer` the mean, or each delta, is the gradient of a rule there. The
answer has the servers' new parameters, with the deltas of the other workers: from there the next steps begin.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence

import torch

from syncline.core.layout import Ranges, to_ranges
from syncline.core.rule import Rule, outer_of
from syncline.torch.parameters import FlatMemory, Tracked, as_tensor
from syncline.worker.job import Job
from syncline.worker.push_interval import PushInterval


class LocalSteps:
    """Counts local steps and sends their deltas. Optimizer state stays on the worker."""

    def __init__(self, job: Job, opt: torch.optim.Optimizer, prefix: str) -> None:
        self._job, self._opt, self._clock = job, opt, job.exchange.times
        self.interval = PushInterval(job, prefix)
        outer = outer_of(job.config)
        self.rule = outer or Rule("Add")  #: for registering the parameters
        self._is_gradient = outer is not None
        self._needs_closure = _needs_closure(opt)
        self._steps, self._weight = 0, 0.0
        self._tracked: Sequence[Tracked] = ()
        job.before_rest(self.flush)
        if not job.in_rounds:  # at a barrier, too: nothing waits for the other workers
            job.before_settle(self.flush)
        job.boundary.hold_back(lambda: self._steps > 0)

    def begin(
        self, tracked: Sequence[Tracked], flat: FlatMemory, synchronise: Callable[[float, Ranges], None]
    ) -> None:
        """The flat memory holds the parameters of the last answer, the base of deltas."""
        self._tracked, self._flat, self._synchronise = tracked, flat, synchronise

    def step(
        self,
        weight: float,
        scale: torch.Tensor | None,
        overflow: bool,
        clip_norm: float | None,
        closure: Callable[[], float] | None = None,
    ) -> None:
        """One local step, and a push if it is the last of H. `closure`: for optimizers that evaluate it."""
        parameters = [p for group in self._opt.param_groups for p in group["params"] if p.grad is not None]
        if not overflow:
            if scale is not None:
                torch._foreach_mul_([p.grad for p in parameters], scale)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            with _scaled(self._opt, self._job.lr_factor):
                self._opt.step(closure) if self._needs_closure else self._opt.step()
        self._steps += 1
        self._weight += weight
        self._job.stepped()
        if self._steps >= self.interval.num_steps:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Pushes the delta of the steps since the last push, if any, and takes the new parameters."""
        if not self._steps:
            return
        self._job.validation.before_average()
        exchange, layout, num_steps = self._job.exchange, self._job.exchange.layout, self._steps
        ends = [item.tensor.detach().to("cpu") for item in self._tracked]  # waits for a GPU: that is computing
        self._clock.lap("compute")
        self._clock.num_steps += num_steps - 1  # the commit counts as one
        for position, (item, end) in enumerate(zip(self._tracked, ends, strict=True)):
            segment, index = layout.where[item.name]
            arena = exchange.arena(segment.index)
            target = as_tensor(arena, segment.offsets[index], item.tensor.shape, item.tensor.dtype)
            start = self._flat.view(position)
            # A rule descends along its gradient, so the gradient is the negative delta.
            torch.sub(*((start, end) if self._is_gradient else (end, start)), out=target)
        weight, self._steps, self._weight = self._weight, 0, 0.0
        pushed = to_ranges(layout.parameter_id(item.name) for item in self._tracked)
        self._synchronise(weight, pushed + self.interval.collect())
        self.interval.pushed(num_steps)
        self._job.pushed_local_steps()


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` cannot be called without one, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@contextlib.contextmanager
def _scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiplies the learning rates for one step; the script and its schedulers see them unchanged."""
    rates = [] if factor == 1.0 else [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for group, rate in rates:
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in rates:
            group["lr"] = rate
