"""Warns once about batches of unequal size from foreign loaders: `step(weight=n)` is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from syncline.worker.job import Job


class _Counter:
    """A forward pre-hook that records the batch dimension of a model's input during training."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()  # since the last step

    def __call__(self, module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and module.training:
            tensor = _first_tensor((*given, *named.values()))
            if tensor is not None and tensor.dim():
                self.sizes.add(int(tensor.shape[0]))

    # A copied or pickled model has a hook that does nothing and does not refer to the job.

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _first_tensor(values: Sequence[Any]) -> torch.Tensor | None:
    """The first tensor among these, or in lists or dicts of them."""
    for value in values:
        if isinstance(value, Mapping):
            value = next((one for one in value.values() if isinstance(one, torch.Tensor)), None)
        elif isinstance(value, list | tuple):
            value = next((one for one in value if isinstance(one, torch.Tensor)), None)
        if isinstance(value, torch.Tensor):
            return value
    return None


class BatchSizes:
    """Of one optimizer. In rounds every worker's gradient counts by its weight, 1 by default."""

    def __init__(self, job: Job, model: torch.nn.Module | None, *, in_rounds: bool) -> None:
        self._job = job
        self._counter = _Counter()
        self._last: set[int] = set()
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        if in_rounds and model is not None and not isinstance(model, torch.jit.ScriptModule):
            self._hook = model.register_forward_pre_hook(self._counter, with_kwargs=True)

    def at_step(self, *, is_weighted: bool, num_taken: int) -> None:
        """A step is made, with an explicit weight or with this many samples of our loader."""
        if self._hook is None:
            return
        sizes, last = self._counter.sizes, self._last
        self._counter.sizes, self._last = set(), sizes
        if is_weighted or num_taken > 0:
            self._end()
        elif sizes and last and sizes != last and self._job.world_size > 1:
            one, other = (", ".join(str(size) for size in sorted(each)) for each in (last, sizes))
            self._end()
            self._job.notice(
                f"the batches of {self._job.name} have unequal sizes ({one} samples in one step, {other} in the "
                "next), and each counts the same in the mean of the workers: pass the number of samples, "
                "opt.step(weight=n), or use syncline.torch.DataLoader, which does it for you"
            )

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
