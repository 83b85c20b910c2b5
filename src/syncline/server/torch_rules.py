"""Rules by torch: its optimizers on the pieces of a slice, with fused kernels where it has them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from syncline.core.rule import Option, RuleSpec
from syncline.errors import ConfigError, RuleError
from syncline.extensions import is_named, load
from syncline.server import keras_optimizers

_FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
_HALF = (torch.float16, torch.bfloat16)
_NO_FOREACH = frozenset({"Muon"})  # has no such option
FUSED = frozenset({"Adam", "AdamW", "SGD"})
#: Updates up to this size use one thread.
SMALL_ITEMS = 1 << 15
Tensors = list[torch.Tensor]


class FusedKernel:
    """Updates one parameter group in a single call, using the state that its optimizer has created."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._is_adamw = isinstance(optimizer, torch.optim.AdamW)
        self._parameters: Tensors = list(optimizer.param_groups[0]["params"])
        self._is_small = sum(parameter.numel() for parameter in self._parameters) <= SMALL_ITEMS
        self._state = optimizer.state
        self._lists: dict[str, Tensors] = {}

    def _list(self, key: str) -> Tensors | None:
        """One state tensor of each parameter; None if any parameter lacks it."""
        if key not in self._lists:
            found = [self._state[p].get(key) if p in self._state else None for p in self._parameters]
            if any(tensor is None for tensor in found):
                return None
            self._lists[key] = [tensor for tensor in found if tensor is not None]
        return self._lists[key]

    def step(self, gradients: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> bool:
        """Updates all parameters. Returns False, without effect, if the optimizer itself is needed."""
        update = self._sgd if self._is_sgd else self._adam
        count = torch.get_num_threads() if self._is_small else 1
        if count == 1:
            return update(list(gradients), settings)
        # The kernels split even tiny updates over all threads; synchronizing them takes longer than the update.
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


class TorchRule:
    """The rule of one group: a torch optimizer over this group's pieces of a slice."""

    def __init__(self, spec: RuleSpec, parameters: Mapping[int, torch.Tensor]) -> None:
        """`parameters`: by piece."""
        self._parameters = dict(parameters)
        self._option_names = frozenset(spec.option_names)
        self._optimizer = make_optimizer(spec, list(parameters.values()))
        self._has_overrides = False
        self._begin(spec.name)

    def _begin(self, name: str) -> None:
        self._bare_step = bare_step(self._optimizer)
        has_kernel = name in FUSED and self._optimizer.defaults.get("fused")
        self._kernel = FusedKernel(self._optimizer) if has_kernel else None

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self._optimizer.defaults

    def step(self, gradients: Mapping[int, torch.Tensor], override: Mapping[str, Option]) -> None:
        """Updates the pieces that have a gradient."""
        optimizer = self._optimizer
        settings = optimizer.param_groups[0]
        if override or self._has_overrides:
            known = self._option_names
            settings.update((key, value) for key, value in optimizer.defaults.items() if key in known)
            settings.update(override)
            self._has_overrides = bool(override)
        is_whole = self._kernel is not None and len(gradients) == len(self._parameters)
        if is_whole and self._kernel is not None and self._kernel.step(list(gradients.values()), settings):
            return
        pairs = [(self._parameters[index], gradient) for index, gradient in gradients.items()]
        try:
            for parameter, gradient in pairs:
                parameter.grad = gradient
            with torch.no_grad(), _unfused_where_it_cannot(optimizer, pairs):
                self._bare_step(optimizer)
        finally:
            # A gradient may lie in a worker's arena: release it after use.
            for parameter, _ in pairs:
                parameter.grad = None

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """What the rule remembers of a piece."""
        found = self._optimizer.state.get(self._parameters[index], {})
        return {key: torch.as_tensor(value) for key, value in found.items() if value is not None}

    def load(self, states: Mapping[int, dict[str, torch.Tensor]]) -> None:
        """Replaces all state. Call it before the first step. Pieces that are not named start afresh."""
        self._optimizer.state.clear()
        for index, state in states.items():
            self._optimizer.state[self._parameters[index]] = state


@contextlib.contextmanager
def _unfused_where_it_cannot(
    optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """Disables fused SGD if only some parameters have a momentum: torch needs all or none."""
    settings = optimizer.param_groups[0]
    has = {"momentum_buffer" in optimizer.state.get(parameter, {}) for parameter, _ in pairs}
    if not (settings.get("fused") and isinstance(optimizer, torch.optim.SGD) and len(has) > 1):
        yield
        return
    settings["fused"], settings["foreach"] = False, False
    try:
        yield
    finally:
        settings["fused"], settings["foreach"] = True, None


def is_fused(name: str, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether torch has a correct fused kernel for this rule."""
    # Of SGD on halves on a CPU it is wrong (torch 2.13: off by a tenth of the update, from 16 items on).
    wrong = name == "SGD" and any(p.dtype in _HALF and p.device.type == "cpu" for p in parameters)
    return name in _FUSED and not wrong


def make_optimizer(spec: RuleSpec, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The torch optimizer of a rule, fused where torch has it; torch's own complaint becomes a RuleError."""
    if is_named(spec.name):
        kind: Any = own_optimizer(spec.name)
    else:
        kind = keras_optimizers.BY_NAME.get(spec.name) or getattr(torch.optim, spec.name, None)
    if kind is None:
        raise RuleError(f"this torch ({torch.__version__}) has no {spec.name}")
    how = {"fused": True} if is_fused(spec.name, parameters) else {"foreach": False}
    if spec.name in _NO_FOREACH or spec.name in keras_optimizers.BY_NAME or is_named(spec.name):
        how = {}
    try:
        made: torch.optim.Optimizer = kind(parameters, **spec.options, **how)
    except (TypeError, ValueError) as error:
        raise RuleError(f"rule {spec.name}: {error}") from None
    return made


def own_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """A user's own optimizer, imported by name."""
    try:
        found = load(name)
    except ConfigError as error:
        raise RuleError(f"rule {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise RuleError(f"rule {name}: it is no torch.optim.Optimizer")
    return found


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """`step` without torch's hooks and profiling around it, which take longer than a small update itself."""
    # The decorators of a user's optimizer are its own.
    is_own = not type(optimizer).__module__.startswith(("torch.optim", "syncline."))
    step: Callable[[torch.optim.Optimizer], object] = type(optimizer).step
    return step if is_own else inspect.unwrap(step)
