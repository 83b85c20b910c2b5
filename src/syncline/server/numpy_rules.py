"""Rules by NumPy, for servers without torch. State has the names that torch gives it, so that a checkpoint fits both.

A formula sees blocks of numbers that fit the cache, in single precision or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.core.rule import Option, RuleSpec
from syncline.errors import RuleError
from syncline.reduce.kernels import sum_dtype

Array = npt.NDArray[Any]
Settings = Mapping[str, Any]
#: parameter, gradient, state by key, settings, number of this step from 1 on. All arrays are updated in place; the
#: gradient is a scratch copy.
Formula = Callable[[Array, Array, Mapping[str, Array], Settings, int], None]
_BLOCK_ITEMS = 1 << 14

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False}
_KERAS_ADAM = {"lr": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False, "weight_decay": 0.0}
#: What an optimizer has where nothing is said: of torch, of Keras.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {
        "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False,
    },
    "Adam": {**_ADAM, "weight_decay": 0.0, "decoupled_weight_decay": False},
    "AdamW": {**_ADAM, "weight_decay": 1e-2},
    "Adagrad": {
        "lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10,
        "maximize": False,
    },
    "KerasSGD": {"lr": 0.01, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "KerasAdam": _KERAS_ADAM,
    "KerasAdamW": _KERAS_ADAM,
    "KerasRMSprop": {
        "lr": 1e-3, "rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False, "weight_decay": 0.0,
    },
    "KerasAdagrad": {"lr": 1e-3, "initial_accumulator_value": 0.1, "epsilon": 1e-7, "weight_decay": 0.0},
}  # fmt: skip


def _sgd(p: Array, g: Array, s: Mapping[str, Array], o: Settings, t: int) -> None:
    if o["maximize"]:
        np.negative(g, out=g)
    if o["weight_decay"]:
        g += o["weight_decay"] * p
    if o["momentum"]:
        velocity = s["momentum_buffer"]
        if t == 1:  # torch begins with the gradient itself
            velocity[...] = g
        else:
            velocity *= o["momentum"]
            velocity += (1.0 - o["dampening"]) * g
        if o["nesterov"]:
            g += o["momentum"] * velocity
        else:
            g = velocity
    p -= o["lr"] * g


def _moments(g: Array, s: Mapping[str, Array], beta_1: float, beta_2: float, amsgrad: bool) -> tuple[Array, Array]:
    """The mean, and a new array with the square root of the mean square."""
    mean, square = s["exp_avg"], s["exp_avg_sq"]
    mean += (1.0 - beta_1) * (g - mean)
    square *= beta_2
    np.multiply(g, g, out=g)
    g *= 1.0 - beta_2
    square += g
    if amsgrad:
        largest = s["max_exp_avg_sq"]
        np.maximum(largest, square, out=largest)
        return mean, np.sqrt(largest)
    return mean, np.sqrt(square)


def _adam(p: Array, g: Array, s: Mapping[str, Array], o: Settings, t: int, *, decoupled: bool = False) -> None:
    if o["maximize"]:
        np.negative(g, out=g)
    if o["weight_decay"]:
        if decoupled or o.get("decoupled_weight_decay"):
            p *= 1.0 - o["lr"] * o["weight_decay"]
        else:
            g += o["weight_decay"] * p
    beta_1, beta_2 = o["betas"]
    mean, size = _moments(g, s, beta_1, beta_2, o["amsgrad"])
    size /= math.sqrt(1.0 - beta_2**t)
    size += o["eps"]
    p -= (o["lr"] / (1.0 - beta_1**t)) * mean / size


def _adamw(p: Array, g: Array, s: Mapping[str, Array], o: Settings, t: int) -> None:
    _adam(p, g, s, o, t, decoupled=True)


def _adagrad(p: Array, g: Array, s: Mapping[str, Array], o: Settings, t: int) -> None:
    if o["maximize"]:
        np.negative(g, out=g)
    if o["weight_decay"]:
        g += o["weight_decay"] * p
    s["sum"] += g * g
    p -= (o["lr"] / (1.0 + (t - 1) * o["lr_decay"])) * g / (np.sqrt(s["sum"]) + o["eps"])


def _keras_decay(p: Array, o: Settings) -> None:
    if o["weight_decay"]:
        p *= 1.0 - o["weight_decay"] * o["lr"]


def _keras_sgd(p: Array, g: Array, s: Mapping[str, Array], o: Settings, t: int) -> None:
    _keras_decay(p, o)
    g *= -o["lr"]
    if o["momentum"]:
        velocity = s["velocity"]
        velocity *= o["momentum"]
        velocity += g
        if o["nesterov"]:
            g += o["momentum"] * velocity
        else:
            g = velocity
    p += g


def _keras_adam(p: Array, g: Array, s: Mapping[str, Array], o: Settings, t: int) -> None:
    _keras_decay(p, o)
    mean, size = _moments(g, s, o["beta_1"], o["beta_2"], o["amsgrad"])
    size += o["epsilon"]
    p -= (o["lr"] * math.sqrt(1.0 - o["beta_2"] ** t) / (1.0 - o["beta_1"] ** t)) * mean / size


def _keras_rmsprop(p: Array, g: Array, s: Mapping[str, Array], o: Settings, t: int) -> None:
    _keras_decay(p, o)
    rho, square = o["rho"], s["square_avg"]
    square *= rho
    square += (1.0 - rho) * g * g
    size = square + o["epsilon"]
    if o["centered"]:
        mean = s["grad_avg"]
        mean += (1.0 - rho) * (g - mean)
        size -= mean * mean
    g *= o["lr"]
    g /= np.sqrt(size, out=size)
    if o["momentum"]:
        velocity = s["velocity"]
        velocity *= o["momentum"]
        velocity += g
        g = velocity
    p -= g


def _keras_adagrad(p: Array, g: Array, s: Mapping[str, Array], o: Settings, t: int) -> None:
    _keras_decay(p, o)
    s["sum"] += g * g
    p -= o["lr"] * g / np.sqrt(s["sum"] + o["epsilon"])


FORMULAS: Mapping[str, Formula] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "Adagrad": _adagrad,
    "KerasSGD": _keras_sgd,
    "KerasAdam": _keras_adam,
    "KerasAdamW": _keras_adam,
    "KerasRMSprop": _keras_rmsprop,
    "KerasAdagrad": _keras_adagrad,
}
#: Rules whose formula depends on the number of the step. (Of SGD: whether there is a velocity yet.)
_COUNTED = frozenset({"Adam", "AdamW", "Adagrad", "KerasAdam", "KerasAdamW"})


def _state_keys(name: str, settings: Settings) -> dict[str, float]:
    """The state that a rule needs with these settings, and what each begins with."""
    if name == "SGD":
        return {"momentum_buffer": 0.0} if settings["momentum"] else {}
    if name in ("Adagrad", "KerasAdagrad"):
        return {"sum": settings["initial_accumulator_value"]}
    if name == "KerasSGD":
        return {"velocity": 0.0} if settings["momentum"] else {}
    if name == "KerasRMSprop":
        keys = {"square_avg": True, "grad_avg": settings["centered"], "velocity": settings["momentum"]}
        return {key: 0.0 for key, is_needed in keys.items() if is_needed}
    keys = {"exp_avg": True, "exp_avg_sq": True, "max_exp_avg_sq": settings["amsgrad"]}
    return {key: 0.0 for key, is_needed in keys.items() if is_needed}


class NumpyRule:
    """The rule of one group, over this group's pieces of a slice."""

    def __init__(self, spec: RuleSpec, parameters: Mapping[int, Array]) -> None:
        """`parameters`: by piece."""
        self._name, self._formula = spec.name, FORMULAS[spec.name]
        self.defaults: Mapping[str, Any] = {**DEFAULTS[spec.name], **spec.options}
        self._check(self.defaults)
        self._parameters = dict(parameters)
        self._states: dict[int, dict[str, Array]] = {}

    def _check(self, settings: Settings) -> None:
        """As torch's constructors do."""
        if self._name == "SGD" and settings["nesterov"] and (not settings["momentum"] or settings["dampening"]):
            raise RuleError("rule SGD: Nesterov momentum requires a momentum and zero dampening")
        if not settings["lr"] >= 0:
            raise RuleError(f"rule {self._name}: lr = {settings['lr']}: it must be a number from 0 on")

    def step(self, gradients: Mapping[int, Array], override: Mapping[str, Option]) -> None:
        """Updates the pieces that have a gradient."""
        settings = {**self.defaults, **override} if override else self.defaults
        with np.errstate(all="ignore"):  # infinities show in the result; NumPy's warnings would name a line of ours
            for index, gradient in gradients.items():
                self._update(index, gradient, settings)

    def _update(self, index: int, gradient: Array, settings: Settings) -> None:
        parameter, state = self._parameters[index], self._states.setdefault(index, {})
        is_new, keys = not state, _state_keys(self._name, settings)
        for key, start in keys.items():
            if key not in state:
                is_new = is_new or key == "momentum_buffer"
                state[key] = np.full_like(parameter, start)
        number = 1 if is_new else 2
        if self._name in _COUNTED:
            step = state.setdefault("step", np.zeros((), np.float32))
            step += np.float32(1)
            number = int(step)
        wide = np.dtype(sum_dtype(str(parameter.dtype), averages=True))
        flat, flat_gradient = parameter.reshape(-1), gradient.reshape(-1)
        flats = {key: state[key].reshape(-1) for key in keys}
        for start in range(0, flat.size, _BLOCK_ITEMS):
            block = slice(start, start + _BLOCK_ITEMS)
            own = {key: values[block].astype(wide, copy=False) for key, values in flats.items()}
            values = flat[block].astype(wide, copy=False)
            self._formula(values, flat_gradient[block].astype(wide, copy=True), own, settings, number)
            if wide != flat.dtype:
                flat[block] = values
                for key, changed in own.items():
                    flats[key][block] = changed

    def state(self, index: int) -> dict[str, Array]:
        """What the rule remembers of a piece."""
        return self._states.get(index, {})

    def load(self, states: Mapping[int, dict[str, Array]]) -> None:
        """Replaces all state. Pieces that are not named start afresh."""
        self._states = {index: dict(state) for index, state in states.items()}
