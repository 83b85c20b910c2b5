"""The operator's own file: what it names becomes a model that takes and returns arrays."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import pathlib
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from syncline.errors import ConfigError, StoreError
from syncline.extensions import see_beside
from syncline.serve.datatypes import DATATYPES, Array, RequestError, TensorSpec, datatype_of, spec_of
from syncline.serve.devices import device_of
from syncline.store.weights import Weight

#: The weights of a version: the parameter, and its bytes.
SavedWeights = Mapping[str, tuple[Weight, Array]]
#: What an operator's file may define beside the model.
HOOKS = ("preprocess", "predict", "postprocess")


class LoadedModel(Protocol):
    """One version in memory. Called by one thread at a time."""

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...


class ModelFile:
    """`model.py:Net`: a class or function without arguments that returns a torch module, or an object with
    `load(weights)` and a call on NumPy arrays. If it has `another_version()`, the next version comes from there, with
    what this one has compiled. Beside it the file may define `preprocess(inputs)`,
    `predict(model, inputs)`, `postprocess(outputs)`, `example` (inputs that the model takes), `labels` (names of
    classes, for people) and `validate(predict)` (metrics of a version).
    """

    def __init__(self, text: str) -> None:
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier() or not path:
            raise ConfigError(f"{text!r}: name the model's file and what makes it, e.g. model.py:Net")
        self.where = text
        module = _imported(pathlib.Path(path), text)
        make = getattr(module, name, None)
        if not callable(make):
            known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(f"{text}: the file defines no {name!r}; it has {', '.join(known[:10]) or 'nothing'}")
        self._set_up(make, module)

    @classmethod
    def of(cls, make: Callable[[], Any]) -> ModelFile:
        """The same of a class or function of this process; hooks and `example` are those of its own module."""
        if not callable(make):
            raise ConfigError(f"{make!r}: give a class or function that makes the model, or 'model.py:Net'")
        found = cls.__new__(cls)
        found.where = getattr(make, "__qualname__", repr(make))
        found._set_up(make, sys.modules.get(getattr(make, "__module__", "")))
        return found

    def _set_up(self, make: Callable[[], Any], module: object) -> None:
        self._make = make
        self.name = getattr(make, "__name__", "model").lower()
        self._hooks: dict[str, Callable[..., Any]] = {}
        for name in HOOKS:
            hook = getattr(module, name, None)
            if hook is not None and not callable(hook):
                raise ConfigError(f"{self.where}: {name} must be a function")
            if hook is not None and hook is not make:
                self._hooks[name] = hook
        self._example = getattr(module, "example", None)
        labels = getattr(module, "labels", ())
        if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
            raise ConfigError(f"{self.where}: labels must be a list of texts, one for each class")
        self.labels = tuple(labels)  #: what the classes are called, for people
        self.validate = getattr(module, "validate", None)
        self._made: Any = None
        self._device = self._said_device = ""

    def place_on(self, wanted: str, number: int) -> None:
        """From now on modules are loaded to this device: as `--device`, for process `number` of several. ConfigError:
        there is no such GPU.
        """
        num_gpus = 0
        if wanted.startswith("cuda") and "torch" not in sys.modules:
            raise ConfigError(
                f"--device {wanted}: {self.where} does not use torch; other frameworks choose the device by "
                "their own settings"
            )
        if wanted not in ("", "cpu") and "torch" in sys.modules:
            from syncline.serve.torch_model import num_gpus_of_torch

            num_gpus = num_gpus_of_torch()
        self._device = device_of(wanted, number, num_gpus)
        self._said_device = wanted if wanted != "auto" else ""

    def make(self) -> Any:
        """A new model; each version has one of its own."""
        try:
            made = self._make()
        except Exception as error:  # the operator's code
            raise ConfigError(f"{self.where} failed: {type(error).__name__}: {error}") from error
        if made is None or made is self._made:
            what = "nothing" if made is None else "the same model twice"
            raise ConfigError(f"{self.where} returned {what}; return a new model each time")
        self._made = made
        return made

    def example(self, specs: Sequence[TensorSpec]) -> dict[str, Array] | None:
        """One batch that the model takes: the file's own, or zeros where all lengths are known. What was said at
        launch counts more than the file.
        """
        if self._example is not None:
            given = self._example() if callable(self._example) else self._example
            if not isinstance(given, Mapping):
                given = dict(zip((spec.name for spec in specs), _several(given), strict=False))
            found = {str(name): np.ascontiguousarray(value) for name, value in given.items()}
            if _fits(found, specs):
                return found
        found = {}
        for spec in specs:
            if spec.shape is None or -1 in spec.shape[1:]:
                return None
            found[spec.name] = np.zeros((1, *spec.shape[1:]), DATATYPES[spec.datatype])
        return found

    def inputs(self, model: Any, said: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """What the model takes: as it was said at launch, by the file's example, or by its arguments (one batch of
        FP32 each).
        """
        if said:
            if len({spec.name for spec in said}) != len(said):
                raise ConfigError("--input: two inputs have the same name")
            return tuple(said)
        names = _argument_names(model if "predict" in self._hooks else getattr(model, "forward", model))
        example = self._example() if callable(self._example) else self._example
        if example is not None:
            given = example if isinstance(example, Mapping) else dict(zip(names, _several(example), strict=False))
            if not given:
                raise ConfigError(f"{self.where}: `example` must be an array, several, or a dict of them by name")
            return tuple(spec_of(str(name), np.asarray(value)) for name, value in given.items())
        return tuple(TensorSpec(name, "FP32", None) for name in names)

    def load(self, weights: SavedWeights | None, where: str, *, in_place: bool = False) -> LoadedModel:
        """A new model with these weights; None: as it is made. `in_place`: it uses them where they are."""
        if weights is not None and self.compiles:
            model = self._made = self._made.another_version()
        else:
            model = self.make()
        if "torch" in sys.modules:
            from syncline.serve.torch_model import TorchModel, is_module

            if is_module(model):
                return TorchModel(model, weights, where, self._hooks, in_place=in_place, device=self._device)
        if self._said_device:
            raise ConfigError(
                f"--device {self._said_device}: {type(model).__name__} is no torch module; other frameworks choose "
                "the device by their own settings"
            )
        return _ArrayModel(model, weights, where, self._hooks)

    @property
    def compiles(self) -> bool:
        """Whether the model that was made last compiles calls, which later versions of it can use."""
        return callable(getattr(self._made, "another_version", None))

    def own_weights(self) -> SavedWeights | None:
        """The weights of a new torch module as it is made; None of another model."""
        model = self.make()
        if "torch" in sys.modules:
            from syncline.serve.torch_model import is_module, weights_of

            if is_module(model):
                return weights_of(model)
        return None


class _ArrayModel:
    """A model of NumPy, JAX or Keras: an object that loads named arrays, and is called with arrays by position."""

    def __init__(
        self, model: Any, weights: SavedWeights | None, where: str, hooks: Mapping[str, Callable[..., Any]]
    ) -> None:
        if not callable(model) and "predict" not in hooks:
            raise ConfigError(f"{type(model).__name__} is no torch module and cannot be called: give it __call__")
        self._model, self._hooks = model, hooks
        if weights is None:
            return
        if not callable(getattr(model, "load", None)):
            raise ConfigError(f"{type(model).__name__} is no torch module: give it load(weights), a dict of arrays")
        try:
            model.load({name: _as_array(weight, data) for name, (weight, data) in weights.items()})
        except Exception as error:  # the operator's code
            raise StoreError(f"{where} does not fit the model: {type(error).__name__}: {error}") from error

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        pre, post = self._hooks.get("preprocess"), self._hooks.get("postprocess")
        given = pre(dict(inputs)) if pre is not None else inputs
        predict = self._hooks.get("predict")
        if predict is not None:
            found = predict(self._model, given)
        elif isinstance(given, Mapping):
            found = self._model(*given.values())
        else:
            found = self._model(given)
        return named_outputs(post(found) if post is not None else found, np.asarray)


def named_outputs(found: Any, to_array: Callable[[Any], Array]) -> dict[str, Array]:
    """The outputs of a call by name: those of a dict; else `output`, or `output_0`, `output_1`, …"""
    if isinstance(found, Mapping):
        named = dict(found)
    elif isinstance(found, tuple | list):
        named = {f"output_{index}": value for index, value in enumerate(found)}
    else:
        named = {"output": found}
    return {str(name): to_array(value) for name, value in named.items()}


def check_outputs(outputs: Mapping[str, Array], num_rows: int) -> None:
    """Raises RequestError(500) for what a batch cannot be answered with."""
    if not outputs:
        raise RequestError(500, "the model returned nothing")
    for name, array in outputs.items():
        if not array.ndim or len(array) != num_rows:
            raise RequestError(
                500, f"output {name!r} has shape {list(array.shape)}; its first dimension must be the {num_rows} rows"
            )
        if datatype_of(array.dtype) is None:
            raise RequestError(500, f"output {name!r} is {array.dtype}, which the protocol does not have")


def _as_array(weight: Weight, data: Array) -> Array:
    if weight.dtype == "bfloat16":  # not a NumPy type: its upper half is that of float32
        halves = data.view(np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32).reshape(weight.shape)
    return data.view(np.dtype(weight.dtype)).reshape(weight.shape)


def _fits(example: Mapping[str, Array], specs: Sequence[TensorSpec]) -> bool:
    if example.keys() != {spec.name for spec in specs}:
        return False
    for spec in specs:
        shape = example[spec.name].shape
        if spec.shape is not None and len(shape) != len(spec.shape):
            return False
        if spec.shape is not None and any(
            n not in (-1, own) for n, own in zip(spec.shape[1:], shape[1:], strict=True)
        ):
            return False
    return True


def _several(example: Any) -> list[Any]:
    return list(example) if isinstance(example, tuple | list) else [example]


def _argument_names(function: Any) -> list[str]:
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        needed = [p.name for p in parameters if p.default is p.empty and p.name in names]
        return needed or names[:1] or ["input"]
    return ["input"]


def _imported(path: pathlib.Path, text: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{text}: there is no file {path}; check the path")
    see_beside(str(path), is_module=False)
    name = path.stem if path.stem.isidentifier() else "syncline_served_model"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{text}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    try:
        typing.cast(Any, spec.loader).exec_module(module)
    except Exception as error:  # the operator's code
        raise ConfigError(f"{text}: importing {path} failed: {type(error).__name__}: {error}") from error
    return module
