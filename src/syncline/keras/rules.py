"""Keras' optimizers as rules of the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.config import JobConfig
from syncline.core.policy import policy_of
from syncline.core.rule import Rule
from syncline.errors import ConfigError

#: By Keras' class: the rule, and the options that it takes from attributes of the same name.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum", "nesterov"),
    "Adam": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "AdamW": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "RMSprop": ("rho", "momentum", "epsilon", "centered"),
    "Adagrad": ("initial_accumulator_value", "epsilon"),
}


def rule_name(optimizer: Any) -> str:
    """The rule with the maths of this optimizer; empty: there is none. Subclasses may compute anything."""
    kind = type(optimizer)
    return f"Keras{kind.__name__}" if kind.__name__ in _OPTIONS and kind.__module__.startswith("keras.") else ""


def why_on_worker(optimizer: Any, variables: Sequence[Any] = ()) -> str:
    """Why this optimizer runs on the worker; empty: its rule runs on the servers."""
    if not rule_name(optimizer):
        return f"servers have no rule with the maths of {type(optimizer).__name__}"
    for option in ("clipnorm", "clipvalue", "gradient_accumulation_steps", "loss_scale_factor"):
        if getattr(optimizer, option, None) is not None:
            return f"{option} is set"
    if optimizer.use_ema:
        return "use_ema is set"
    for variable in variables:
        if getattr(variable, "constraint", None) is not None:
            return f"{variable.path} has a constraint"
        if getattr(variable, "overwrite_with_gradient", False):
            return f"{variable.path} is overwritten with its gradient (float8)"
    return ""


def check_on_worker(optimizer: Any, reason: str, config: JobConfig) -> None:
    """Raises ConfigError for options of the job that need a rule on the servers. `reason`: why there is none."""
    policy, name = policy_of(config), type(optimizer).__name__
    if config.on_plateau:
        raise ConfigError(
            f"--on-plateau changes learning rates on the servers, and {name} runs on the workers: {reason}. Use "
            "keras.callbacks.ReduceLROnPlateau"
        )
    if config.steps_locally or not (policy.is_damped or policy.lr_per_worker):
        return
    option = f"--policy {policy}" if policy.is_damped else "--lr-per-worker"
    raise ConfigError(
        f"{option} needs an optimizer that servers know, since it weighs gradients there, and {name} runs on the "
        f"workers: {reason}. Use SGD, Adam, AdamW, RMSprop or Adagrad without such options, or leave out "
        f"{'damped' if policy.is_damped else option}"
    )


def rules_of(optimizer: Any, named: dict[str, Any], lr: float) -> dict[str, Rule]:
    """The rule of each variable by its name: one for those that decay, one for those that do not."""
    name = rule_name(optimizer)
    options = {option: _plain(getattr(optimizer, option)) for option in _OPTIONS[name.removeprefix("Keras")]}
    decay = float(optimizer.weight_decay or 0.0)
    decaying, plain = (Rule(name, lr=lr, weight_decay=each, **options) for each in (decay, 0.0))
    return {key: decaying if decay and optimizer._use_weight_decay(each) else plain for key, each in named.items()}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool) else float(value)
