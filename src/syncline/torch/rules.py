"""Converts torch optimizers to rules by name and plain numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from syncline.core.rule import KERAS, OPTIONS, PLAIN, SPARSE_REMEDY, Option, Rule, plain_option
from syncline.errors import RuleError
from syncline.extensions import is_named, load


def rule_name(optimizer: torch.optim.Optimizer) -> str:
    """The rule of an optimizer; a RuleError lists the known ones and alternatives."""
    kind = type(optimizer)
    if kind.__name__ in OPTIONS and kind is getattr(torch.optim, kind.__name__, None):
        return str(kind.__name__)
    if kind is torch.optim.SparseAdam:
        raise RuleError(f"torch.optim.SparseAdam: servers take no sparse gradients yet; {SPARSE_REMEDY}")
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__name__ != "LBFGS" and kind.__module__ != "__main__" and is_named(name) and load(name) is kind:
        return name  # servers import it too
    there_are = ", ".join(name for name in OPTIONS if name not in PLAIN | KERAS)
    why = " needs a closure" if kind.__name__ == "LBFGS" else " has no rule on the servers"
    if kind.__module__ == "__main__":
        why += ", which cannot import it from the script: move the class to a module of its own"
    raise RuleError(
        f"{kind.__module__}.{kind.__name__}{why}; choose from: {there_are}. "
        "With --sync-every H, or init(sync_every=H), any optimizer works: it runs on the worker"
    )


def group_options(name: str, group: dict[str, Any]) -> dict[str, Option]:
    """A group's transferable hyperparameters, as plain numbers."""
    return {key: plain_option(name, key, group[key]) for key in _option_names(name) if key in group}


@functools.cache
def _option_names(name: str) -> tuple[str, ...]:
    """Of a user's own optimizer: what its constructor takes."""
    if name in OPTIONS:
        return OPTIONS[name]
    kind: Any = load(name)
    return tuple(inspect.signature(kind).parameters)[1:]  # the first are the parameters


class ChangedOptions:
    """The hyperparameters of a group that differ from the registered ones; recomputed when one is set."""

    def __init__(self, name: str, registered: Mapping[str, Option]) -> None:
        self._name, self.registered = name, registered
        self._last: list[Any] | None = None
        self._changed: dict[str, Option] = {}

    def of(self, group: dict[str, Any]) -> dict[str, Option]:
        given = [group.get(key) for key in _option_names(self._name)]
        if self._last is None or self._may_differ(given, self._last):
            now = group_options(self._name, group)
            self._changed = {key: value for key, value in now.items() if self.registered.get(key) != value}
            self._last = given
        return self._changed

    @staticmethod
    def _may_differ(given: Sequence[Any], last: Sequence[Any]) -> bool:
        """Whether it must be compared: tensors and lists can change in place."""
        pairs = zip(given, last, strict=True)
        return any(a is not b or isinstance(a, list) or hasattr(a, "item") for a, b in pairs)


def group_rule(name: str, group: dict[str, Any]) -> Rule:
    options = group_options(name, group)
    if name not in OPTIONS:
        _check_own(name, group, options)
    return Rule(name, **options)


def _check_own(name: str, group: Mapping[str, Any], options: Mapping[str, Option]) -> None:
    """A user's optimizer, made of these options as servers make it, must have the numbers of this group."""
    kind: Any = load(name)
    try:
        made = kind([torch.zeros(1, requires_grad=True)], **options).param_groups[0]
    except (TypeError, ValueError) as error:
        raise RuleError(f"rule {name}: servers make it as {name}(parameters, **{dict(options)}): {error}") from None
    for key, value in group.items():
        if key not in ("params", "param_names") and key in made and made[key] != value:
            raise RuleError(
                f"rule {name}: its groups have {key} = {value!r}, but servers, which make it of {dict(options)}, "
                f"would have {made.get(key)!r}: name the constructor's parameters as the keys of the groups"
            )
