"""torch's fused kernels, called without the optimizer around them, which takes longer than a small update itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

FUSED = frozenset({"Adam", "AdamW", "SGD"})
#: An update of at most this many numbers is made by one thread.
SMALL_ITEMS = 1 << 15
Tensors = list[torch.Tensor]


class FusedKernel:
    """One group's update in one call, once its optimizer has made the state; the state stays the optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._is_adamw = isinstance(optimizer, torch.optim.AdamW)
        self._parameters: Tensors = list(optimizer.param_groups[0]["params"])
        self._is_small = sum(parameter.numel() for parameter in self._parameters) <= SMALL_ITEMS
        self._state = optimizer.state
        self._lists: dict[str, Tensors] = {}

    def _list(self, key: str) -> Tensors | None:
        """A state tensor of all parameters; None when one of them does not have it yet."""
        if key not in self._lists:
            found = [self._state[p].get(key) if p in self._state else None for p in self._parameters]
            if any(tensor is None for tensor in found):
                return None
            self._lists[key] = [tensor for tensor in found if tensor is not None]
        return self._lists[key]

    def step(self, gradients: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> bool:
        """Updates all parameters; False, and nothing done, when the optimizer itself is needed."""
        update = self._sgd if self._is_sgd else self._adam
        count = torch.get_num_threads() if self._is_small else 1
        if count == 1:
            return update(list(gradients), settings)
        # The kernels share out even a few numbers among all threads; to meet them takes longer than to do it alone.
        torch.set_num_threads(1)
        try:
            return update(list(gradients), settings)
        finally:
            torch.set_num_threads(count)

    def _sgd(self, gradients: Tensors, settings: Mapping[str, Any]) -> bool:
        momentum = settings["momentum"]
        buffers = self._list("momentum_buffer") if momentum else []
        if buffers is None:
            return False
        torch._fused_sgd_(
            self._parameters,
            gradients,
            buffers,
            weight_decay=settings["weight_decay"],
            momentum=momentum,
            lr=settings["lr"],
            dampening=settings["dampening"],
            nesterov=settings["nesterov"],
            maximize=settings["maximize"],
            is_first_step=False,
        )
        return True

    def _adam(self, gradients: Tensors, settings: Mapping[str, Any]) -> bool:
        amsgrad = settings["amsgrad"]
        means, squares, steps = self._list("exp_avg"), self._list("exp_avg_sq"), self._list("step")
        largest = self._list("max_exp_avg_sq") if amsgrad else []
        if means is None or squares is None or steps is None or largest is None:
            return False
        beta1, beta2 = settings["betas"]
        decoupled = self._is_adamw or settings.get("decoupled_weight_decay")
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        torch._foreach_add_(steps, 1)
        kernel(
            self._parameters,
            gradients,
            means,
            squares,
            largest,
            steps,
            amsgrad=amsgrad,
            lr=settings["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            maximize=settings["maximize"],
        )
        return True
