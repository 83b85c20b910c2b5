"""Rules by NumPy against the same rules by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from syncline.core.rule import OPTIONS, PLAIN, RuleSpec
from syncline.errors import RuleError
from syncline.reduce.kernels import numpy_dtype
from syncline.server.numbers import NUMPY_RULES
from syncline.server.numpy_rules import DEFAULTS, NumpyRule
from syncline.server.torch_rules import TorchRule

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01}),
    ("KerasSGD", {"lr": 0.1}),
    ("KerasSGD", {"lr": 0.1, "momentum": 0.9}),
    ("KerasSGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("KerasAdam", {"lr": 0.01}),
    ("KerasAdam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "epsilon": 0.01}),
    ("KerasAdamW", {"lr": 0.01, "weight_decay": 0.004}),
    ("KerasRMSprop", {"lr": 0.01}),
    ("KerasRMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    ("KerasAdagrad", {"lr": 0.1}),
]
#: Two blocks and a part of one.
NUM_ITEMS = 2 * (1 << 14) + 77


def chance(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_close(found: Any, expected: Any) -> None:
    """Within a millionth of the largest: sums that went up and down keep the rounding of their largest value."""
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * float(np.abs(expected).max()))


def two_alike(name: str, options: dict[str, Any], num_items: int = NUM_ITEMS) -> tuple[Any, Any, Any, Any]:
    start = chance(0).standard_normal(num_items).astype(np.float32)
    by_torch, by_numpy = torch.from_numpy(start.copy()), start.copy()
    spec = RuleSpec(name, options)
    return by_torch, by_numpy, TorchRule(spec, {3: by_torch}), NumpyRule(spec, {3: by_numpy})


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_both_come_to_the_same_numbers(name: str, options: dict[str, Any]) -> None:
    by_torch, by_numpy, one, other = two_alike(name, options)
    rng = chance(1)
    for step in range(50):
        gradient = rng.standard_normal(NUM_ITEMS).astype(np.float32)
        override = {"lr": options["lr"] / 2} if step % 7 == 3 else {}
        before = gradient.copy()
        one.step({3: torch.from_numpy(gradient.copy())}, override)
        other.step({3: gradient}, override)
        np.testing.assert_array_equal(gradient, before)  # it may lie in a worker's arena
    assert_close(by_numpy, by_torch.numpy())


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_state_of_one_goes_on_in_the_other(name: str, options: dict[str, Any]) -> None:
    by_torch, by_numpy, one, other = two_alike(name, options, 100)
    gradients = [chance(k).standard_normal(100).astype(np.float32) for k in range(10)]
    for gradient in gradients[:5]:
        one.step({3: torch.from_numpy(gradient)}, {})
    by_numpy[:] = by_torch.numpy()
    found = {key: tensor.numpy().copy() for key, tensor in one.state(3).items()}
    if found:
        other.load({3: found})
    for gradient in gradients[5:]:
        one.step({3: torch.from_numpy(gradient)}, {})
        other.step({3: gradient}, {})
    assert_close(by_numpy, by_torch.numpy())
    assert {key: value.shape for key, value in other.state(3).items()} == {
        key: tuple(value.shape) for key, value in one.state(3).items()
    }


@pytest.mark.parametrize("name", ["SGD", "Adam", "KerasAdam"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_single(name: str, dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")  # the environments of other frameworks have it
    kind = numpy_dtype(dtype)
    parameter = np.ones(100, kind)
    rule = NumpyRule(RuleSpec(name, {"lr": 0.25}), {0: parameter})
    rule.step({0: np.full(100, 2.0, kind)}, {})
    expected = 0.5 if name == "SGD" else 0.75
    np.testing.assert_allclose(parameter.astype(np.float32), expected, rtol=1e-2)
    assert parameter.dtype == kind


def test_a_piece_without_a_gradient_keeps_its_own_count() -> None:
    parameters = {0: np.zeros(3, np.float32), 1: np.zeros(3, np.float32)}
    tensors = {index: torch.zeros(3) for index in parameters}
    one = TorchRule(RuleSpec("KerasAdam", {"lr": 0.1}), tensors)
    other = NumpyRule(RuleSpec("KerasAdam", {"lr": 0.1}), parameters)
    for step in range(6):
        gradients = {0: np.full(3, 1.0 + step, np.float32)}
        if step % 2:
            gradients[1] = np.full(3, -1.0 - step, np.float32)
        one.step({index: torch.from_numpy(g) for index, g in gradients.items()}, {})
        other.step(gradients, {})
    for index in (0, 1):
        np.testing.assert_allclose(parameters[index], tensors[index].numpy(), rtol=1e-6)
    assert [float(one.state(k)["step"]) for k in (0, 1)] == [6.0, 3.0]


def test_what_numpy_has_are_rules_with_all_their_options() -> None:
    assert set(DEFAULTS) == NUMPY_RULES - PLAIN
    for name, defaults in DEFAULTS.items():
        assert set(OPTIONS[name]) == set(defaults), name


def test_defaults_are_those_of_torch() -> None:
    for name in ("SGD", "Adam", "AdamW", "Adagrad"):
        made = getattr(torch.optim, name)([torch.zeros(1)])
        assert {key: made.defaults[key] for key in DEFAULTS[name]} == dict(DEFAULTS[name]), name


def test_nesterov_needs_a_momentum() -> None:
    with pytest.raises(RuleError, match="requires a momentum"):
        NumpyRule(RuleSpec("SGD", {"lr": 0.1, "nesterov": True}), {})
