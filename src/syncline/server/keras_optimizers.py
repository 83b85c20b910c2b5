"""The rules of Keras as torch optimizers. Their epsilon stands elsewhere than torch's, momentum contains the learning
rate, and weight decay is applied to the parameters before the update.

The names of the state are torch's where they mean the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

Tensors = list[torch.Tensor]


class KerasOptimizer(torch.optim.Optimizer):
    """One step: weight decay, then the update of all parameters with a gradient."""

    def __init__(self, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step(group, parameters, [p.grad for p in parameters])

    def _step(self, group: dict[str, Any], parameters: Tensors, gradients: Tensors) -> None:
        raise NotImplementedError

    def _state(self, parameters: Tensors, key: str, start: float = 0.0) -> Tensors:
        """One state tensor for each parameter, made at its first step."""
        found = []
        for parameter in parameters:
            state = self.state[parameter]
            if key not in state:
                state[key] = torch.full_like(parameter, start)
            found.append(state[key])
        return found

    def _steps(self, parameters: Tensors) -> Tensors:
        for parameter in parameters:
            self.state[parameter].setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))
        return [self.state[parameter]["step"] for parameter in parameters]

    @staticmethod
    def _decay(group: dict[str, Any], parameters: Tensors) -> None:
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1.0 - group["weight_decay"] * group["lr"])


class KerasSGD(KerasOptimizer):
    """velocity = momentum × velocity − lr × g; parameter += velocity."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    def _step(self, group: dict[str, Any], parameters: Tensors, gradients: Tensors) -> None:
        self._decay(group, parameters)
        lr, momentum = group["lr"], group["momentum"]
        if not momentum:
            torch._foreach_add_(parameters, gradients, alpha=-lr)
            return
        velocities = self._state(parameters, "velocity")
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, gradients, alpha=-lr)
        if group["nesterov"]:
            torch._foreach_add_(parameters, velocities, alpha=momentum)
            torch._foreach_add_(parameters, gradients, alpha=-lr)
        else:
            torch._foreach_add_(parameters, velocities)


class KerasAdam(KerasOptimizer):
    """parameter −= lr × √(1 − β₂ᵗ) / (1 − β₁ᵗ) × m / (√v + ε).

    torch has ε × √(1 − β₂ᵗ) in place of ε. So its fused kernel computes this with ε / √(1 − β₂ᵗ).
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            parameters,
            lr=lr,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            weight_decay=weight_decay,
        )

    def _step(self, group: dict[str, Any], parameters: Tensors, gradients: Tensors) -> None:
        steps = self._steps(parameters)
        numbers = [float(step) for step in steps]
        for number in sorted(set(numbers)):  # usually all parameters have seen the same steps
            chosen = [k for k, own in enumerate(numbers) if own == number]
            own = [[tensors[k] for k in chosen] for tensors in (parameters, gradients, steps)]
            self._update(group, int(number) + 1, *own)

    def _update(
        self, group: dict[str, Any], number: int, parameters: Tensors, gradients: Tensors, steps: Tensors
    ) -> None:
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters,
            gradients,
            self._state(parameters, "exp_avg"),
            self._state(parameters, "exp_avg_sq"),
            self._state(parameters, "max_exp_avg_sq") if group["amsgrad"] else [],
            steps,
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=group["beta_1"],
            beta2=group["beta_2"],
            weight_decay=group["weight_decay"],
            eps=group["epsilon"] / math.sqrt(1.0 - group["beta_2"] ** number),
            maximize=False,
        )


class KerasAdamW(KerasAdam):
    """Keras' AdamW is its Adam; only the default of weight decay differs."""


class KerasRMSprop(KerasOptimizer):
    """parameter −= lr × g / √(v + ε), with v the mean of g², or its variance."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            parameters,
            lr=lr,
            rho=rho,
            momentum=momentum,
            epsilon=epsilon,
            centered=centered,
            weight_decay=weight_decay,
        )

    def _step(self, group: dict[str, Any], parameters: Tensors, gradients: Tensors) -> None:
        self._decay(group, parameters)
        lr, rho = group["lr"], group["rho"]
        squares = self._state(parameters, "square_avg")
        torch._foreach_mul_(squares, rho)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - rho)
        sizes: Any = torch._foreach_add(squares, group["epsilon"])
        if group["centered"]:
            means = self._state(parameters, "grad_avg")
            torch._foreach_lerp_(means, gradients, 1.0 - rho)
            torch._foreach_addcmul_(sizes, means, means, -1.0)
        torch._foreach_sqrt_(sizes)
        if not group["momentum"]:
            torch._foreach_addcdiv_(parameters, gradients, sizes, -lr)
            return
        velocities = self._state(parameters, "velocity")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_addcdiv_(velocities, gradients, sizes, lr)
        torch._foreach_sub_(parameters, velocities)


class KerasAdagrad(KerasOptimizer):
    """parameter −= lr × g / √(Σ g² + ε)."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            parameters,
            lr=lr,
            initial_accumulator_value=initial_accumulator_value,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )

    def _step(self, group: dict[str, Any], parameters: Tensors, gradients: Tensors) -> None:
        self._decay(group, parameters)
        sums = self._state(parameters, "sum", group["initial_accumulator_value"])
        torch._foreach_addcmul_(sums, gradients, gradients, 1.0)
        sizes: Any = torch._foreach_add(sums, group["epsilon"])
        torch._foreach_sqrt_(sizes)
        torch._foreach_addcdiv_(parameters, gradients, sizes, -group["lr"])


BY_NAME: dict[str, type[KerasOptimizer]] = {
    "KerasSGD": KerasSGD,
    "KerasAdam": KerasAdam,
    "KerasAdamW": KerasAdamW,
    "KerasRMSprop": KerasRMSprop,
    "KerasAdagrad": KerasAdagrad,
}
