"""`--sync-every H`: the user's optimizer makes H local steps, then the workers' deltas are averaged.

The servers add the mean to the parameters, or (`--outer`) use it as the gradient of their own rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from syncline.core.layout import Ranges, to_ranges
from syncline.core.rule import Rule, outer_of
from syncline.torch.parameters import FlatMemory, Tracked, as_tensor
from syncline.worker.job import Job


class LocalSteps:
    """Counts local steps and sends their deltas. Optimizer state stays on the worker."""

    def __init__(self, job: Job, opt: torch.optim.Optimizer) -> None:
        self._job, self._opt, self._every = job, opt, job.config.sync_every
        outer = outer_of(job.config)
        self.rule = outer or Rule("Add")  #: for registering the parameters
        self._is_gradient = outer is not None
        self._steps, self._weight = 0, 0.0
        self._tracked: Sequence[Tracked] = ()
        job.before_rest(self.flush)
        job.boundary.hold_back(lambda: self._steps > 0)

    def begin(
        self, tracked: Sequence[Tracked], flat: FlatMemory, synchronise: Callable[[float, Ranges], None]
    ) -> None:
        """The flat memory holds the last averaged parameters, the base of deltas."""
        self._tracked, self._flat, self._synchronise = tracked, flat, synchronise

    def step(self, weight: float, scale: torch.Tensor | None, overflow: bool, clip_norm: float | None) -> None:
        parameters = [p for group in self._opt.param_groups for p in group["params"] if p.grad is not None]
        if not overflow:
            if scale is not None:
                torch._foreach_mul_([p.grad for p in parameters], scale)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            with _scaled(self._opt, self._job.lr_factor):
                self._opt.step()
        self._steps += 1
        self._weight += weight
        self._job.stepped()
        if self._steps == self._every:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Sends the deltas of the steps since the last averaging, if any."""
        if not self._steps:
            return
        self._job.validation.before_average()
        exchange = self._job.exchange
        exchange.times.lap("compute")
        exchange.times.num_steps += self._steps - 1  # the commit counts as one
        layout = exchange.layout
        for position, item in enumerate(self._tracked):
            segment, index = layout.where[item.name]
            arena = exchange.arena(segment.index)
            target = as_tensor(arena, segment.offsets[index], item.tensor.shape, item.tensor.dtype)
            start, end = self._flat.view(position), item.tensor.detach().to("cpu")
            # A rule descends along its gradient, so the gradient is the negative delta.
            torch.sub(*((start, end) if self._is_gradient else (end, start)), out=target)
        weight, self._steps, self._weight = self._weight, 0, 0.0
        self._synchronise(weight, to_ranges(layout.parameter_id(item.name) for item in self._tracked))


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
