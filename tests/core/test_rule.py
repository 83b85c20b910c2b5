"""Rules: every dense torch.optim optimizer by name, with plain numbers, and a clear word about all others."""

from __future__ import annotations

import inspect
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from syncline.core.rule import KERAS, OPTIONS, PLAIN, WHOLE_TENSOR, Rule, RuleSpec, check_state
from syncline.errors import RuleError

#: How an optimizer runs is the server's choice; it does not travel.
NOT_OPTIONS = {"self", "params", "foreach", "fused", "capturable", "differentiable"}
NOT_DENSE_OR_CLOSURE = {"LBFGS", "SparseAdam", "Optimizer"}


def torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    found = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    return {name: kind for name, kind in found.items() if issubclass(kind, torch.optim.Optimizer)}


def test_every_dense_optimizer_without_a_closure_is_there() -> None:
    """A new optimizer in torch, or one that is gone, is noticed here and not by a user."""
    assert set(OPTIONS) - PLAIN - KERAS == set(torch_optimizers()) - NOT_DENSE_OR_CLOSURE


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - PLAIN - KERAS))
def test_the_options_are_those_of_the_signature(name: str) -> None:
    """An option that torch has and we lack would be refused; one that torch lacks would fail on the server."""
    signature = inspect.signature(torch_optimizers()[name].__init__)
    assert set(OPTIONS[name]) == set(signature.parameters) - NOT_OPTIONS
    assert len(set(OPTIONS[name])) == len(OPTIONS[name])


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - PLAIN - KERAS))
def test_torchs_own_defaults_are_plain(name: str) -> None:
    """What `DistributedOptimizer` reads off an optimizer must be able to travel, and come back equal."""
    optimizer = torch_optimizers()[name]([torch.zeros(2, 2, requires_grad=True)], lr=0.1)
    rule = Rule(name, **{key: value for key, value in optimizer.defaults.items() if key in OPTIONS[name]})
    wire = msgspec.msgpack.encode(rule.spec)
    assert msgspec.msgpack.decode(wire, type=RuleSpec).rule() == rule


def test_rules_that_look_at_a_whole_tensor_are_known_rules() -> None:
    assert set(OPTIONS) >= WHOLE_TENSOR
    assert not Rule("Muon", lr=0.1).elementwise and not Rule("Adafactor").elementwise
    assert Rule("Adam").elementwise and Rule("Add").elementwise


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LBFGS", "there is no rule 'LBFGS' (LBFGS needs a closure); choose from: "),
        ("adam", "there is no rule 'adam'; choose from: "),
        ("__class__", "there is no rule '__class__'; choose from: "),
    ],
)
def test_an_unknown_rule_lists_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(RuleError) as caught:
        Rule(name, lr=0.1)
    assert str(caught.value) == hint + ", ".join(OPTIONS)
    assert all(known in str(caught.value) for known in ("SGD", "Adam", "Muon", "Add", "Assign"))


def test_sparse_adam_names_what_works() -> None:
    with pytest.raises(RuleError, match=r"no rule 'SparseAdam': .*Adam in place of SparseAdam.*--sync-every H"):
        Rule("SparseAdam", lr=0.1)


@pytest.mark.parametrize("key", ["momentun", "foreach", "params", "name", "self"])
def test_an_unknown_option_lists_what_there_is(key: str) -> None:
    """`name` and `self` too: over the wire they are keys like all others, not Python arguments."""
    expected = f"rule SGD has no option '{key}'; it has: lr, momentum, dampening, weight_decay, nesterov, maximize"
    for make in (lambda: Rule("SGD", **{key: 1}), lambda: RuleSpec("SGD", {key: 1}).rule()):
        with pytest.raises(RuleError) as caught:
            make()
        assert str(caught.value) == expected
    with pytest.raises(RuleError, match="rule Add has no option 'lr'; it has: none"):
        Rule("Add", lr=0.1)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor(3), 3),
        (torch.tensor([0.25]), 0.25),
        (np.float64(0.5), 0.5),  # a float that the wire would not carry
        (np.float32(0.5), 0.5),
        (np.int64(2), 2),
        (np.bool_(True), True),
        (np.array(0.5), 0.5),
        (1e-3, 1e-3),
        (None, None),
    ],
)
def test_numbers_of_tensors_and_arrays_become_plain(value: object, plain: object) -> None:
    """lr=torch.tensor(…) is torch's own way, lr=numpy.logspace(…)[k] is everybody's."""
    rule = Rule("SGD", lr=value)
    assert rule.options["lr"] == plain
    assert type(rule.options["lr"]) is type(plain)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule.spec), type=RuleSpec).rule() == rule


def test_pairs_become_plain_pairs() -> None:
    for betas in ((torch.tensor(0.9), 0.99), [0.9, np.float64(0.99)]):
        options = Rule("Adam", betas=betas).options["betas"]
        assert options == pytest.approx((0.9, 0.99))
        assert isinstance(options, tuple) and all(type(beta) is float for beta in options)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (torch.zeros(2), "Tensor"),
        (np.zeros(2), "ndarray"),
        (1j, "complex"),
        (torch.tensor(1j), "Tensor"),
        (len, "builtin_function_or_method"),
        ((0.9, (0.9,)), "tuple"),
        ({"lr": 1}, "dict"),
    ],
)
def test_what_is_no_plain_number_is_refused_by_its_name(value: object, kind: str) -> None:
    with pytest.raises(RuleError) as caught:
        Rule("SGD", lr=value)
    assert str(caught.value) == f"SGD(lr=…): {kind} is not a plain number"


@pytest.mark.parametrize("options", [{"lr": math.nan}, {"lr": torch.tensor(math.nan)}, {"betas": (0.9, math.nan)}])
def test_nan_is_refused(options: dict[str, object]) -> None:
    """One NaN among the hyperparameters and every parameter is NaN after the next round."""
    with pytest.raises(RuleError, match=f"rule Adam: {next(iter(options))} is NaN"):
        Rule("Adam", **options)


def test_equal_rules_are_one_group() -> None:
    one, same, other = Rule("SGD", lr=0.1, momentum=0.9), Rule("SGD", momentum=0.9, lr=0.1), Rule("SGD", lr=0.2)
    assert one == same and hash(one) == hash(same)
    assert one != other and one != "SGD"
    assert repr(other) == "Rule('SGD', lr=0.2)"


DESCENDING = [name for name in OPTIONS if name not in PLAIN | KERAS]


@pytest.mark.parametrize("name", DESCENDING)
def test_what_torch_keeps_as_state_is_a_state(name: str) -> None:
    more: dict[str, Any] = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}.get(name, {})
    more |= {"amsgrad": True} if "amsgrad" in OPTIONS[name] else {}
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **more)
    parameter.grad = torch.ones(4, 3)
    optimizer.step()
    kept = {key: torch.as_tensor(value) for key, value in optimizer.state[parameter].items() if value is not None}
    assert kept
    for key, tensor in kept.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        check_state(name, key, dtype, tuple(tensor.shape), ("float32", (4, 3)))


@pytest.mark.parametrize(
    ("key", "dtype", "shape"),
    [
        ("exp_avg", "float32", (1,)),
        ("exp_avg", "float32", ()),
        ("exp_avg", "float32", (11,)),
        ("exp_avg", "float32", (3, 4)),
        ("exp_avg", "bfloat16", (12,)),
        ("exp_avg", "float64", (12,)),
        ("step", "float32", (2,)),
        ("step", "float32", (0,)),
        ("stepp", "float32", ()),
    ],
)
def test_a_state_that_a_kernel_would_write_beyond_is_refused(key: str, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(RuleError, match=key):
        check_state("Adam", key, dtype, shape, ("float32", (12,)))
