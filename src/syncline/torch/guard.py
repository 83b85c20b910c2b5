"""Awaits parameters where they are read: a module's parameter dict that waits for pending parameters.

`self.weight` in a forward, `model.parameters()`, `state_dict()`, tied weights: all read `module._parameters`. Most of
the time nothing is pending, and a read costs one check.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

Parameters = dict[str, torch.nn.Parameter | None]
#: Waits for a parameter; the argument tells whether it alone was read. Returns whether nothing of it is pending.
Wait = Callable[[bool], bool]


class Guarded(dict[str, torch.nn.Parameter | None]):
    """A module's parameters by name. Copies of it are plain dicts."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.awaited: dict[str, Wait] = {}

    def _wait_for(self, name: str) -> None:
        wait = self.awaited.get(name)
        if wait is not None and wait(True):
            self.awaited.pop(name, None)

    def _wait_for_all(self) -> None:
        if is_dynamo_compiling():
            _read_by_the_compiler()
            return
        for name, wait in list(self.awaited.items()):
            if wait(False):
                self.awaited.pop(name, None)

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        if is_dynamo_compiling():
            _read_by_the_compiler()
        elif self.awaited:
            self._wait_for(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        self.get(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, torch.nn.Parameter | None]:
        self._wait_for_all()
        return super().popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        self.get(name)
        return super().setdefault(name, default)

    def values(self) -> Any:
        self._wait_for_all()
        return super().values()

    def items(self) -> Any:
        self._wait_for_all()
        return super().items()

    def __iter__(self) -> Iterator[str]:
        # Defined so that dict(guarded) and {**guarded} read through __getitem__.
        return super().__iter__()

    def copy(self) -> Parameters:
        return dict(self.items())

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameters:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class Guard:
    """Guards parameters in the modules of a model."""

    def __init__(self, modules: Iterable[torch.nn.Module], waits: Mapping[int, Wait]) -> None:
        """`waits`: the id of a parameter -> the function that waits for it."""
        self.guarded: set[int] = set()  #: ids of the guarded parameters
        self.compiled = False  #: torch.compile has traced it: compiled code bypasses the guard
        self._waits = waits
        self._places: list[tuple[Guarded, dict[str, Wait]]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for module in modules:
            self.compiled |= _is_compiled(module)
            self._guard(module)
            self._watch_other_places(module)
        _guards.add(self)

    def _guard(self, module: torch.nn.Module) -> None:
        parameters = vars(module).get("_parameters")
        if not isinstance(parameters, dict):  # a ScriptModule stores them elsewhere
            return
        ids = {name: id(p) for name, p in dict.items(parameters) if id(p) in self._waits}
        if not ids:
            return
        if not isinstance(parameters, Guarded):  # another optimizer may have been here
            parameters = vars(module)["_parameters"] = Guarded(parameters)
        self._places.append((parameters, {name: self._waits[number] for name, number in ids.items()}))
        self.guarded.update(ids.values())

    def _watch_other_places(self, module: torch.nn.Module) -> None:
        """A module that keeps parameters in its own list (as RNNs do) is awaited as a whole."""
        kept = [self._waits[id(tensor)] for tensor in _kept_by(module) if id(tensor) in self._waits]

        def wait(*_: Any) -> None:
            for each in kept:
                each(False)

        if kept:
            self._hooks.append(module.register_forward_pre_hook(wait))

    def arm(self) -> None:
        """Every parameter is awaited when it is read from now on."""
        for guarded, waits in self._places:
            guarded.awaited.update(waits)

    def read_by_the_compiler(self) -> None:
        """Compiled code will bypass the guard."""
        self.compiled = True
        for wait in self._waits.values():
            wait(False)

    def remove(self) -> None:
        """Removes the guards."""
        for guarded, waits in self._places:
            for name in waits:
                guarded.awaited.pop(name, None)
        for hook in self._hooks:
            hook.remove()
        self._places, self._hooks = [], []


#: All guards of this process: a traced read does not tell whose parameter it was.
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _read_by_the_compiler() -> bool:
    for guard in list(_guards):
        guard.read_by_the_compiler()
    return True


#: Like torch.compiler.assume_constant_result, which would load the compiler: it is called, not traced.
vars(_read_by_the_compiler)["_dynamo_marked_constant"] = True


def _kept_by(module: torch.nn.Module) -> Iterator[Any]:
    """Everything in a module's attributes, including lists, tuples and dicts."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        else:
            yield value


def _is_compiled(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None
